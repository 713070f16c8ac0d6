"""Comparison with the paper: mean of the last ten rounds, accuracy of the last round, spread over seeds, difference."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fedshift.core.tables import Listing
from fedshift.paper.experiments import FILTER, LAYER, NO, Cell, Changed
from fedshift.paper.records import Results
from fedshift.runs.summary import WINDOW, deviation, difference

HEADS = {"table1": ("algorithm", "bits"), "table2": ("quantizer", "alpha", "bits")}
NAMES = {
    "table1": "Table 1: two labels per client, K-means",
    "table2": "Table 2: Dirichlet partitions, FedPAQ",
    "ablations": "Ablations beyond the paper: FedPAQ, two labels per client, K-means",
    "differences": "Reasons for differences from the paper",
}
ALL = (NO, LAYER, FILTER)
SHIFTS = ("no shift", "per layer", "per filter")
GAINS = ("layer adds", "filter adds")
COLUMNS = (*SHIFTS, *GAINS, "paper", "paper, shift", "above paper", "above, shift")
NOTE = (
    "Accuracy in percent, mean of the last ten rounds, ± sample standard deviation over seeds, number of seeds in "
    "brackets. Per layer is the paper's shift; per filter, with share 1, is not in the paper and belongs only to some "
    "rows. Layer adds, filter adds: gain of each over no shift, in points, over the seeds that both have. Above paper: "
    "our mean minus the paper's, without and with its shift."
)
NOT_RUN = "not run"


class Compared(NamedTuple):
    """Our figures of a cell, comparable with the paper's, in percent."""

    cell: Cell
    last: float | None  # of the last round, mean over seeds
    mean: float | None  # of the last ten rounds
    spread: float | None  # sample standard deviation over seeds
    seeds: int

    @property
    def difference(self) -> float | None:
        theirs = self.cell.published.mean if self.cell.published else None
        return None if self.mean is None or theirs is None else self.mean - theirs

    @property
    def score(self) -> str:
        """Mean of the last ten rounds, its spread, and the number of seeds."""
        spread = "" if self.spread is None else f" ± {self.spread:.1f}"
        return NOT_RUN if self.mean is None else f"{self.mean:.1f}{spread} ({self.seeds})"

    @property
    def last_round(self) -> str:
        """Accuracy of the last round, and the number of seeds."""
        return NOT_RUN if self.last is None else f"{self.last:.1f} ({self.seeds})"

    def as_dict(self) -> dict[str, Any]:
        theirs = self.cell.published
        return {
            "cell": self.cell.name,
            "last": self.last,
            "mean": self.mean,
            "spread": self.spread,
            "seeds": self.seeds,
            "paper": theirs and theirs.mean,
            "paper_spread": theirs and theirs.spread,
            "difference": self.difference,
        }


def compared(cell: Cell, results: Results) -> Compared:
    scores = list(results.scores(cell).values())
    if not scores:
        return Compared(cell, None, None, None, 0)
    last = statistics.fmean(record.last for record in results.of(cell).values())
    spread = deviation(scores) if len(scores) > 1 else None
    return Compared(cell, last, statistics.fmean(scores), spread, len(scores))


class TableRow(NamedTuple):
    """Row of Table 1 or 2: the same setting without a shift, with the paper's and with filter centring."""

    label: tuple[str, ...]
    cells: dict[str, Cell]  # by shift: NO, LAYER, FILTER; those that are part of the table

    def gain(self, shift: str, results: Results) -> float | None:
        """Gain of a shift over no shift; None if one of the two was not run."""
        plain, shifted = (results.scores(self.cells[kind]) if kind in self.cells else {} for kind in (NO, shift))
        return difference(shifted, plain)[0] if plain and shifted else None

    def gains(self, results: Results) -> list[str]:
        """Gain per layer and per filter over no shift, as text."""
        return [_signed(self.gain(shift, results)) for shift in (LAYER, FILTER)]

    def scores(self, results: Results) -> list[str]:
        """Scores without a shift, per layer and per filter; empty for a cell that the table does not have."""
        return [compared(self.cells[shift], results).score if shift in self.cells else "" for shift in ALL]

    def texts(self, results: Results) -> tuple[str, ...]:
        """Line of a table."""
        found = [compared(self.cells[shift], results) if shift in self.cells else None for shift in (NO, LAYER)]
        return (
            *self.label,
            *self.scores(results),
            *self.gains(results),
            *(str(line.cell.published) if line else "" for line in found),
            *(_signed(line.difference) if line else "" for line in found),
        )

    def last_rounds(self, results: Results) -> tuple[str, ...]:
        """Line of a table of last rounds."""
        found = [compared(self.cells[shift], results).last_round if shift in self.cells else "" for shift in ALL]
        return *self.label, *found


