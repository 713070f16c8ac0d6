"""Figures 6 and 10: number of examples per client and label."""

import torch
from matplotlib.axes import Axes
from torch import Tensor

from fedshift.data.datasets import Dataset
from fedshift.data.partition import Partition
from fedshift.experiment.build import split
from fedshift.experiment.links import links
from fedshift.paper.figures.network import TITLES, examples, recipe
from fedshift.paper.figures.style import (
    INFERIOR,
    PAGE,
    SHIFTED,
    SMALL,
    SUPERIOR,
    TINT,
    DrawnFigure,
    footnote,
    letter,
    sheet,
)
from fedshift.paper.published import ALPHAS

FEW = 10  # clients of figure 10


def counts(partition: Partition, y: Tensor, classes: int) -> Tensor:
    """Number of examples: (clients, labels)

    >>> counts(Partition(torch.tensor([2, 0, 1]), torch.tensor([0, 1, 3])), torch.tensor([0, 1, 1]), 2).tolist()
    [[0, 1], [1, 1]]
    """
    clients = partition.clients
    owner = torch.repeat_interleave(torch.arange(clients), partition.sizes)
    bins = owner * classes + y.cpu()[partition.order]
    return torch.bincount(bins, minlength=clients * classes).view(clients, classes)


def groups(data: Dataset) -> tuple[Tensor, Tensor]:
    """Label counts of every client of the main partition, and a mask of the inferior clients."""
    experiment = recipe(data)
    uplinks, group = links(experiment)
    lossy = torch.tensor([uplink.uplink.lossy for uplink in uplinks])[group]
    return counts(split(experiment, data), data.y, data.classes), lossy


def mixes(data: Dataset, clients: int = FEW) -> dict[float, Tensor]:
    """Label counts of a few clients by alpha."""
    found = {}
    for alpha in ALPHAS:
        changes = {"data.partition": "dirichlet", "data.alpha": alpha, "data.clients": clients}
        found[alpha] = counts(split(recipe(data).changed(**changes), data), data.y, data.classes)
    return found


def main() -> DrawnFigure:
    """Figure 6: main partition (shards), all clients of both groups."""
    data = examples()
    label_counts, lossy = groups(data)
    figure = sheet(PAGE, 3.3)
    axes = figure.subplots(2, 1)
    for panel, inferior, name, colour in (
        (axes[0], False, "superior", SUPERIOR),
        (axes[1], True, "inferior", INFERIOR),
    ):
        ids = torch.nonzero(lossy == inferior)[:, 0].tolist()
        _dots(panel, label_counts[ids], colour, 8, int(label_counts.max()))
        panel.set_xticks(range(0, len(ids), 5), [str(ids[i]) for i in range(0, len(ids), 5)])
        share = label_counts[ids, int(inferior) :: 2].sum() / label_counts[ids].sum()
        parity = f"{100 * share:.0f} % of them with {'odd' if inferior else 'even'} labels"
        letter(
            panel,
            "ab"[inferior],
            f"{name} group: {len(ids)} clients, {_range(label_counts[ids].sum(1))} each, {parity}",
        )
        panel.set_ylabel("label")
    axes[1].set_xlabel("client")
    dot = f"one dot: {_range(label_counts[label_counts > 0])} of a label"
    axes[0].text(1, 1.03, dot, transform=axes[0].transAxes, ha="right", va="bottom", fontsize=SMALL)
    source = f"the main partition of {_about(data)} over {len(label_counts)} clients, each example at two clients"
    footnote(figure, source)
    return DrawnFigure(figure, source)


def dirichlet() -> DrawnFigure:
    """Figure 10: Dirichlet partitions for three alphas."""
    data = examples()
    partitions = mixes(data)
    most = max(int(label_counts.max()) for label_counts in partitions.values())
    figure = sheet(PAGE, 2.9)
    axes = figure.subplots(1, len(partitions), sharey=True)
    unit, name = (1000, "examples (thousands)") if len(data.y) > 10_000 else (1, "examples")
    for i, (alpha, label_counts) in enumerate(partitions.items()):
        _dots(axes[i], label_counts, SHIFTED, 13, most)
        axes[i].set_xticks(range(FEW))
        axes[i].set_xlabel("client")
        letter(axes[i], "abc"[i], rf"$\alpha$ = {alpha:g}")
        above = axes[i].secondary_xaxis("top")
        above.set_xticks(range(FEW), [f"{n / unit:.1f}" if unit > 1 else str(n) for n in label_counts.sum(1).tolist()])
        above.set_xlabel(name, fontsize=SMALL)
    axes[0].set_ylabel("label")
    large = int(float(f"{most:.0e}"))  # one digit and zeros
    for n in (large, large // 10, large // 100):
        axes[0].scatter([], [], s=13**2 * n / most, color=SHIFTED, linewidths=0, label=f"{n:,}")
    figure.legend(loc="outside lower center", ncols=3, title="examples of a label", title_fontsize=SMALL)
    source = f"{_about(data)} over {FEW} clients"
    footnote(figure, source)
    return DrawnFigure(figure, source)


def _dots(axes: Axes, label_counts: Tensor, colour: str, widest: float, most: int) -> None:
    """Draw dots whose areas are proportional to the number of examples; `most` examples are `widest` points wide."""
    client, label = torch.nonzero(label_counts, as_tuple=True)
    axes.scatter(client, label, s=widest**2 * label_counts[client, label].double() / most, color=colour, linewidths=0)
    axes.set_xlim(-0.8, len(label_counts) - 0.2)
    axes.set_ylim(label_counts.shape[1] - 0.3, -0.7)
    axes.set_yticks(range(label_counts.shape[1]))
    axes.grid(color=TINT, linewidth=0.5)
    axes.set_axisbelow(True)


def _range(numbers: Tensor) -> str:
    """
    >>> _range(torch.tensor([500, 500])), _range(torch.tensor([1200, 30]))
    ('500 examples', '30 to 1,200 examples')
    """
    least, most = int(numbers.min()), int(numbers.max())
    return f"{most:,} examples" if least == most else f"{least:,} to {most:,} examples"


def _about(data: Dataset) -> str:
    return f"{len(data.y):,} examples of {TITLES[data.name]}"
