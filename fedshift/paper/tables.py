"""Comparison with the paper: accuracy of the last round, mean of the last ten, spread over seeds, and difference."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedshift.core.tables import Listing
from fedshift.paper.experiments import Cell
from fedshift.paper.records import Results

HEADS = {
    "table1": ("algorithm", "bits", "shift"),
    "table2": ("quantizer", "alpha", "bits", "shift"),
    "ablations": ("ablation", "bits", "shift"),
}
NAMES = {
    "table1": "Table 1: two labels per client, K-means",
    "table2": "Table 2: Dirichlet partitions, FedPAQ",
    "ablations": "Ablations beyond the paper: FedPAQ, two labels per client, K-means",
}
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

    def texts(self) -> tuple[str, ...]:
        """Line of a table."""
        theirs = "" if self.cell.published is None else str(self.cell.published)
        if self.mean is None or self.last is None:
            return *self.cell.label, NOT_RUN, NOT_RUN, "0", theirs, ""
        ours = f"{self.mean:.1f}" + ("" if self.spread is None else f" ± {self.spread:.1f}")
        difference = "" if self.difference is None else f"{self.difference:+.1f}"
        return *self.cell.label, f"{self.last:.1f}", ours, str(self.seeds), theirs, difference

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
    spread = statistics.stdev(scores) if len(scores) > 1 else None
    return Compared(cell, last, statistics.fmean(scores), spread, len(scores))


def listing(table: str, cells: Sequence[Cell], results: Results, rounds: int | None = None) -> Listing:
    """Table of cells in the paper's order, independent of the order in which they are run."""
    at = rounds or cells[0].rounds
    columns = *HEADS[table], f"round {at}", "last ten", "seeds", "paper", "difference"
    ordered = sorted(cells, key=place) if table in ("table1", "table2") else cells
    return Listing(NAMES[table], columns, [compared(cell, results).texts() for cell in ordered], len(HEADS[table]))


def place(cell: Cell) -> tuple[object, ...]:
    """Sort key for the paper's order: by algorithm or quantizer and alpha, then by bits, then by shift."""
    *before, _, _ = cell.label
    order = ("FedAvg", "FedPAQ", "Fed-EF", "FedProx", "SCAFFOLD", "uniform", "K-means")
    return order.index(before[0]), *map(float, before[1:]), cell.label[-2:]