def _signed(points: float | None) -> str:
    """
    >>> _signed(1.25), _signed(-2.0), _signed(None)
    ('+1.2', '-2.0', '')
    """
    return "" if points is None else f"{points:+.1f}"


def rows(cells: Sequence[Cell]) -> list[TableRow]:
    """Rows of Table 1 or 2 in the paper's order, independent of the order in which cells are run."""
    found: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in sorted(cells, key=place):
        found.setdefault(cell.label[:-1], {})[cell.label[-1]] = cell
    return [TableRow(label, shifts) for label, shifts in found.items()]


def listing(table: str, cells: Sequence[Cell], results: Results) -> Listing:
    """Table 1 or 2 with one line per algorithm, or quantizer and alpha, and bits."""
    lines = [row.texts(results) for row in rows(cells)]
    return Listing(NAMES[table], (*HEADS[table], *COLUMNS), lines, len(HEADS[table]))


def last_rounds(table: str, cells: Sequence[Cell], results: Results, rounds: int | None = None) -> Listing:
    """Accuracies of the last round for the cells of Table 1 or 2."""
    title = f"{NAMES[table].partition(':')[0]}: accuracy of round {rounds or cells[0].rounds}"
    lines = [row.last_rounds(results) for row in rows(cells)]
    return Listing(title, (*HEADS[table], *SHIFTS), lines, len(HEADS[table]))


def ablations(cells: Sequence[Cell], results: Results, rounds: int | None = None) -> Listing:
    """Table with one line per cell."""
    found = [compared(cell, results) for cell in cells]
    columns = "ablation", "bits", "shift", f"round {rounds or cells[0].rounds}", "last ten"
    lines = [(*line.cell.label, line.last_round, line.score) for line in found]
    return Listing(NAMES["ablations"], columns, lines, 3)


def differences(changes: Sequence[Changed], results: Results) -> Listing:
    """Table with one line per change of a cell: its scores without and with the change, and the paper's."""
    start, end = ("change", "algorithm", "bits", "shift"), ("paper", "above paper", "above, changed")
    lines = []
    for change, cell, unchanged in changes:
        ours, new = compared(unchanged, results), compared(cell, results)
        before, after = results.scores(unchanged), results.scores(cell)
        adds = _signed(difference(after, before)[0] if before and after else None)
        above = [_signed(line.difference) for line in (ours, new)]
        lines.append((change, *cell.label, ours.score, new.score, adds, str(cell.published), *above))
    return Listing(NAMES["differences"], (*start, "ours", "changed", "change adds", *end), lines, len(start))


def place(cell: Cell) -> tuple[object, ...]:
    """Sort key for the paper's order: by algorithm or quantizer and alpha, then by bits, then by shift."""
    *before, bits, shift = cell.label
    order = ("FedAvg", "FedPAQ", "Fed-EF", "FedProx", "SCAFFOLD", "uniform", "K-means")
    return order.index(before[0]), *map(float, before[1:]), bits, ALL.index(shift)


# ways to score a run that the paper may mean, from its accuracies per round
SCORINGS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean of the last ten rounds": lambda scores: statistics.fmean(scores[-WINDOW:]),
    "last round": lambda scores: scores[-1],
    "best round": max,
    "mean of the last hundred rounds": lambda scores: statistics.fmean(scores[-100:]),
    "mean of all rounds": statistics.fmean,
    "mean of ten rounds up to round 400": lambda scores: statistics.fmean(scores[400 - WINDOW : 400]),
    "mean of ten rounds up to round 200": lambda scores: statistics.fmean(scores[200 - WINDOW : 200]),
}


def scorings(cells: Sequence[Cell], few: Sequence[Cell], results: Results) -> Listing:
    """Table with one line per way to score runs: differences from the paper over all cells, and of a few of them."""
    columns = "score", "cells", "mean", "lowest", "highest", "mean absolute", *(" ".join(x.label[:-1]) for x in few)
    lines = []
    for name, score in SCORINGS.items():
        found = {cell: _scored(cell, score, results) for cell in cells}
        points = [difference for difference in found.values() if difference is not None]
        if points:
            figures = [_signed(x) for x in (statistics.fmean(points), min(points), max(points))]
            absolute = f"{statistics.fmean(map(abs, points)):.1f}"
            lines.append((name, str(len(points)), *figures, absolute, *(_signed(found[cell]) for cell in few)))
    return Listing("Ways to score a run", columns, lines)


def _scored(cell: Cell, score: Callable[[Sequence[float]], float], results: Results) -> float | None:
    """Difference of a cell from the paper with another score; None if one of them is missing."""
    theirs, records = cell.published and cell.published.mean, results.of(cell).values()
    return statistics.fmean(score(x.scores) for x in records) - theirs if records and theirs is not None else None
