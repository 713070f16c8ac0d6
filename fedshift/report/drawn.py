"""The charts of a report as files for a paper: SVG, PNG or PDF, drawn with matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshift.core.files import RunError, write
from fedshift.report.charts import (
    Chart,
    Choice,
    Curves,
    Heat,
    Histograms,
    Intervals,
    Line,
    Points,
    Report,
    Stacks,
    Table,
)
from fedshift.report.curves import chosen
from fedshift.report.prints import check, check_places, content, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHOICES = 12  # charts that are drawn of those a reader chooses from
MAKER = "fedshift report"  # in every file
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "legend.handlelength": 2.4,
    "figure.titlesize": 9,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
}


def draw(report: Report, folder: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Every chart as NAME.FORMAT; of those a reader chooses from, all or some spread over them."""
    check(formats, "--figures")
    places = [(chart, folder / f"{chart.name}.{form}", form) for chart in charts(report) for form in formats]
    check_places((path for _, path, _ in places), MAKER, "--figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: cannot be written to: {problem.strerror or problem}") from None
    lines = {line.key: line for line in report.lines}
    with styled(STYLE):
        last: tuple[Chart, Figure] | None = None
        for chart, path, form in places:
            if last is None or last[0] is not chart:
                last = chart, figure(chart, lines)
            try:
                made = content(last[1], form, MAKER)
            except (ValueError, OverflowError) as problem:  # such as a metric of 1e308
                raise RunError(f"{path}: cannot be drawn ({problem}); the page shows it") from None
            write(path, made)
    return [path for _, path, _ in places]


def charts(report: Report) -> Iterable[Chart]:
    for section in report.sections:
        for part in section.parts:
            if isinstance(part, Choice):
                yield from (part.of[i][1] for i in chosen(len(part.of), CHOICES))
            elif not isinstance(part, Table):
                yield part


def figure(chart: Chart, lines: Mapping[str, Line]) -> "Figure":
    """One chart, drawn."""
    from fedshift.report import bars, fields, plots

    match chart:
        case Curves():
            return plots.curves(chart, lines)
        case Histograms():
            return plots.histograms(chart)
        case Intervals():
            return bars.intervals(chart, lines)
        case Points():
            return plots.points(chart, lines)
        case Stacks():
            return bars.stacks(chart, lines)
        case Heat():
            return fields.heat(chart)
