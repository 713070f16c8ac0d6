"""How a run goes, beyond its accuracy: what it predicts, how far the model and the clients move.

Single rounds wander, and one round is like the next; so a figure is the mean of the last hundred rounds, in blocks of
ten whose spread tells how sure it is.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedshift.core.tables import Listing
from fedshift.paper.experiments import Cell
from fedshift.paper.records import FinishedRun, Results

LATE, BLOCK = 100, 10
SURE = 2.0  # standard errors


class Blocks(NamedTuple):
    """Means of ten rounds each, the last hundred rounds of one or more seeds."""

    values: dict[tuple[int, int], float]  # by seed and block

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def uncertainty(self) -> float:
        """The standard error of the mean."""
        values = list(self.values.values())
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf

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
        """Block by block over the seeds both have: the same clients trained in the same rounds."""
        both = sorted(self.values.keys() & other.values.keys())
        if not both:
            return Blocks({(0, 0): self.mean - other.mean})
        return Blocks({key: self.values[key] - other.values[key] for key in both})


def blocks(values: Sequence[float]) -> list[float]:
    """Means of ten, of the last hundred.

    >>> blocks([9.0] * 50 + [1.0] * 90 + [2.0] * 10)[-2:]
    [1.0, 2.0]
    """
    late = values[-LATE:]
    return [statistics.fmean(late[i : i + BLOCK]) for i in range(0, len(late), BLOCK)]


def odd_share(record: FinishedRun) -> list[float]:
    """Share of predictions on the test set that are odd labels, which quantized clients hold, round after round."""
    labels = record.layers("predicted")
    odd = [record.column(f"predicted.{label}") for label in labels if int(label) % 2]
    every = [record.column(f"predicted.{label}") for label in labels]
    return [sum(some) / sum(all_) for some, all_ in zip(zip(*odd, strict=True), zip(*every, strict=True), strict=True)]


def leaning(results: Results, cell: Cell) -> Blocks | None:
    """The share of odd labels late in the runs of a cell; None where it was not run."""
    records = results.of(cell)
    values = {(seed, i): x for seed, record in records.items() for i, x in enumerate(blocks(odd_share(record)))}
    return Blocks(values) if values else None


def late(record: FinishedRun, figure: str, rounds: slice = slice(-LATE, None)) -> dict[str, float]:
    """Mean size of a figure over the last hundred rounds, layer by layer."""
    return {
        layer: statistics.fmean(map(abs, record.column(f"{figure}.{layer}")[rounds])) for layer in record.layers(figure)
    }


def layer_ratios(results: Results, figure: str, below: Cell, above: Cell) -> dict[str, float]:
    """Figure of one cell over that of another, layer by layer, over the seeds both have; {} without any."""
    ours, theirs = results.of(above), results.of(below)
    seeds = sorted(ours.keys() & theirs.keys())
    pairs = [(late(ours[seed], figure), late(theirs[seed], figure)) for seed in seeds]
    layers = list(pairs[0][0]) if pairs else []
    return {layer: sum(a[layer] for a, _ in pairs) / (sum(b[layer] for _, b in pairs) or math.inf) for layer in layers}


def early_ratios(results: Results, figure: str, cell: Cell) -> dict[str, float]:
    """Figure late in the runs of a cell over that of the first hundred rounds; {} where it was not run."""
    records = list(results.of(cell).values())
    pairs = [(late(record, figure), late(record, figure, slice(LATE))) for record in records]
    layers = list(pairs[0][0]) if pairs else []
    return {layer: sum(a[layer] for a, _ in pairs) / (sum(b[layer] for _, b in pairs) or math.inf) for layer in layers}


def curves(cells: Sequence[Cell], results: Results, every: int = 100) -> Listing:
    """Figure 7: accuracy, the mean of ten rounds, every so often, mean over seeds."""
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
    return Listing("Figure 7: accuracy, mean of ten rounds, at round", columns, lines, 3)


def _moving(scores: Sequence[float], at: int) -> float:
    """The mean of the ten rounds up to one; of the last ten where there are not as many."""
    end = min(at, len(scores))
    return statistics.fmean(scores[max(0, end - BLOCK) : end])


def predictions(cells: Sequence[Cell], results: Results) -> Listing:
    """Figure 8: how often each label is predicted, and the odd ones together, in percent."""
    lines: list[tuple[str, ...]] = []
    labels: list[str] = []
    for cell in cells:
        records = list(results.of(cell).values())
        odd = leaning(results, cell)
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
    return Listing("Figure 8: predicted labels in percent, last hundred rounds", columns, padded, 3)


def movement(cells: Sequence[Cell], results: Results) -> Listing:
    """Figure 9: the step between rounds and the drift of clients, layer by layer, last hundred rounds."""
    lines: list[tuple[str, ...]] = []
    layers: list[str] = []
    for cell in cells:
        records = list(results.of(cell).values())
        for figure, what in (("step", "between rounds"), ("drift", "client drift"), ("mean_after", "size of mean")):
            if not records:
                lines.append((*cell.label, what, "not run"))
                continue
            found = [late(record, figure) for record in records]
            layers = list(found[0])
            lines.append((*cell.label, what, *(f"{statistics.fmean(sizes[x] for sizes in found):.3g}" for x in layers)))
    columns = "algorithm", "bits", "shift", "what", *(layers or ["layers"])
    padded = [row + ("",) * (len(columns) - len(row)) for row in lines]
    return Listing("Figure 9: how far models move, last hundred rounds", columns, padded, 4)
