"""Every block of code in the README and in docs/ is run, or checked as far as it can be."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import LANGUAGES, PAGES, ROOT, Block, blocks, indented
from tests.docs.session import Session, missing

BLOCKS = [block for page in PAGES for block in blocks(page)]
# what takes hours on any machine: these commands are understood by the command line, and that is all a test can say
ONLY_PARSED = {
    "fedshift paper table1 --estimate": "trains a round of every kind on CIFAR-10",
    "fedshift paper table1 --bits 4 8 --algorithms fedpaq fedef --seeds 1 --rounds 200": "eight runs of 200 rounds",
    "fedshift paper beyond --estimate": "trains a round of every kind on CIFAR-10",
    "fedshift paper uplinks --estimate": "trains a round of every kind on CIFAR-10",
    "fedshift paper rivals --estimate": "trains a round of every kind on CIFAR-10",
    "fedshift paper centred --estimate": "trains a round of every kind on CIFAR-10",
    "fedshift paper differences --estimate": "trains a round of every kind on CIFAR-10",
    "fedshift paper all --seeds 3 --minutes 60": "an hour, by its own words",
    "fedshift paper all --records results --minutes 60": "the same",
    "fedshift data fashion-mnist": "downloads 31 MB",
    "fedshift paper small --estimate": "trains a round of every kind on Fashion-MNIST",
    "fedshift paper small --minutes 60": "an hour, by its own words",
    "fedshift paper publish runs/small --to results/small": "publishes those runs",
    "fedshift paper report small": "needs published records",
    "fedshift frontier --task synthetic --brief --seeds 3": "24 runs of 200 rounds",
    "fedshift paper publish runs/frontier-synthetic-brief --to results/tasks/synthetic": "publishes those runs",
    "fedshift paper dadaquant --seeds 3": "33 runs of 500 rounds",
    "fedshift paper publish runs/dadaquant --to results/tasks/dadaquant": "publishes those runs",
    "fedshift paper report tasks": "needs published records",
}


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Session]:
    """The reader of a page; blocks that are tested later find what earlier ones left."""
    return functools.cache(lambda page: Session(page, tmp_path_factory.mktemp(page.stem)))


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.place, marks=[pytest.mark.slow] * (block.says("slow") is not None))
        for block in BLOCKS
        if block.language != "text"
    ],
)
def test_a_block_does_what_it_says(block: Block, session: Callable[[Path], Session]) -> None:
    if why := missing(block):
        pytest.skip(why)
    session(block.page).reach(block)


def test_all_code_stands_in_a_fence_with_its_language() -> None:
    for page in PAGES:
        assert not indented(page), f"{page.relative_to(ROOT)}: code without a fence in lines {indented(page)}"
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.place}: {block.language!r} is none of {LANGUAGES}"


def test_the_text_names_a_file_before_it_is_shown() -> None:
    """A title is not seen everywhere."""
    for block in BLOCKS:
        assert not block.title or f"`{block.title}`" in block.before, f"{block.place}: {block.title}"


def test_no_block_is_only_parsed_but_those_that_take_hours() -> None:
    lines = [line for block in BLOCKS if block.says("only parsed") is not None for line in block.code.splitlines()]
    assert {line.partition("  #")[0].strip() for line in lines} == set(ONLY_PARSED)


def test_what_is_printed_is_compared_with_what_ran_as_it_stands() -> None:
    for before, block in zip([None, *BLOCKS], BLOCKS, strict=False):
        if block.language == "output":
            assert before is not None
            assert before.language in ("bash", "python"), block.place
            assert not before.title, block.place
            assert before.says("with") is None, f"{block.place}: follows a block that the test changes; make it text"
