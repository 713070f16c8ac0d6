"""Common style of all figures: widths of a two-column page, and colours that are the same in all figures."""

import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshift.report.style import COLOURS
from fedshift.report.style import SMALL as SMALL

COLUMN, PAGE = 3.5, 7.16  # inches: one column, and two columns with the gap
SHIFTED, PLAIN, SUPERIOR, INFERIOR, UNIFORM, KMEANS = COLOURS[:6]
EXACT, FAINT, TINT = "0.45", "0.75", "0.93"  # greys: full precision, references, areas


class DrawnFigure(NamedTuple):
    figure: Figure
    source: str  # data it was drawn from


def sheet(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def footnote(figure: Figure, text: str) -> None:
    """Write the source of a figure below everything else, in lines that fit."""
    wide = int(20 * figure.get_figwidth())  # characters of the small size
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, wide)]
    figure.supxlabel("\n".join(lines), fontsize=SMALL, color=EXACT, x=0.01, ha="left")


def legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Draw one legend for all panels, above them."""
    named: dict[str, Artist] = {}
    for panel in axes:
        named |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(list(named.values()), list(named), loc="outside upper right", ncols=len(named), borderaxespad=0)


def letter(axes: Axes, which: str, title: str) -> None:
    """Title of a panel with its letter: (a), (b), ..."""
    axes.set_title(f"({which}) {title}")
