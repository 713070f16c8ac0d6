"""Shakespeare's plays as text of roles: predict the next character, one client per role of a play, as in LEAF.

A text is a play in paragraphs. A paragraph whose first line is a name is a speech of that role; one without a name
continues the speech before; paragraphs in brackets are stage directions, and headings end a speech. The lines of a
speech are joined by spaces, the speeches of a role by line ends. Roles with a single speech are left out: most of them
are lines that only look like a name. The first 80 % of a role's text are for training, the rest for testing, and no
window of 80 characters crosses that border. Of all windows, every `stride`-th one is an example; LEAF has all of them
(stride 1, 325 MB). The targets are the characters after the last `positions` characters of a window: one in LEAF, as
many as a window has (80, with stride 80) in McMahan et al., where a window has 80 targets.

Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018, arXiv:1812.01097; McMahan et al., AISTATS 2017.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedshift.data.catalog import DataError

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # of LEAF
WINDOW = 80  # characters
STRIDE = 1_000_000  # maximum; a role's text is shorter
TRAIN = 0.8  # share of a role's text
HEADING = re.compile(r"(act|scene|prologue|epilogue|induction|chorus|the prologue)\b", re.IGNORECASE)
NARRATOR = re.compile(r"(prologue|epilogue|chorus)\.?", re.IGNORECASE)  # a heading, or a role before its speech
NAME = re.compile(r"[A-Z][A-Za-z',& ]{0,39}\.?")
WORDS = 4  # of a name, at most
NUMERAL = re.compile(r"[IVX]+")


def roles(play: str) -> dict[str, str]:
    r"""Text of each role with two speeches or more, in the order of appearance.

    >>> roles("ACT I.\n\nANN.\nWho's\nthere?\n\n[Enter Bob.]\n\nBOB.\nI.\n\nANN.\nGood.\n\nLeave.\n\nBOB.\nNo.")
    {'ANN': "Who's there?\nGood. Leave.", 'BOB': 'I.\nNo.'}
    """
    speeches: dict[str, list[str]] = {}
    role, begun = "", False
    for paragraph in re.split(r"\n\s*\n", play):
        first, *rest = (line.strip() for line in paragraph.strip().split("\n"))
        if HEADING.match(first) and not (rest and NARRATOR.fullmatch(first)):
            role, begun = "", True
        elif begun and first and not first.startswith("["):
            if rest and _is_name(first):
                role = " ".join(first.rstrip(".").upper().split())
                speeches.setdefault(role, []).append(" ".join(rest))
            elif role:
                speeches[role][-1] += " " + " ".join([first, *rest])
    return {role: "\n".join(spoken) for role, spoken in speeches.items() if len(spoken) > 1}


def _is_name(line: str) -> bool:
    known = NAME.fullmatch(line) and (line.endswith(".") or line.isupper()) and len(line.split()) <= WORDS
    return bool(known) and not NUMERAL.fullmatch(line.rstrip("."))


def encode(text: str) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Numbers of characters in `LETTERS`; other characters count as spaces.

    >>> encode("A?\\n{").tolist()
    [25, 24, 0, 1]
    """
    table = np.full(256, LETTERS.index(" "), np.int8)
    table[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    return table[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def shakespeare(plays: Mapping[str, str], stride: int = 10, positions: int = 1) -> dict[str, Any]:
    """Arrays x, y, test_x, test_y, owner and test_owner, and the names of owners as `owners`.

    x (n, 80) int8, characters as numbers; y (n,), the next one, or (n, positions), those after the last positions.

    >>> speech = "BOB.\\n" + "abcdefghij" * 20
    >>> arrays = shakespeare({"a play": f"ACT I.\\n\\n{speech}\\n\\nBOB.\\n{speech}"}, stride=1)
    >>> arrays["owners"], arrays["x"].shape, arrays["test_x"].shape
    (('a play, BOB',), (244, 80), (2, 80))
    """
    for name, number, most in ("stride", stride, STRIDE), ("positions", positions, WINDOW):
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
            raise DataError(f"args.{name} = {number!r}: must be a whole number from 1 to {most:,}")
    texts = {f"{play}, {role}": encode(text) for play, words in plays.items() for role, text in roles(words).items()}
    cuts = [int(TRAIN * len(text)) for text in texts.values()]
    train = [text[:cut] for text, cut in zip(texts.values(), cuts, strict=True)]
    test = [text[cut:] for text, cut in zip(texts.values(), cuts, strict=True)]
    x, y, owner = _windows(train, stride, positions)
    test_x, test_y, test_owner = _windows(test, stride, positions)
    arrays = {"x": x, "y": y, "test_x": test_x, "test_y": test_y, "owner": owner, "test_owner": test_owner}
    return arrays | {"owners": tuple(texts)}


def _windows(texts: list[Any], stride: int, positions: int) -> tuple[Any, Any, Any]:
    """Windows of each text, the characters after their last positions, and the number of its text."""
    lengths = np.array([len(text) for text in texts])
    counts = np.maximum(0, -(-(lengths - WINDOW) // stride))
    owner = np.repeat(np.arange(len(texts)), counts)
    turn = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(np.cumsum(lengths) - lengths, counts) + turn * stride
    joined = np.concatenate(texts)
    x, y = (
        np.lib.stride_tricks.sliding_window_view(joined, length)[first]
        for length, first in ((WINDOW, start), (positions, start + WINDOW + 1 - positions))
    )
    return x, y if positions > 1 else y[:, 0], owner
