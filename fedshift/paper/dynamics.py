"""Dynamics of a run beyond its accuracy: predicted labels, and movement of the model and of the clients.

Single rounds fluctuate, and successive rounds are correlated. A figure is therefore the mean of the last hundred
rounds, in blocks of ten, and its standard error is computed from the spread of the blocks.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedshift.core.tables import Listing
from fedshift.paper.experiments import Cell
from fedshift.paper.records import FinishedRun, Results
from fedshift.runs.summary import deviation

LATE, BLOCK = 100, 10
SURE = 2.0  # standard errors


class Blocks(NamedTuple):
    """Means of ten rounds each, over the last hundred rounds of one or more seeds."""

    values: dict[tuple[int, int], float]  # by seed and block

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def uncertainty(self) -> float:
        """Standard error of the mean."""
        values = list(self.values.values())
        return deviation(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf

    @property
    def percent(self) -> str:
        """
        >>> Blocks({(0, 0): 0.50, (0, 1): 0.52}).percent
        '51.0 ± 1.0'
        """
        return f"{100 * self.mean:.1f}" + ("" if math.isinf(self.uncertainty) else f" ± {100 * self.uncertainty:.1f}")

    def above(self, limit: float) -> bool:
        """True if the mean is above the limit by more than two standard errors."""
        return self.mean - SURE * self.uncertainty > limit

    def minus(self, other: "Blocks") -> "Blocks":
        """Difference per block over the seeds that both have: the same clients trained in the same rounds."""
        both = sorted(self.values.keys() & other.values.keys())
        if not both:
            return Blocks({(0, 0): self.mean - other.mean})
        return Blocks({key: self.values[key] - other.values[key] for key in both})


def blocks(values: Sequence[float]) -> list[float]:
    """Means of ten values each, over the last hundred.

    >>> blocks([9.0] * 50 + [1.0] * 90 + [2.0] * 10)[-2:]
    [1.0, 2.0]
    """
    late = values[-LATE:]
    return [statistics.fmean(late[i : i + BLOCK]) for i in range(0, len(late), BLOCK)]


def odd_share(record: FinishedRun) -> list[float]:
    """Share of odd labels, those of quantized clients, in the predictions on the test set, per round."""
    labels = record.layers("predicted")
    odd = [record.column(f"predicted.{label}") for label in labels if int(label) % 2]
    every = [record.column(f"predicted.{label}") for label in labels]
    return [sum(a) / sum(b) for a, b in zip(zip(*odd, strict=True), zip(*every, strict=True), strict=True)]


def late_odd_share(results: Results, cell: Cell) -> Blocks | None:
    """Share of odd labels in the last hundred rounds of a cell; None if it was not run."""
    records = results.of(cell)
    values = {(seed, i): x for seed, record in records.items() for i, x in enumerate(blocks(odd_share(record)))}
    return Blocks(values) if values else None


def late(record: FinishedRun, figure: str, rounds: slice = slice(-LATE, None)) -> dict[str, float]:
    """Mean absolute value of a figure over the last hundred rounds, per layer."""
    return {
        layer: statistics.fmean(map(abs, record.column(f"{figure}.{layer}")[rounds])) for layer in record.layers(figure)
    }


def layer_ratios(results: Results, figure: str, below: Cell, above: Cell) -> dict[str, float]:
    """Figure of one cell divided by that of another, per layer, over the seeds that both have; {} without any."""
    ours, theirs = results.of(above), results.of(below)
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = [(late(ours[seed], figure), late(theirs[seed], figure)) for seed in seeds]
    layers = list(pairs[0][0]) if pairs else []
    return {layer: sum(a[layer] for a, _ in pairs) / (sum(b[layer] for _, b in pairs) or math.inf) for layer in layers}


def early_ratios(results: Results, figure: str, cell: Cell) -> dict[str, float]:
    """Figure of a cell over the last hundred rounds divided by that over the first; {} if it was not run."""
    records = list(results.of(cell).values())
    pairs = [(late(record, figure), late(record, figure, slice(LATE))) for record in records]
    layers = list(pairs[0][0]) if pairs else []
    return {layer: sum(a[layer] for a, _ in pairs) / (sum(b[layer] for _, b in pairs) or math.inf) for layer in layers}


def curves(cells: Sequence[Cell], results: Results, every: int = 100) -> Listing:
    """Figure 7: accuracy every hundred rounds, mean of ten rounds and of all seeds."""
    run = {cell: list(results.of(cell).values()) for cell in cells}
    rounds = max((len(record.scores) for records in run.values() for record in records), default=0)
    at = [*range(every, rounds, every), rounds] if rounds else []
    lines = [
        (*cell.label, *(f"{statistics.fmean(_moving(record.scores, t) for record in records):.1f}" for t in at))
        if records
        else (*cell.label, *["not run"] * max(1, len(at)))
        for cell, records in run.items()
    ]
    columns = "algorithm", "bits", "shift", *(map(str, at) if at else ("accuracy",))
    return Listing("Figure 7: accuracy in percent by round, mean of ten rounds", columns, lines, 3)


def _moving(scores: Sequence[float], at: int) -> float:
    """Mean of the ten rounds that end at a round, or at the last round of a shorter run."""
    end = min(at, len(scores))
    return statistics.fmean(scores[max(0, end - BLOCK) : end])


def predictions(cells: Sequence[Cell], results: Results) -> Listing:
    """Figure 8: frequency of each predicted label, and of all odd labels, in percent."""
    lines: list[tuple[str, ...]] = []
    labels: list[str] = []
    for cell in cells:
        records = list(results.of(cell).values())
        odd = late_odd_share(results, cell)
        if odd is None:
            lines.append((*cell.label, "not run"))
            continue
        labels = records[0].layers("predicted")
        shares = [
            statistics.fmean(x for record in records for x in record.column(f"predicted.{n}")[-LATE:]) for n in labels
        ]
        lines.append((*cell.label, odd.percent, *(f"{100 * share:.1f}" for share in shares)))
    columns = "algorithm", "bits", "shift", "odd labels", *labels
    padded = [row + ("",) * (len(columns) - len(row)) for row in lines]
    return Listing("Figure 8: frequency of predicted labels in percent, last hundred rounds", columns, padded, 3)


def movement(cells: Sequence[Cell], results: Results) -> Listing:
    """Figure 9: step between rounds, drift of clients and absolute mean, per layer, last hundred rounds."""
    lines: list[tuple[str, ...]] = []
    layers: list[str] = []
    for cell in cells:
        records = list(results.of(cell).values())
        for figure, name in (
            ("step", "step between rounds"),
            ("drift", "client drift"),
            ("mean_after", "absolute mean"),
        ):
            if not records:
                lines.append((*cell.label, name, "not run"))
                continue
            found = [late(record, figure) for record in records]
            layers = list(found[0])
            lines.append((*cell.label, name, *(f"{statistics.fmean(sizes[x] for sizes in found):.3g}" for x in layers)))
    columns = "algorithm", "bits", "shift", "quantity", *(layers or ["layers"])
    padded = [row + ("",) * (len(columns) - len(row)) for row in lines]
    return Listing("Figure 9: movement of models, last hundred rounds", columns, padded, 4)
