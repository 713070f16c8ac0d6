"""Read and write the CSV files of a record, rounds.csv and clients.csv, and compute uploaded bytes.

Damaged lines are skipped and counted. Estimated bytes are corrected by the rounds in which real frames were made as
well.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.core.files import RunError
from fedshift.runs.columns import ESTIMATES

PARTS, TOTAL = ("bytes.codes", "bytes.side", "bytes.header"), "bytes.up"  # published records have their sum
DAMAGE = "\0", "\ufffd"  # characters that show damage: bytes that are not UTF-8 are decoded as the second

Figures = NDArray[np.float64]


class Sheet(NamedTuple):
    """Complete lines of a CSV file, and the number of damaged ones."""

    path: Path
    header: list[str]
    lines: list[list[str]]
    lost: int

    def column(self, name: str) -> list[float]:
        """Values of a column without empty cells; RunError if a cell is not a number."""
        return [value for value in self.values(name) if value is not None]

    def uploaded(self) -> "Uploaded":
        """Bytes uploaded in the round of each line."""
        names = [name for name in (*PARTS, TOTAL, *ESTIMATES) if name in self.header]
        figures = {name: np.array(self.values(name), dtype=np.float64) for name in names}
        return uploaded(figures, len(self.lines))

    def by_round(self, name: str) -> dict[int, float]:
        """Values of a column by round, without empty cells."""
        pairs = zip(self.values("round"), self.values(name), strict=True)
        return {int(number or 0): value for number, value in pairs if value is not None}

    def layers(self, figure: str) -> list[str]:
        """Names of the layers for which a figure is recorded."""
        return layers(self.header, figure)

    def values(self, name: str) -> list[float | None]:
        """Values of a column, None for empty cells; RunError if a cell is not a number."""
        if name not in self.header:
            raise RunError(f"{self.path}: has no column {name}")
        place = self.header.index(name)
        try:
            return [float(cells[place]) if cells[place] else None for cells in self.lines]
        except ValueError:
            raise RunError(f"{self.path}: {name}: contains a value that is not a number") from None


class Estimate(NamedTuple):
    """Number of rounds of a run whose uploaded bytes are estimates, and the factor of their correction."""

    rounds: int  # total
    estimated: int  # rounds whose bytes are estimates, times the ratio
    framed: int  # rounds in which real frames were made to check the estimate
    ratio: float  # real over estimated bytes in the framed rounds; 1 without any


class Uploaded(NamedTuple):
    """Uploaded bytes of a run; estimates are corrected."""

    up: Figures  # (n,) bytes that all clients sent in a round
    correction: Figures  # (n,) part of `up` that is due to the ratio
    estimate: Estimate


def uploaded(figures: Mapping[str, Figures], rounds: int) -> Uploaded:
    """Bytes uploaded in each round; estimates are multiplied by sum(framed) / sum(estimated) of the framed rounds.

    NaN and infinite bytes count as 0.

    >>> found = {"bytes.up": [98, 200], "bytes.estimated": [100, 200], "bytes.framed": [98, math.nan]}
    >>> sent = uploaded({name: np.array(values) for name, values in found.items()}, 2)
    >>> sent.up.tolist(), sent.estimate
    ([98.0, 196.0], Estimate(rounds=2, estimated=1, framed=1, ratio=0.98))
    """
    nothing = np.full(rounds, math.nan)
    names = (TOTAL,) if TOTAL in figures else PARTS
    sums = sum((figures.get(name, nothing) for name in names), np.zeros(rounds))
    sums = np.where(np.isfinite(sums), sums, 0.0)
    estimated, framed = (figures.get(name, nothing) for name in ESTIMATES)
    both, only = np.isfinite(estimated) & np.isfinite(framed), np.isfinite(estimated) & np.isnan(framed)
    real, approximate = float(framed[both].sum()), float(estimated[both].sum())
    ratio = real / approximate if approximate > 0 and 0 < real / approximate < math.inf else 1.0
    correction = np.where(only, (ratio - 1) * sums, 0.0)
    return Uploaded(sums + correction, correction, Estimate(rounds, int(only.sum()), int(both.sum()), ratio))


def estimates(runs: Iterable[Estimate]) -> str:
    """Sentence on how the uploaded bytes of runs were estimated; '' if none were.

    >>> estimates([Estimate(100, 98, 2, 1.0012), Estimate(100, 98, 2, 1.0031), Estimate(100, 0, 0, 1.0)])
    'Uploaded bytes of 196 of 300 rounds are estimated from counts of codes, times 1.0012 to 1.0031, the ratio of \
real frames to estimates measured in 4 rounds.'
    """
    runs = list(runs)
    estimated = [estimate for estimate in runs if estimate.estimated]
    if not estimated:
        return ""
    framed = sum(estimate.framed for estimate in estimated)
    ends = list(dict.fromkeys(f"{end([estimate.ratio for estimate in estimated]):.5g}" for end in (min, max)))
    rounds, every = sum(estimate.estimated for estimate in estimated), sum(estimate.rounds for estimate in runs)
    which = f"Uploaded bytes of {rounds} of {every} rounds"
    how = f"times {' to '.join(ends)}, the ratio of real frames to estimates measured in {framed} round"
    if not framed:
        return f"{which} are estimated from counts of codes, and no real frames were made to check them."
    return f"{which} are estimated from counts of codes, {how}{'s' * (framed > 1)}."


def layers(columns: Iterable[str], figure: str) -> list[str]:
    """Names of the layers with a column of this figure.

    >>> layers(["round", "step.fc1.weight", "drift.fc1.weight"], "step")
    ['fc1.weight']
    """
    return [name.removeprefix(f"{figure}.") for name in columns if name.startswith(f"{figure}.")]


def sheet(path: Path) -> Sheet:
    """Read the complete lines of a CSV file; a last line without a newline is incomplete."""
    try:
        first, *lines = path.read_bytes().split(b"\n")
    except OSError as problem:
        raise RunError(f"{path}: cannot be read: {problem.strerror}") from None
    columns = cells(first.decode("utf-8", errors="replace"))
    cut = lines.pop() if lines else first
    whole = list(whole_lines(lines, len(columns)))
    return Sheet(path, columns, whole, len(lines) - len(whole) + bool(cut))


def whole_lines(lines: Iterable[bytes], columns: int) -> Iterator[list[str]]:
    """Cells of the lines that are text with this many columns; other lines are damaged and skipped."""
    texts = (line.decode("utf-8", errors="replace") for line in lines)
    split = (cells(text) for text in texts if not any(sign in text for sign in DAMAGE))
    return (found for found in split if len(found) == columns)


def cells(text: str) -> list[str]:
    """Cells of one line, [] if it cannot be parsed. Parsed alone, a stray quotation mark affects no other line."""
    text = text.removesuffix("\r")
    if '"' not in text and len(text) <= csv.field_size_limit():
        return text.split(",")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:  # a field that is too long
        return []


def csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """Rows of cells as lines of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
