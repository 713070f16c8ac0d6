"""Intervals and stacks, drawn: a row for each line, or for lines that are to be compared."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedshift.report.axes import MARKS, WIDE, colour, legend, scale, sheet
from fedshift.report.charts import Dash, Intervals, Line, Stacks

ROW = 0.24  # inches
APART = 0.26  # rows, between intervals of one band
GREY = "#555555"


def intervals(chart: Intervals, lines: Mapping[str, Line]) -> Figure:
    """Seeds as strokes, their mean as a mark that tells the shift, and the standard deviation as a bar."""
    rows = sum(bool(heading) + len(bands) for heading, bands in chart.bands)
    figure, (axes,) = sheet(chart.title, 1, 1.6 * WIDE, ROW * rows + 0.8)
    values = [x for _, bands in chart.bands for band in bands for one in band.intervals for x in one.seeds.values()]
    across = scale(chart.x, max(map(abs, values), default=0.0))
    at, ticks, names, bold = 0.0, list[float](), list[str](), set[int]()
    for heading, bands in chart.bands:
        if heading:
            bold.add(len(ticks))
            ticks, names, at = [*ticks, at], [*names, heading], at + 1
        for band in bands:
            ticks, names = [*ticks, at], [*names, band.label]
            for i, one in enumerate(band.intervals):
                line, y = lines[one.line], at + APART * (i - (len(band.intervals) - 1) / 2)
                ink = colour(line.colour)
                mark, face = MARKS[line.dash], "white" if line.dash == "dashed" else ink
                seeds = across.of(one.seeds.values())
                (mean,), spread = across.of([one.mean]), across.of([one.spread or 0.0])
                axes.errorbar(mean, y, xerr=spread, color=ink, marker=mark, markersize=5, markerfacecolor=face)
                axes.plot(seeds, [y] * len(seeds), "|", color=ink, markersize=6, alpha=0.7)
            at += 1
    axes.set_yticks(ticks, names)
    for i, label in enumerate(axes.get_yticklabels()):
        label.set_fontweight("bold" if i in bold else "normal")
    axes.set_ylim(at - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(across.label)
    dashes = {line.dash for line in lines.values()}
    if len(dashes) > 1:
        named = {"dashed": "no shift", "dotdash": "shift per layer"}
        solid = "shift per filter" if "dotdash" in dashes else "shift"
        legend(figure, [_mark(dash, named.get(dash, solid)) for dash in MARKS if dash in dashes])
    return figure


def _mark(dash: Dash, label: str) -> Line2D:
    """A mark of a legend."""
    face = "white" if dash == "dashed" else GREY
    return Line2D(
        [], [], color=GREY, marker=MARKS[dash], markersize=4.5, linestyle="none", markerfacecolor=face, label=label
    )


def stacks(chart: Stacks, lines: Mapping[str, Line]) -> Figure:
    figure, (axes,) = sheet(chart.title, 1, 1.6 * WIDE, ROW * len(chart.stacks) + 0.8)
    across = scale(chart.x, max((sum(stack.values) for stack in chart.stacks), default=0.0))
    places, left = range(len(chart.stacks)), [0.0] * len(chart.stacks)
    for i, part in enumerate(chart.parts):
        widths = across.of(stack.values[i] for stack in chart.stacks)
        axes.barh(places, widths, left=left, height=0.7, color=colour(i), label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, [lines[stack.line].label for stack in chart.stacks])
    axes.set_ylim(len(chart.stacks) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(across.label)
    legend(figure, [Patch(color=colour(i), label=part) for i, part in enumerate(chart.parts)])
    return figure
