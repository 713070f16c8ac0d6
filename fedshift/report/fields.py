"""Fields of values, drawn."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedshift.report.axes import WIDE, legend, scale, sheet
from fedshift.report.charts import Heat
from fedshift.report.curves import chosen
from fedshift.report.palette import COLOURS

CELL = 0.2  # inches
TALL = 5.0
LABELS = 30  # rows or columns that each have their name
NUMBERS = 16  # rows up to which values stand in the cells
ABBREVIATED = 14  # columns up to which there is room for them


def heat(chart: Heat) -> Figure:
    """Columns are coloured by what they are marked with."""
    rows, columns = len(chart.rows), len(chart.columns)
    figure, (axes,) = sheet(chart.title, 1, max(1.6 * WIDE, 1.8 + CELL * columns), 0.9 + min(TALL, CELL * rows))
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
    inks = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(sorted(kinds, reverse=True))}
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
    """Every name, or some of very many."""
    places = chosen(len(names), LABELS)
    put(places, [names[i] for i in places])  # type: ignore[operator]
