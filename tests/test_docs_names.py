"""The reference has every public name, each with an example; the map of docs/design.md has every package."""

import doctest
import re
import shlex
from importlib import import_module
from types import ModuleType

import pytest
from click import MissingParameter, UsageError

from tests.docs.blocks import PAGES, ROOT
from tests.docs.shell import parsed

PACKAGE = ROOT / "fedshift"
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
DESIGN = (ROOT / "docs" / "design.md").read_text()
NOT_DOCUMENTED_BY_CODE = {"Params", "__version__"}  # an alias and a text: pages show them in use
COMMAND = re.compile(r"(?<!`)`(fedshift [a-z][^`]*)`(?!`)")
ELLIPSIS = re.compile(r"\.\.\.|\|")  # stands for something else


def modules() -> list[ModuleType]:
    pytest.importorskip("flwr")
    return [import_module("fedshift"), import_module("fedshift.flower")]


def test_every_public_name_has_an_example() -> None:
    for module in modules():
        for name in set(module.__all__) - NOT_DOCUMENTED_BY_CODE:
            text = getattr(module, name).__doc__ or ""
            assert doctest.DocTestParser().get_examples(text), f"{module.__name__}.{name} has no example"
            assert not text.lstrip().startswith(">>>"), f"{module.__name__}.{name} says nothing before its example"


def test_every_public_name_is_in_the_reference() -> None:
    for module in modules():
        for name in set(module.__all__) - NOT_DOCUMENTED_BY_CODE:
            assert len(re.findall(rf"^::: fedshift\.[\w.]*\b{name}$", REFERENCE, re.MULTILINE)) == 1, name
    for name in NOT_DOCUMENTED_BY_CODE:
        assert name in REFERENCE


def test_the_map_has_every_package_and_nothing_else() -> None:
    """The map of docs/design.md: packages at the margin, and files of theirs by name."""
    drawn = DESIGN[DESIGN.index("\nfedshift/\n") :]
    drawn = drawn[: drawn.index("\n```")]
    entries = {entry.name + "/" * entry.is_dir() for entry in PACKAGE.iterdir() if not entry.name.startswith("_")}
    assert set(re.findall(r"^  (\w+(?:/|\.py)) ", drawn, re.MULTILINE)) == entries - {"py.typed"}
    there = {path.name for path in PACKAGE.rglob("*.py")}
    assert {f"{name}.py" for name in re.findall(r"\b(\w+)\.py\b", drawn)} <= there
    folders = {path.name for path in PACKAGE.rglob("*") if path.is_dir()}
    assert set(re.findall(r"\b(\w+)/", drawn)) <= folders | {"fedshift"}


def test_commands_in_the_text_are_understood() -> None:
    """Those between single backticks: results name the command that measured them."""
    found = [(page, text) for page in PAGES for text in COMMAND.findall(" ".join(page.read_text().split("\n")))]
    assert len(found) > 20
    for page, text in found:
        words = shlex.split(text)
        if not ELLIPSIS.search(text) and len(words) > 1:
            try:
                parsed(words)
            except MissingParameter:
                assert len(words) == 2, f"{page.relative_to(ROOT)}: `{text}` lacks an argument"  # a command's mere name
            except UsageError as problem:
                raise AssertionError(f"{page.relative_to(ROOT)}: `{text}`: {problem}") from problem
