"""Figure 7: accuracy over the rounds, a panel for each algorithm and number of bits."""

import math
from collections.abc import Sequence

from fedshift.core.files import RunError
from fedshift.paper.figures.records import Panel, Source
from fedshift.paper.figures.rounds import caption, coloured, plot
from fedshift.paper.figures.style import COLUMN, EXACT, PAGE, Drawn, footnote, legend, sheet
from fedshift.paper.records import Record
from fedshift.runs.columns import column

MOST = 60  # panels


def across(panels: Sequence[Panel]) -> int:
    """How many panels stand side by side: one for each number of bits where every row has the same ones."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in panels:
        rows.setdefault((one.algorithm, one.more), []).append(one.bits)
    first, *others = rows.values()
    if 1 < len(first) <= 5 and all(row == first for row in others):
        return len(first)
    return {6: 3, 7: 4, 8: 4}.get(len(panels), min(len(panels), 5))


def score(record: Record) -> dict[int, float]:
    """Accuracy in percent, or a metric of the user's own as it is."""
    name = column(record.experiment)
    return {t: (100 if name == "accuracy" else 1) * x for t, x in record.series(name).items()}


def draw(source: Source) -> Drawn:
    panels, wide = source.panels, across(source.panels)
    if len(panels) > MOST:
        raise RunError(f"{source.folder}: its runs make {len(panels)} panels, and figure 7 has room for {MOST}")
    scores = sorted({column(line.experiment) for panel in panels for line in panel.all})
    if len(scores) > 1:
        raise RunError(
            f"{source.folder}: its runs are scored by {' and by '.join(scores)}; figure 7 has one upright axis"
        )
    high = math.ceil(len(panels) / wide)
    figure = sheet(PAGE if wide > 1 else COLUMN, 0.6 + (1.4 if wide > 3 else 1.8) * high)
    grid = figure.subplots(high, wide, sharex=True, sharey=True, squeeze=False)
    late: list[float] = []
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_axis_off()
            continue
        panel = panels[place]
        exact = [(panel.exact, EXACT, ":")] if panel.exact else []
        for line, colour, style in [*exact, *((*one, "-") for one in coloured(panel))]:
            late += plot(axes, line, score, colour, style)
        axes.set_title(f"{panel.title}\n{panel.more}" if panel.more else panel.title)
        if place + wide >= len(panels):  # nothing below it
            axes.set_xlabel("round")
            axes.locator_params(axis="x", nbins=4, steps=[1, 2, 4, 5, 10])
            axes.tick_params(labelbottom=True)
    (name,) = scores
    for axes in grid[:, 0]:
        axes.set_ylabel("top-1 accuracy (%)" if name == "accuracy" else name.removeprefix("metric."))
    if late:
        room = (max(late) - min(late)) / 10 or 1.0
        grid[0, 0].set_ylim(min(late) - room / 2, max(late) + room)
    legend(figure, grid.flat)
    footnote(figure, caption(source, panels))
    return Drawn(figure, source.drawn(panels))
