"""What all drawings share: sheets with panels, units, legends."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedshift.report.charts import Axis, Dash
from fedshift.report.palette import COLOURS

Dashes = Literal["-", "--", "-.", ":"]
DASHES: dict[Dash, Dashes] = {"": "-", "dashed": "--", "dotdash": "-."}
MARKS: dict[Dash, str] = {"dashed": "o", "dotdash": "D", "": "o"}  # without the shift they are open
WIDE = 3.2  # inches, of a panel
TALL = 2.2
ROW = 3  # panels side by side
LETTERS = 13  # of a legend, an inch
# units from large to small, each with its size and the largest value from which on it is used
UNITS = {
    "B": (("GB", 1e9, 1e9), ("MB", 1e6, 1e6), ("kB", 1e3, 1e3), ("B", 1.0, 0.0)),
    "s": (("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 0.5), ("ms", 1e-3, 0.0)),
    "%": (("%", 0.01, 0.0),),
    "": (("", 1.0, 0.0),),
}


class Scale(NamedTuple):
    """A unit that suits the largest value of an axis."""

    size: float  # what a value is divided by
    label: str

    def of(self, values: Iterable[float | None]) -> list[float]:
        """Not a number where nothing was measured: a gap."""
        return [float("nan") if x is None else x / self.size for x in values]


def scale(axis: Axis, largest: float) -> Scale:
    """
    >>> scale(Axis("sent", "B"), 57.9e6)
    Scale(size=1000000.0, label='sent, MB')
    >>> scale(Axis("accuracy", "%"), 0.9)
    Scale(size=0.01, label='accuracy, %')
    """
    unit, size, _ = next(one for one in UNITS[axis.unit] if largest >= one[2])
    return Scale(size, f"{axis.label}, {unit}" if unit else axis.label)


def sheet(title: str, panels: int = 1, wide: float = WIDE, tall: float = TALL) -> tuple[Figure, list[Axes]]:
    """A page with room for so many panels."""
    across = min(ROW, panels)
    down = -(-panels // across)
    figure = Figure(figsize=(max(wide * across, 4.2), tall * down + 0.5), layout="constrained")
    found = [figure.add_subplot(down, across, i + 1) for i in range(panels)]
    figure.suptitle(title, x=0.01, ha="left")
    return figure, found


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Below everything, in as many columns as fit."""
    if handles:
        longest = max(len(str(handle.get_label())) for handle in handles) + 7
        columns = max(1, min(len(handles), int(figure.get_figwidth() * LETTERS / longest)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def stroke(label: str, colour: str, dashes: Dashes = "-") -> Line2D:
    """A line of a legend."""
    return Line2D([], [], color=colour, linestyle=dashes, label=label)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
