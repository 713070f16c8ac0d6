"""Curves of rounds: moving averages, means and bands over seeds, with a limited number of points and digits."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedshift.experiment.settings import Experiment
from fedshift.report.charts import Axis, Curve
from fedshift.report.lines import Strand
from fedshift.runs.recorded import Recorded
from fedshift.runs.sheet import Figures
from fedshift.runs.summary import WINDOW, directed, metric

POINTS = 25_000  # limit for all curves of a chart together
MOST, LEAST = 200, 12  # points of one curve
ROUND = Axis("round")
AVERAGE = "Moving average over ten evaluated rounds, fewer at the beginning; mean over seeds."
BAND = "Band: from the lowest seed to the highest."


class MeasuredRounds(NamedTuple):
    """Rounds and values of one figure of one run."""

    rounds: Figures
    values: Figures


Measure = Callable[[Recorded], MeasuredRounds]


def every(name: str) -> Measure:
    """Measure of a column in all rounds that have a value."""

    def measure(run: Recorded) -> MeasuredRounds:
        values = run.figure(name)
        present = ~np.isnan(values)
        return MeasuredRounds(run.rounds[present].astype(float), values[present])

    return measure


def averaged(of: Callable[[Recorded], Figures]) -> Measure:
    """Measure of the moving average over ten evaluated rounds."""

    def measure(run: Recorded) -> MeasuredRounds:
        return MeasuredRounds(run.rounds[run.evaluated].astype(float), moving(of(run)[run.evaluated]))

    return measure


def score(run: Recorded) -> Figures:
    return run.scores


def moving(values: Figures, window: int = WINDOW) -> Figures:
    """Mean of the last `window` values, fewer at the beginning.

    >>> moving(np.array([2.0, 4.0, 6.0, 8.0]), 2).tolist()
    [2.0, 3.0, 5.0, 7.0]
    """
    first = [values[: i + 1].mean() for i in range(min(window - 1, len(values)))]
    rest = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1) if len(values) >= window else []
    return np.concatenate([first, rest])


def sent(run: Recorded) -> Figures:
    """Cumulative uploaded bytes at the end of each round."""
    return np.cumsum(run.up)


def curve(
    strand: Strand,
    measure: Measure,
    points: int,
    across: Callable[[Recorded], Figures] | None = None,
    *,
    banded: bool = False,
    label: str = "",
    dashed: bool = False,
) -> list[Curve]:
    """Mean over seeds by round, or against the values of `across`; [] if nothing was measured."""
    found = [(run, measured) for run in strand.runs if len((measured := measure(run)).rounds)]
    if not found:
        return []
    grid = np.unique(np.concatenate([measured.rounds for _, measured in found]))
    if strand.row is None:  # rounds that all seeds have reached
        grid = grid[grid <= min(measured.rounds[-1] for _, measured in found)]
        if not len(grid):
            return []
    grid = grid[chosen(len(grid), points)]
    values = np.stack([np.interp(grid, *measured) for _, measured in found])
    x = grid if across is None else np.mean([np.interp(grid, run.rounds, across(run)) for run, _ in found], axis=0)
    band = banded and len(found) > 1
    return [
        Curve(
            line=strand.line.key,
            x=[cut(value) or 0 for value in x],
            y=cuts(values.mean(axis=0)),
            low=cuts(values.min(axis=0)) if band else (),
            high=cuts(values.max(axis=0)) if band else (),
            label=label,
            dashed=dashed,
        )
    ]


def chosen(count: int, points: int) -> list[int]:
    """Evenly spaced indices, including the first and the last.

    >>> chosen(10, 4), chosen(3, 4)
    ([0, 3, 6, 9], [0, 1, 2])
    """
    if count <= points:
        return list(range(count))
    return [round(i * (count - 1) / (points - 1)) for i in range(points)]


def points_per_curve(curves: int) -> int:
    """Number of points per curve for a chart with this many curves."""
    return max(LEAST, min(MOST, POINTS // max(1, curves)))


def cut(x: float, digits: int = 5) -> float | None:
    """Round to significant digits; None for NaN and infinity.

    >>> cut(0.123456789), cut(150.0), cut(math.nan)
    (0.12346, 150, None)
    """
    if not math.isfinite(x):
        return None
    short = float(f"{x:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def cuts(values: Sequence[float] | Figures, digits: int = 5) -> list[float | None]:
    return [cut(float(x), digits) for x in values]


def titled(experiment: Experiment) -> str:
    """Name of the metric at the beginning of a title; names of custom metrics are not capitalized."""
    return "Accuracy" if experiment.train.metric == "accuracy" else metric(experiment)


def score_axis(experiment: Experiment) -> Axis:
    return Axis(directed(experiment), "%" if experiment.train.metric == "accuracy" else "")


def by_metric(strands: Sequence[Strand]) -> list[tuple[str, list[Strand]]]:
    """Lines grouped by metric, one chart each, with the suffix of the chart's name."""
    kinds: dict[str, list[Strand]] = {}
    for strand in strands:
        kinds.setdefault(directed(strand.experiment), []).append(strand)
    return [("" if i == 0 else f"-{i + 1}", some) for i, some in enumerate(kinds.values())]
