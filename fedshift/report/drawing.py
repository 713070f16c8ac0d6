"""Charts of a report as files for a paper (SVG, PNG or PDF), drawn with matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fedshift.core.files import RunError, make_folder, write
from fedshift.core.units import BYTES, SECONDS, Units, rate_text, unit
from fedshift.report.charts import (
    Axis,
    Chart,
    Choice,
    Curve,
    Curves,
    Dash,
    Heat,
    Histograms,
    Intervals,
    LegendLine,
    Panel,
    Points,
    Report,
    Stacks,
    Table,
)
from fedshift.report.curves import chosen
from fedshift.report.style import COLOURS, REPORT, check, check_places, content, styled

Dashes = Literal["-", "--", "-.", ":"]
DASHES: dict[Dash, Dashes] = {"": "-", "dashed": "--", "dotdash": "-."}
MARKS: dict[Dash, str] = {"dashed": "o", "dotdash": "D", "": "o"}  # not filled without the shift
WIDE = 3.2  # inches, width of a panel
TALL = 2.2
ACROSS = 3  # panels side by side
LETTERS = 13  # letters of a legend per inch
UNITS: dict[str, Units] = {"B": BYTES, "s": SECONDS, "%": (("%", 0.01, 0.0),), "": (("", 1.0, 0.0),)}
GREY = "#777777"
FOG = 0.5  # opacity of all bands of a panel together
BAR = 0.24  # inches
APART = 0.26  # rows, between intervals of one band
INK = "#555555"
CELL = 0.2  # inches
TALLEST = 5.0
LABELS = 30  # most names of rows or columns; more are sampled
NUMBERS = 16  # most rows of a heat map with values in the cells
ABBREVIATED = 14  # most columns of a heat map with values in the cells
CHOICES = 12  # most charts that are drawn of a choice
MAKER = "fedshift report"  # in the metadata of every file


class Scale(NamedTuple):
    """A unit that suits the largest value of an axis."""

    size: float  # divisor of values
    label: str

    def of(self, values: Iterable[float | None]) -> list[float]:
        """Scaled values; NaN, a gap, for values that were not measured."""
        return [float("nan") if x is None else x / self.size for x in values]


def scale(axis: Axis, largest: float) -> Scale:
    """
    >>> scale(Axis("sent", "B"), 57.9e6)
    Scale(size=1000000.0, label='sent, MB')
    >>> scale(Axis("accuracy", "%"), 0.9)
    Scale(size=0.01, label='accuracy, %')
    """
    name, size = unit(largest, UNITS[axis.unit])
    return Scale(size, f"{axis.label}, {name}" if name else axis.label)


def sheet(title: str, panels: int = 1, wide: float = WIDE, tall: float = TALL) -> tuple[Figure, list[Axes]]:
    """Figure with this many panels."""
    across = min(ACROSS, panels)
    down = -(-panels // across)
    figure = Figure(figsize=(max(wide * across, 4.2), tall * down + 0.5), layout="constrained")
    found = [figure.add_subplot(down, across, i + 1) for i in range(panels)]
    figure.suptitle(title, x=0.01, ha="left")
    return figure, found


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Add a legend below the panels, in as many columns as fit."""
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles) + 7
        columns = max(1, min(len(handles), int(figure.get_figwidth() * LETTERS / longest)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def stroke(label: str, colour: str, dashes: Dashes = "-") -> Line2D:
    """Legend handle of a line."""
    return Line2D([], [], color=colour, linestyle=dashes, label=label)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def curves(chart: Curves, lines: Mapping[str, LegendLine]) -> Figure:
    """Panels side by side, with a common y axis unless the chart says otherwise (`apart`)."""
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
        axes.set_xlabel(across.label + (f" at {rate_text(chart.rate)}" if chart.rate else ""))
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


def _curve(axes: Axes, curve: Curve, line: LegendLine | None, across: Scale, up: Scale, fog: float) -> None:
    ink, x = colour(line.colour) if line else GREY, across.of(curve.x)
    axes.plot(x, up.of(curve.y), color=ink, linestyle=_dashes(curve, line), linewidth=0.9 if curve.dashed else 1.2)
    if curve.low and curve.high:
        axes.fill_between(x, up.of(curve.low), up.of(curve.high), color=ink, alpha=fog, linewidth=0)


def _dashes(curve: Curve, line: LegendLine | None) -> Dashes:
    """Line style; second curves are dotted, because lines without the shift are dashed."""
    return ":" if curve.dashed else DASHES[line.dash if line else ""]


def _entry(curve: Curve, line: LegendLine | None, panel: Panel) -> Line2D:
    """Legend handle of a curve, without the panel's title; dotted curves with the same label share one."""
    if curve.dashed or line is None:
        return stroke(curve.label, GREY, ":" if curve.dashed else "-")
    parts = [part for part in line.label.split(", ") if part != panel.title]
    return stroke(", ".join(parts) or line.label, colour(line.colour), _dashes(curve, line))


def points(chart: Points, lines: Mapping[str, LegendLine]) -> Figure:
    """One panel per task; Pareto-optimal points are circled and joined by a line."""
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
    """Histograms: the first one filled, others as outlines."""
    figure, found = sheet(chart.title, max(1, len(chart.panels)))
    entries: dict[str, Line2D] = {}
    for panel, axes in zip(chart.panels, found, strict=False):
        for i, (label, counts) in enumerate(panel.counts):
            axes.stairs(counts, panel.edges, fill=i == 0, color=colour(i), alpha=0.45 if i == 0 else 1.0, linewidth=0.9)
            entries.setdefault(label, stroke(label, colour(i)))
        axes.set_title(panel.title, loc="left")
        axes.set_xlabel(chart.x.label)
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel("weights per bin")
    legend(figure, list(entries.values()))
    return figure


def intervals(chart: Intervals, lines: Mapping[str, LegendLine]) -> Figure:
    """Seeds as ticks, their mean as a marker whose shape shows the shift, and the standard deviation as a bar."""
    rows = sum(bool(heading) + len(bands) for heading, bands in chart.bands)
    figure, (axes,) = sheet(chart.title, 1, 1.6 * WIDE, BAR * rows + 0.8)
    values = [
        x for _, bands in chart.bands for band in bands for interval in band.intervals for x in interval.seeds.values()
    ]
    across = scale(chart.x, max(map(abs, values), default=0.0))
    at, ticks, names, bold = 0.0, list[float](), list[str](), set[int]()
    for heading, bands in chart.bands:
        if heading:
            bold.add(len(ticks))
            ticks, names, at = [*ticks, at], [*names, heading], at + 1
        for band in bands:
            ticks, names = [*ticks, at], [*names, band.label]
            for i, interval in enumerate(band.intervals):
                line, y = lines[interval.line], at + APART * (i - (len(band.intervals) - 1) / 2)
                ink = colour(line.colour)
                mark, face = MARKS[line.dash], "white" if line.dash == "dashed" else ink
                seeds = across.of(interval.seeds.values())
                (mean,), spread = across.of([interval.mean]), across.of([interval.spread or 0.0])
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
    face = "white" if dash == "dashed" else INK
    return Line2D(
        [], [], color=INK, marker=MARKS[dash], markersize=4.5, linestyle="none", markerfacecolor=face, label=label
    )


def stacks(chart: Stacks, lines: Mapping[str, LegendLine]) -> Figure:
    figure, (axes,) = sheet(chart.title, 1, 1.6 * WIDE, BAR * len(chart.stacks) + 0.8)
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


def heat(chart: Heat) -> Figure:
    """Heat map; names of columns are coloured by their marks."""
    rows, columns = len(chart.rows), len(chart.columns)
    figure, (axes,) = sheet(chart.title, 1, max(1.6 * WIDE, 1.8 + CELL * columns), 0.9 + min(TALLEST, CELL * rows))
    values = np.array([[np.nan if x is None else x for x in row] for row in chart.values], dtype=float)
    within = scale(chart.value, float(np.nanmax(values)) if np.isfinite(values).any() else 0.0)
    values = values / within.size
    image = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest")
    figure.colorbar(image, ax=axes)
    figure.suptitle(f"{chart.title} ({within.label})", x=0.01, ha="left")
    axes.grid(visible=False)
    _names(axes.set_yticks, chart.rows)
    _names(axes.set_xticks, chart.columns)
    axes.set_xlabel("label")
    kinds = list(dict.fromkeys(mark for mark in chart.marks if mark))
    inks = {kind: colour(i) for i, kind in enumerate(sorted(kinds, reverse=True))}
    for place, tick in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        tick.set_color(inks.get(chart.marks[int(place)], "black"))
    if rows <= NUMBERS and columns <= ABBREVIATED:
        bright = (np.nanmin(values) + np.nanmax(values)) / 2 if np.isfinite(values).any() else 0.0
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "black" if value > bright else "white"
                axes.text(x, y, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=6)
    legend(figure, [Patch(color=ink, label=f"{kind} label") for kind, ink in inks.items()])
    return figure


def _names(put: object, names: Sequence[str]) -> None:
    """Set tick labels: all names, or a sample of many."""
    places = chosen(len(names), LABELS)
    put(places, [names[i] for i in places])  # type: ignore[operator]


def draw(report: Report, folder: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Write every chart as NAME.FORMAT, at most CHOICES of each choice; return the paths."""
    check(formats, "--figures")
    places = [(chart, folder / f"{chart.name}.{form}", form) for chart in charts(report) for form in formats]
    check_places((path for _, path, _ in places), MAKER, "--figures")
    make_folder(folder)
    lines = {line.key: line for line in report.lines}
    with styled(REPORT):
        last: tuple[Chart, Figure] | None = None
        for chart, path, form in places:
            if last is None or last[0] is not chart:
                last = chart, figure(chart, lines)
            try:
                made = content(last[1], form, MAKER)
            except (ValueError, OverflowError) as problem:  # for example with a metric of 1e308
                raise RunError(f"{path}: cannot be drawn ({problem}); see the HTML page") from None
            write(path, made)
    return [path for _, path, _ in places]


def charts(report: Report) -> Iterable[Chart]:
    for section in report.sections:
        for part in section.parts:
            if isinstance(part, Choice):
                yield from (part.of[i][1] for i in chosen(len(part.of), CHOICES))
            elif not isinstance(part, Table):
                yield part


def figure(chart: Chart, lines: Mapping[str, LegendLine]) -> Figure:
    """Draw one chart."""
    match chart:
        case Curves():
            return curves(chart, lines)
        case Histograms():
            return histograms(chart)
        case Intervals():
            return intervals(chart, lines)
        case Points():
            return points(chart, lines)
        case Stacks():
            return stacks(chart, lines)
        case Heat():
            return heat(chart)
