"""One look for all figures: the widths of a two-column page, thin axes, a colour for each thing that comes again."""

import io
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshift.report.palette import COLOURS

COLUMN, PAGE = 3.5, 7.16  # inches: of one column, and of both with the gap between them
SHIFTED, PLAIN, SUPERIOR, INFERIOR, UNIFORM, KMEANS = COLOURS[:6]
EXACT, FAINT, TINT = "0.45", "0.75", "0.93"  # greys: full precision, what is only there to compare with, areas
SMALL = 6.5
STYLE: dict[Any, Any] = {
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
MAKER = "fedshift paper figures"  # in every file, so that one of somebody else's is not written over
UNDATED: dict[str, dict[str, Any]] = {
    "svg": {"Creator": MAKER, "Date": None},
    "pdf": {"Creator": MAKER, "CreationDate": None},
    "png": {"Software": MAKER},
}


class Drawn(NamedTuple):
    figure: Figure
    source: str  # what it was drawn from


@contextmanager
def styled() -> Iterator[None]:
    """Everything in here looks alike, whatever a user has set; outside of it nothing is changed."""
    defaults: dict[Any, Any] = {key: x for key, x in matplotlib.rcParamsDefault.items() if key != "backend"}
    with matplotlib.rc_context(defaults | STYLE):
        yield


def sheet(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def content(figure: Figure, kind: str) -> bytes:
    """The file: the same bytes for the same figure, whenever it is drawn."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata=UNDATED[kind])
    return file.getvalue()


def footnote(figure: Figure, text: str) -> None:
    """What it was drawn from, below everything else, in lines that fit."""
    wide = int(20 * figure.get_figwidth())  # characters of the small size
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, wide)]
    figure.supxlabel("\n".join(lines), fontsize=SMALL, color=EXACT, x=0.01, ha="left")


def legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One for all panels, above them."""
    named: dict[str, Artist] = {}
    for one in axes:
        named |= dict(zip(*reversed(one.get_legend_handles_labels()), strict=True))
    figure.legend(list(named.values()), list(named), loc="outside upper right", ncols=len(named), borderaxespad=0)


def letter(axes: Axes, which: str, title: str) -> None:
    """(a), (b), ... and what a panel shows."""
    axes.set_title(f"({which}) {title}")
