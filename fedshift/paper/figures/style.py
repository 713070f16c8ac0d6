"""One look for all figures: the widths of a two-column page, thin axes, a colour for each thing that comes again."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshift.report.palette import COLOURS

COLUMN, PAGE = 3.5, 7.16  # inches: of one column, and of both with the gap between them
SHIFTED, PLAIN, SUPERIOR, INFERIOR, UNIFORM, KMEANS = COLOURS[:6]
EXACT, FAINT, TINT = "0.45", "0.75", "0.93"  # greys: full precision, what is only there to compare with, areas
SMALL = 6.5
STYLE = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "axes.linewidth": 0.5,
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "lines.linewidth": 1.0,
    "patch.linewidth": 0.5,
    "mathtext.fontset": "dejavusans",
    "svg.hashsalt": "fedshift",  # names inside a file are drawn by chance otherwise
    "savefig.dpi": 300,
}
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
FORMATS = tuple(UNDATED)


class Drawn(NamedTuple):
    figure: Figure
    source: str  # what it was drawn from


@contextmanager
def styled() -> Iterator[None]:
    """Everything in here looks alike; outside of it nothing is changed."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": matplotlib.rcParams["backend"]}):
        yield


def sheet(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def content(figure: Figure, format: str) -> bytes:
    """The file: the same bytes for the same figure, whenever it is drawn."""
    file = io.BytesIO()
    figure.savefig(file, format=format, metadata=UNDATED[format])
    return file.getvalue()


def footnote(figure: Figure, text: str) -> None:
    """What it was drawn from, below everything else."""
    figure.supxlabel(text, fontsize=SMALL, color=EXACT, x=0.01, ha="left")


def letter(axes: Axes, which: str, title: str) -> None:
    """(a), (b), ... and what a panel shows."""
    axes.set_title(f"({which}) {title}")
