"""What the runs of a line measured, round after round, smoothed as the paper draws it."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from fedshift.paper.figures.records import Line, Panel, Source
from fedshift.paper.figures.style import PLAIN, SHIFTED
from fedshift.paper.records import Record
from fedshift.report.curves import chosen, moving
from fedshift.report.style import COLOURS

LAYERS = 5  # as many as there is room for


def curve(line: Line, of: Callable[[Record], dict[int, float]]) -> tuple[list[int], list[list[float]]]:
    """Rounds that all runs of a line have, and each run smoothed over its own."""
    each = [of(record) for record in line.records]
    rounds = sorted(set.intersection(*(set(one) for one in each)))
    return rounds, [moving(np.array([one[t] for t in rounds])).tolist() for one in each]


def fitting(layers: list[str]) -> list[str]:
    """All of them, or as many as there is room for."""
    return [layers[i] for i in chosen(len(layers), LAYERS)]


def coloured(panel: Panel) -> list[tuple[Line, str]]:
    """The lines of a panel with their colours, which are the same in all figures."""
    plain = [(panel.plain, PLAIN)] if panel.plain else []
    return [*plain, *zip(panel.shifted, itertools.cycle((SHIFTED, *COLOURS[2:])), strict=False)]


def plot(
    axes: Axes, line: Line, of: Callable[[Record], dict[int, float]], colour: str, style: str = "-"
) -> list[float]:
    """The mean over seeds, and all of them between its edges; what it is like beyond the first tenth of the rounds.

    The beginning changes most, and would leave no room for anything else.
    """
    rounds, each = curve(line, of)
    columns = list(zip(*each, strict=True))
    means = [statistics.fmean(x) for x in columns]
    axes.plot(rounds, means, style, color=colour, label=line.label)
    if len(each) > 1:
        low, high = [min(x) for x in columns], [max(x) for x in columns]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
    return [x for t, x in zip(rounds, means, strict=True) if 10 * t > rounds[-1] and math.isfinite(x)]


def caption(source: Source, panels: Sequence[Panel], more: str = "") -> str:
    """What lines and bands are, below curves."""
    bands = any(len(line.records) > 1 for panel in panels for line in panel.lines)
    means = "mean over seeds of ten-round moving averages, bands: all seeds" if bands else "ten-round moving average"
    return f"{source.about(panels)}; {means}; the beginning cut off{more}"
