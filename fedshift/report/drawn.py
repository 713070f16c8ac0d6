"""The charts of a report as files for a paper: SVG, PNG or PDF, drawn with matplotlib."""

import io
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshift import __version__
from fedshift.files import RunError, write
from fedshift.report.charts import Chart, Choice, Curves, Heat, Histograms, Intervals, Line, Report, Stacks, Table
from fedshift.report.curves import chosen
from fedshift.toml import SettingsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")
CHOICES = 12  # charts that are drawn of those a reader chooses from
MAKER = f"fedshift report {__version__}"  # in every file, so that one of somebody else's is not written over
UNDATED = {
    "svg": {"Creator": MAKER, "Date": None},
    "png": {"Software": MAKER},
    "pdf": {"Creator": MAKER, "CreationDate": None},
}
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "figure.titlesize": 9,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fedshift",
    "pdf.fonttype": 42,
}


def check(formats: Sequence[str]) -> None:
    """What is needed to draw is there, and these are formats."""
    if find_spec("matplotlib") is None:
        raise SettingsError("--figures needs matplotlib: pip install 'fedshift[report]'")
    for form in formats:
        if form not in FORMATS:
            raise SettingsError(f"--format {form}: must be among {', '.join(FORMATS)}")


def draw(report: Report, folder: Path, formats: Sequence[str] = ("svg",)) -> list[Path]:
    """Every chart as NAME.FORMAT; of those a reader chooses from, all or some spread over them."""
    check(formats)
    import matplotlib

    places = [(chart, folder / f"{chart.name}.{form}", form) for chart in charts(report) for form in formats]
    for _, path, _ in places:
        if path.exists() and MAKER.rpartition(" ")[0].encode() not in path.read_bytes():
            raise RunError(f"{path}: is there already and is no figure of a report; choose another --figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"{folder}: cannot be written to: {problem.strerror or problem}") from None
    lines = {line.key: line for line in report.lines}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}):
        last: tuple[Chart, Figure] | None = None
        for chart, path, form in places:
            if last is None or last[0] is not chart:
                last = chart, figure(chart, lines)
            content = io.BytesIO()
            try:
                last[1].savefig(content, format=form, metadata=UNDATED[form])
            except (ValueError, OverflowError) as problem:  # such as a metric of 1e308
                raise RunError(f"{path}: cannot be drawn ({problem}); the page shows it") from None
            write(path, content.getvalue())
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
        case Stacks():
            return bars.stacks(chart, lines)
        case Heat():
            return fields.heat(chart)
