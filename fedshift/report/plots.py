"""Curves, points and histograms, drawn."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedshift.experiment.rates import said
from fedshift.report.axes import DASHES, MARKS, TALL, Dashes, Scale, colour, legend, scale, sheet, stroke
from fedshift.report.charts import Curve, Curves, Histograms, Line, Panel, Points

GREY = "#777777"
FOG = 0.5  # of all bands that lie upon one another


def curves(chart: Curves, lines: Mapping[str, Line]) -> Figure:
    """A panel beside the other, with limits in common unless they are apart."""
    figure, found = sheet(chart.title, len(chart.panels))
    drawn = [curve for panel in chart.panels for curve in panel.curves]
    across = scale(chart.x, max((max(curve.x) for curve in drawn if curve.x), default=0.0))
    up = scale(chart.y, max((abs(y) for curve in drawn for y in curve.y if y is not None), default=0.0))
    entries: dict[tuple[str, str, str], Line2D] = {}
    for panel, axes in zip(chart.panels, found, strict=True):
        for curve in panel.curves:
            _curve(axes, curve, lines.get(curve.line), across, up, min(0.15, FOG / len(panel.curves)))
            entry = _entry(curve, lines.get(curve.line), panel)
            entries.setdefault((str(entry.get_label()), str(entry.get_color()), str(entry.get_linestyle())), entry)
        if chart.level is not None:
            axes.axhline(chart.level / up.size, color=GREY, linewidth=0.8, linestyle=(0, (1, 1)))
        axes.set_title(panel.title, loc="left")
        axes.set_xlabel(across.label + (f" at {said(chart.rate)}" if chart.rate else ""))
        axes.margins(x=0.01)
        if chart.x.log:
            axes.set_xscale("log")
        if chart.y.log:
            axes.set_yscale("log")
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel(up.label)
        if not chart.apart and axes is not found[0]:
            axes.sharey(found[0])
    legend(figure, sorted(entries.values(), key=lambda entry: entry.get_color() == GREY))
    return figure


def _curve(axes: Axes, curve: Curve, line: Line | None, across: Scale, up: Scale, fog: float) -> None:
    ink, x = colour(line.colour) if line else GREY, across.of(curve.x)
    axes.plot(x, up.of(curve.y), color=ink, linestyle=_dashes(curve, line), linewidth=0.9 if curve.dashed else 1.2)
    if curve.low and curve.high:
        axes.fill_between(x, up.of(curve.low), up.of(curve.high), color=ink, alpha=fog, linewidth=0)


def _dashes(curve: Curve, line: Line | None) -> Dashes:
    """Dots for what a line was before, because a line without the shift is dashed already."""
    return ":" if curve.dashed else DASHES[line.dash if line else ""]


def _entry(curve: Curve, line: Line | None, panel: Panel) -> Line2D:
    """Of the legend: without what the panel's title says, and one for all that is dotted."""
    if curve.dashed or line is None:
        return stroke(curve.label, GREY, ":" if curve.dashed else "-")
    parts = [part for part in line.label.split(", ") if part != panel.title]
    return stroke(", ".join(parts) or line.label, colour(line.colour), _dashes(curve, line))


def points(chart: Points, lines: Mapping[str, Line]) -> Figure:
    """A panel for each task; Pareto-optimal points are ringed and joined."""
    figure, found = sheet(chart.title, len(chart.fields), tall=1.3 * TALL)
    up = scale(chart.y, max((abs(point.y) for field in chart.fields for point in field.points), default=0.0))
    across = scale(chart.x, max((point.x for field in chart.fields for point in field.points), default=0.0))
    entries: dict[str, Line2D] = {}
    for field, axes in zip(chart.fields, found, strict=True):
        best = sorted((point.x / across.size, point.y / up.size) for point in field.points if point.front)
        axes.plot(*zip(*best, strict=True), color=GREY, linewidth=0.8, linestyle=":")
        axes.plot(*zip(*best, strict=True), "o", markersize=9, markerfacecolor="none", markeredgecolor=GREY)
        for point in field.points:
            line = lines[point.line]
            ink = colour(line.colour)
            mark, face = MARKS[line.dash], "white" if line.dash == "dashed" else ink
            spread = None if point.spread is None else point.spread / up.size
            look: dict[str, Any] = {
                "color": ink,
                "marker": mark,
                "markersize": 5,
                "markerfacecolor": face,
                "linestyle": "none",
            }
            axes.errorbar(point.x / across.size, point.y / up.size, yerr=spread, **look)
            entries.setdefault(line.label, Line2D([], [], label=line.label, **look))
        axes.set_title(field.title, loc="left")
        if chart.x.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(across.label)
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel(up.label)
    legend(figure, list(entries.values()))
    return figure


def histograms(chart: Histograms) -> Figure:
    """The first one filled, others as outlines."""
    figure, found = sheet(chart.title, max(1, len(chart.panels)))
    entries: dict[str, Line2D] = {}
    for panel, axes in zip(chart.panels, found, strict=False):
        for i, (label, counts) in enumerate(panel.counts):
            axes.stairs(counts, panel.edges, fill=i == 0, color=colour(i), alpha=0.45 if i == 0 else 1.0, linewidth=0.9)
            entries.setdefault(label, stroke(label, colour(i)))
        axes.set_title(panel.title, loc="left")
        axes.set_xlabel(chart.x.label)
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel("weights in a bin")
    legend(figure, list(entries.values()))
    return figure
