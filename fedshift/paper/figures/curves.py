"""Figures 7 and 9: accuracy, steps of the model and drift of clients by round, smoothed as in the paper."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from operator import methodcaller

import numpy as np
from matplotlib.axes import Axes

from fedshift.core.files import RunError
from fedshift.paper.figures.records import SeedLine, ShiftPanel, Source
from fedshift.paper.figures.style import COLUMN, EXACT, PAGE, PLAIN, SHIFTED, DrawnFigure, footnote, legend, sheet
from fedshift.paper.records import FinishedRun
from fedshift.report.curves import chosen, moving
from fedshift.report.style import COLOURS
from fedshift.runs.columns import column

LAYERS = 5  # largest number of layers in a figure
PANELS = 60  # largest number of panels in figure 7
ROWS = {
    "step": "between rounds,\n" + r"$|\hat{w}^{t}-\hat{w}^{t-1}|$",
    "drift": "client drift,\n" + r"mean of $|w_k^{t}-\hat{w}^{t-1}|$",
}


def curve(line: SeedLine, of: Callable[[FinishedRun], dict[int, float]]) -> tuple[list[int], list[list[float]]]:
    """Rounds that all runs of a line have, and the smoothed values of each run."""
    each = [of(record) for record in line.records]
    rounds = sorted(set.intersection(*(set(values) for values in each)))
    return rounds, [moving(np.array([values[t] for t in rounds])).tolist() for values in each]


def fitting(layers: list[str]) -> list[str]:
    """All layers, or a selection that fits in a figure."""
    return [layers[i] for i in chosen(len(layers), LAYERS)]


def coloured(panel: ShiftPanel) -> list[tuple[SeedLine, str]]:
    """Lines of a panel with their colours, which are the same in all figures."""
    plain = [(panel.plain, PLAIN)] if panel.plain else []
    colours = {"layer": itertools.cycle((SHIFTED, *COLOURS[3:])), "filter": itertools.cycle(COLOURS[2:])}
    return [*plain, *((line, next(colours[line.experiment.shift.per])) for line in panel.shifted)]


def plot(
    axes: Axes, line: SeedLine, of: Callable[[FinishedRun], dict[int, float]], colour: str, style: str = "-"
) -> list[float]:
    """Draw the mean over seeds and a band of all seeds; return the values after the first tenth of the rounds.

    They determine the limits of the axis, because values change most in the first rounds.
    """
    rounds, each = curve(line, of)
    columns = list(zip(*each, strict=True))
    means = [statistics.fmean(x) for x in columns]
    axes.plot(rounds, means, style, color=colour, label=line.label)
    if len(each) > 1:
        low, high = [min(x) for x in columns], [max(x) for x in columns]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
    return [x for t, x in zip(rounds, means, strict=True) if 10 * t > rounds[-1] and math.isfinite(x)]


def caption(source: Source, panels: Sequence[ShiftPanel], more: str = "") -> str:
    """Explanation of lines and bands, below the curves."""
    bands = any(len(line.records) > 1 for panel in panels for line in panel.lines)
    means = "mean over seeds of ten-round moving averages, bands: all seeds" if bands else "ten-round moving average"
    return f"{source.about(panels)}; {means}; first rounds cut off{more}"


def across(panels: Sequence[ShiftPanel]) -> int:
    """Number of panels per row: one for each number of bits if every row has the same bits."""
    rows: dict[tuple[str, str], list[str]] = {}
    for panel in panels:
        rows.setdefault((panel.algorithm, panel.more), []).append(panel.bits)
    first, *others = rows.values()
    if 1 < len(first) <= 5 and all(row == first for row in others):
        return len(first)
    return {6: 3, 7: 4, 8: 4}.get(len(panels), min(len(panels), 5))


def score(record: FinishedRun) -> dict[int, float]:
    """Accuracy in percent, or a user's metric unchanged."""
    name = column(record.experiment)
    return {t: (100 if name == "accuracy" else 1) * x for t, x in record.series(name).items()}


def draw_accuracy(source: Source) -> DrawnFigure:
    panels, wide = source.panels, across(source.panels)
    if len(panels) > PANELS:
        raise RunError(f"{source.folder}: its runs need {len(panels)} panels; figure 7 has at most {PANELS}")
    scores = sorted({column(line.experiment) for panel in panels for line in panel.all})
    if len(scores) > 1:
        raise RunError(
            f"{source.folder}: its runs have the metrics {' and '.join(scores)}; figure 7 needs runs of one metric"
        )
    high = math.ceil(len(panels) / wide)
    figure = sheet(PAGE if wide > 1 else COLUMN, 0.6 + (1.4 if wide > 3 else 1.8) * high)
    grid = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False)
    late: list[float] = []
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_axis_off()
            continue
        panel = panels[place]
        exact = [(panel.exact, EXACT, ":")] if panel.exact else []
        for line, colour, style in [*exact, *((*pair, "-") for pair in coloured(panel))]:
            late += plot(axes, line, score, colour, style)
        axes.set_title(f"{panel.title}\n{panel.more}" if panel.more else panel.title)
        if place + wide >= len(panels):  # lowest panel of its column
            axes.set_xlabel("round")
            axes.locator_params(axis="x", nbins=4, steps=[1, 2, 4, 5, 10])
            axes.tick_params(labelbottom=True)
    (name,) = scores
    for axes in grid[:, 0]:
        axes.set_ylabel("top-1 accuracy (%)" if name == "accuracy" else name.removeprefix("metric."))
    if late:
        margin = (max(late) - min(late)) / 10 or 1.0
        grid[0, 0].set_ylim(min(late) - margin / 2, max(late) + margin)
    legend(figure, grid.flat)
    footnote(figure, caption(source, panels))
    return DrawnFigure(figure, source.drawn(panels))


def draw_movement(source: Source) -> DrawnFigure:
    panel = source.pair._replace(exact=None)
    every = panel.lines[0].records[0].layers("step")
    if not every:
        raise RunError(f"{panel.lines[0].records[0].folder}: contains no values of layers, which figure 9 needs")
    layers = fitting(every)
    figure = sheet(PAGE, 3.3)
    grid = figure.subplots(len(ROWS), len(layers), sharex=True, squeeze=False)
    for row, (name, label) in enumerate(ROWS.items()):
        for axes, layer in zip(grid[row], layers, strict=True):
            of = methodcaller("series", f"{name}.{layer}")
            late = [x for line, colour in coloured(panel) for x in plot(axes, line, of, colour)]
            axes.set_ylim(0, 1.2 * max(late, default=1.0))
            if not row:
                axes.set_title(layer.removesuffix(".weight"))
            else:
                axes.set_xlabel("round")
        grid[row, 0].set_ylabel(label)
    legend(figure, grid.flat)
    selection = "" if layers == every else f"; {len(layers)} of {len(every)} layers"
    footnote(figure, f"{panel.title}. {caption(source, [panel], selection)}")
    return DrawnFigure(figure, source.drawn([panel]))
