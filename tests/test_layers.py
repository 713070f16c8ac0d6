"""Which package may import which, and no cycles between modules."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fedshift

ROOT = Path(fedshift.__file__).parent
LAYERS = [
    {"core"},
    {"codecs", "data", "models", "algorithms"},
    {"wire"},
    {"rounds"},
    {"engines", "policies"},
    {"experiment"},
    {"runs"},
    {"report", "track", "flower"},
    {"paper", "bench"},
    {"cli"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def name_of(file: Path) -> str:
    """The module of a file, without the library's own name: 'codecs.base'."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


# `python -m fedshift` is a script above all layers
MODULES = {name_of(file): file for file in ROOT.rglob("*.py") if file.name != "__main__.py"}


def imported(file: Path) -> set[str]:
    """The modules that a file imports, lazily or not: ours as '.codecs.base', others by the name of their library."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            library, _, module = (node.module or "").partition(".")
            if library != "fedshift":
                found.add(library)
                continue
            inside = {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {f".{name if name in MODULES else module}" for name in inside}
    return found


def ours(file: Path) -> set[str]:
    return {name[1:] for name in imported(file) if name.startswith(".") and name != "."}


def package(module: str) -> str:
    return module.partition(".")[0]


def test_packages_import_only_from_lower_layers() -> None:
    assert len(LAYERS) <= 10
    assert set(LEVEL) == {package(module) for module in MODULES} - {""}
    for module, file in MODULES.items():
        for other in ours(file) if module else ():
            allowed = package(other) == package(module) or LEVEL[package(other)] < LEVEL[package(module)]
            assert allowed, f"{module} imports {other}, which is not in a lower layer"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: ours(file) - {module} for module, file in MODULES.items() if module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(" <- ".join(cycle.args[1]))


def test_each_package_says_what_it_knows() -> None:
    for module, file in MODULES.items():
        if file.name == "__init__.py":
            assert ast.get_docstring(ast.parse(file.read_text())), module


def test_a_report_reads_records_and_knows_nothing_of_training() -> None:
    training = {"engines", "rounds", "runs.run", "runs.parallel", "runs.packs", "runs.sweep", "flower"}
    for module, file in MODULES.items():
        if package(module) == "report":
            assert "torch" not in imported(file), module
            assert not {name for name in ours(file) if package(name) in training or name in training}, module


def test_only_one_package_knows_flower() -> None:
    assert {package(name) for name, file in MODULES.items() if {"flwr", "ray"} & imported(file)} == {"flower"}


def test_what_is_added_to_an_existing_flower_app_knows_nothing_of_experiments() -> None:
    for module, file in MODULES.items():
        if module.startswith("flower.addon"):
            others = {name for name in ours(file) if package(name) != "flower"}
            assert all(LEVEL[package(name)] <= LEVEL["rounds"] for name in others), module
            assert not {name for name in ours(file) if name.startswith("flower.app")}, module
