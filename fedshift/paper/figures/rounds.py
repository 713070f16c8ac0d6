"""What the runs of a line measured, round after round, smoothed as the paper draws it."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from fedshift.paper.figures.records import Line, Panel, Source
from fedshift.paper.figures.style import PLAIN, SHIFTED
from fedshift.paper.records import Record
from fedshift.report.palette import COLOURS
from fedshift.summary import WINDOW


def series(record: Record, name: str) -> dict[int, float]:
    """What was measured, by round; rounds without it are left out."""
    record.column(name)  # says what is wrong with it
    return {int(line["round"]): float(line[name]) for line in record.lines if line[name]}


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of the ten up to each, of fewer at the beginning, as the paper draws its curves.

    >>> smooth([1.0, 3.0] + [5.0] * 12)[:3], smooth([1.0, 3.0] + [5.0] * 12)[-1]
    ([1.0, 2.0, 3.0], 5.0)
    """
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def curve(line: Line, of: Callable[[Record], dict[int, float]]) -> tuple[list[int], list[list[float]]]:
    """Rounds that all runs of a line have, and each run smoothed over its own."""
    each = [of(record) for record in line.records]
    rounds = sorted(set.intersection(*(set(one) for one in each)))
    return rounds, [smooth([one[t] for t in rounds]) for one in each]


def coloured(panel: Panel) -> list[tuple[Line, str]]:
    """The lines of a panel with their colours, which are the same in all figures."""
    plain = [(panel.plain, PLAIN)] if panel.plain else []
    return [*plain, *zip(panel.shifted, itertools.cycle((SHIFTED, *COLOURS[2:])), strict=False)]


def plot(axes: Axes, line: Line, of: Callable[[Record], dict[int, float]], colour: str, style: str = "-") -> None:
    """The mean over seeds, and all of them between its edges."""
    rounds, each = curve(line, of)
    columns = list(zip(*each, strict=True))
    axes.plot(rounds, [statistics.fmean(x) for x in columns], style, color=colour, label=line.label)
    if len(each) > 1:
        low, high = [min(x) for x in columns], [max(x) for x in columns]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)


def caption(source: Source, panels: Sequence[Panel], more: str = "") -> str:
    """What lines and bands are, below curves."""
    bands = any(len(line.records) > 1 for panel in panels for line in panel.lines)
    means = "mean over seeds of ten-round moving averages, bands: all seeds" if bands else "ten-round moving average"
    return f"{source.about(panels)}; {means}; the beginning cut off{more}"


def after_beginning(axes: Axes) -> list[float]:
    """What the lines of a panel are like beyond the first tenth of the rounds, where they change most."""
    found: list[float] = []
    for line in axes.get_lines():
        x, y = line.get_data()
        limit = x[0] + (x[-1] - x[0]) / 10
        found += [float(value) for t, value in zip(x, y, strict=True) if t >= limit and math.isfinite(value)]
    return found or [0.0, 1.0]
