"""Figure 8: frequency of each predicted label in the last rounds, with and without the shift."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from fedshift.core.files import RunError
from fedshift.experiment.links import links
from fedshift.experiment.settings import Experiment
from fedshift.paper.dynamics import LATE, Blocks, blocks, odd_share
from fedshift.paper.figures.curves import coloured
from fedshift.paper.figures.records import SeedLine, ShiftPanel, Source
from fedshift.paper.figures.style import EXACT, PAGE, SMALL, TINT, DrawnFigure, footnote, letter, sheet

TICKS = 20  # largest number of labels on the axis


class Shares(NamedTuple):
    """Shares of the predictions on the test set in percent, mean of the last hundred rounds and of all seeds."""

    label: str
    colour: str
    values: list[float]  # one per label


def shares(line: SeedLine) -> list[float]:
    labels = line.records[0].layers("predicted")
    if not labels:
        raise RunError(f"{line.records[0].folder}: contains no predicted labels, which figure 8 needs")
    late = [[record.column(f"predicted.{label}")[-LATE:] for record in line.records] for label in labels]
    return [100 * statistics.fmean(x for values in runs for x in values) for runs in late]


def split_by_parity(experiment: Experiment) -> bool:
    """True if quantized clients have the odd labels and the others the even ones, as in the paper's main partition."""
    if experiment.data.partition != "shards":
        return False
    groups, group = links(experiment)
    lossy = [groups[i].uplink.lossy for i in group.tolist()]
    return not any(lossy[0::2]) and all(lossy[1::2])


def lines(panel: ShiftPanel) -> list[tuple[SeedLine, str]]:
    """Lines of a panel with colours, full precision first if there is such a line."""
    return [*([(panel.exact, EXACT)] if panel.exact else []), *coloured(panel)[:2]]


def draw(source: Source) -> DrawnFigure:
    panel = source.pair
    groups = [Shares(line.label, colour, shares(line)) for line, colour in lines(panel)]
    odd = split_by_parity(panel.lines[0].experiment)
    figure = sheet(PAGE, 2.2)
    if odd:
        left, right = figure.subplots(1, 2, width_ratios=[2.4, 1])
        _odd(right, panel)
    else:
        left = figure.subplots()
    _bars(left, groups, odd)
    letter(left, "a", f"frequency of predicted labels, {panel.title}")
    first = panel.lines[0].records[0]
    rounds = len(first.column(f"predicted.{first.layers('predicted')[0]}")[-LATE:])
    footnote(figure, f"{source.about([panel])}; mean of the last {rounds} evaluated round{'s' * (rounds > 1)}")
    return DrawnFigure(figure, source.drawn([panel]))


def _bars(axes: Axes, groups: Sequence[Shares], odd: bool) -> None:
    labels, wide = range(len(groups[0].values)), 0.8 / len(groups)
    for label in labels:
        if odd and label % 2:
            axes.axvspan(label - 0.5, label + 0.5, color=TINT, linewidth=0, zorder=0)
    for i, group in enumerate(groups):
        places = [label + (i - (len(groups) - 1) / 2) * wide for label in labels]
        axes.bar(places, group.values, wide * 0.92, color=group.colour, label=group.label, linewidth=0)
    even = 100 / len(labels)
    axes.axhline(even, color="black", linewidth=0.5, linestyle=(0, (4, 3)))
    axes.set_xticks(labels[:: math.ceil(len(labels) / TICKS)])
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_ylim(0, 1.25 * max(x for group in groups for x in group.values))
    axes.set_xlabel("label (shaded: labels of quantized clients)" if odd else "label")
    axes.set_ylabel("predictions (%)")
    axes.legend(loc="upper left", ncols=len(groups), borderpad=0, borderaxespad=0.2)


def _odd(axes: Axes, panel: ShiftPanel) -> None:
    """Draw the share of all labels of quantized clients, with the standard error of ten-round means."""
    for i, (line, colour) in enumerate(lines(panel)):
        late = {
            (record.experiment.seed, k): x for record in line.records for k, x in enumerate(blocks(odd_share(record)))
        }
        odd = Blocks(late)
        error = 100 * odd.uncertainty if len(late) > 1 else 0.0
        axes.errorbar(100 * odd.mean, i, xerr=error, fmt="o", color=colour, markersize=4, capsize=2)
        axes.text(100 * odd.mean, i - 0.22, odd.percent, ha="center", va="bottom", fontsize=SMALL, color=colour)
    axes.axvline(50, color="black", linewidth=0.5, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(lines(panel))), [line.label.replace(", ", ",\n") for line, _ in lines(panel)])
    axes.set_ylim(len(lines(panel)) - 0.5, -0.7)
    axes.margins(x=0.35)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("predictions (%)")
    letter(axes, "b", "labels of quantized clients")
