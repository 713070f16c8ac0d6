"""Figure 4: the idea of the shift on the uploads of one round: where a layer's mean comes from, and where it goes."""

from typing import Literal, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

from fedshift.algorithms import layers, shift
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.data.datasets import Dataset
from fedshift.experiment.build import named_model, split
from fedshift.experiment.links import links
from fedshift.paper.figures.network import TITLES, examples, recipe, trained
from fedshift.paper.figures.style import (
    EXACT,
    FAINT,
    INFERIOR,
    PAGE,
    SHIFTED,
    SUPERIOR,
    DrawnFigure,
    footnote,
    letter,
    sheet,
)
from fedshift.wire.mean import Mean
from fedshift.wire.writer import pack, unpack

EPOCHS = 1  # of each client; the paper's ten take minutes on a CPU
BINS = 90
SIDE: dict[int, Literal["bottom", "top"]] = {1: "bottom", -1: "top"}


class RoundUploads(NamedTuple):
    """A layer of each upload as the server reads it, of their average, and of that shifted."""

    layer: str
    uploads: list[Tensor]
    lossy: list[bool]
    average: Tensor
    shifted: Tensor
    share: float

    @property
    def means(self) -> list[float]:
        return [mean(w) for w in self.uploads]


def mean(w: Tensor) -> float:
    return float(w.double().mean())


def uploads(data: Dataset, epochs: int = EPOCHS) -> list[tuple[bytes, Params]]:
    """The frames of the first round's clients, and the model they are of."""
    experiment = recipe(data)
    model, held = named_model(experiment, data), split(experiment, data)
    groups, group = links(experiment)
    made = []
    for client in range(experiment.train.cohort):  # every other one of them is inferior
        key = rng.key(experiment.seed, "client", 1, client)
        w = trained(model, data, held.of(client), experiment, epochs, key)
        made.append((pack(groups[int(group[client])].uplink.codec, w), w))
    return made


def aggregated(frames: list[bytes], like: Params, layer: str | None = None) -> RoundUploads:
    """Aggregate frames as the server does; without a layer, that whose mean is furthest from zero for its spread."""
    total = Mean(like)
    lossy = [total.add(frame).lossy for frame in frames]
    average, share = total.result(), total.share
    moved = shift(average, share)
    weights = {name: average[name] for name in layers(average)}
    layer = layer or max(weights, key=lambda name: abs(mean(weights[name])) / float(weights[name].std()))
    read = [unpack(frame, like)[layer] for frame in frames]
    return RoundUploads(layer, read, lossy, average[layer], moved[layer], share)


def draw() -> DrawnFigure:
    data = examples()
    made = uploads(data)
    uploads_read = aggregated([frame for frame, _ in made], made[0][1])
    figure = sheet(PAGE, 2.6)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.15, 1])
    kinds = [
        [w for w, lossy in zip(uploads_read.uploads, uploads_read.lossy, strict=True) if lossy is kind]
        for kind in (True, False)
    ]
    inferior, superior = kinds
    reach = 3.6 * float(uploads_read.average.std())
    for row, (w, colour) in enumerate(
        (
            (uploads_read.shifted, SHIFTED),
            (uploads_read.average, EXACT),
            (superior[0], SUPERIOR),
            (inferior[0], INFERIOR),
        )
    ):
        _ridge(left, w, row, reach, colour)
    left.axvline(0, color=FAINT, linewidth=0.5, zorder=0)
    left.set_xlim(-reach, reach)
    left.set_ylim(-0.3, 4.0)
    codes = len(torch.unique(inferior[0]))
    names = [f"{len(inferior)} inferior uploads,\n{codes} values each", f"{len(superior)} superior uploads,\n32 bits"]
    names += [f"average of {len(uploads_read.uploads)},\nmean $m$", f"shifted,\nmean ${1 - uploads_read.share:g}\\,m$"]
    left.set_yticks([3.35, 2.35, 1.35, 0.35], names)
    layer = uploads_read.layer.removesuffix(".weight")
    left.set_xlabel(f"weight of {layer}")
    letter(left, "a", "how the weights lie (of the uploads: the first)")
    _means(right, uploads_read)
    right.set_xlabel(f"mean of {layer}")
    letter(right, "b", "their means, enlarged")
    for panel in (left, right):
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
    seen = f"{TITLES[data.name]}, {recipe(data).model.name}, {EPOCHS} local epoch"
    source = f"one round of {len(uploads_read.uploads)} clients trained here: {seen}"
    footnote(figure, source)
    return DrawnFigure(figure, source)


def _ridge(axes: Axes, w: Tensor, row: int, reach: float, colour: str) -> None:
    """A histogram as high as the others, standing on its row; a line at the mean."""
    counts = torch.histc(w.float(), BINS, -reach, reach)
    edges = torch.linspace(-reach, reach, BINS + 1).tolist()
    tops = (row + 0.75 * counts / counts.max()).tolist()
    axes.stairs(tops, edges, baseline=row, fill=True, color=colour, alpha=0.4, linewidth=0)
    axes.plot([-reach, reach], [row, row], color=colour, linewidth=0.4)
    axes.plot([mean(w)] * 2, [row, row + 0.85], color=colour, linewidth=1)


def _means(axes: Axes, uploads_read: RoundUploads) -> None:
    """The means alone, on a scale of their own; rows as in the panel beside it."""
    before, after = mean(uploads_read.average), mean(uploads_read.shifted)
    for x, lossy in zip(uploads_read.means, uploads_read.lossy, strict=True):
        colour, row = (INFERIOR, 3.35) if lossy else (SUPERIOR, 2.35)
        axes.plot(x, row, "o", color=colour, markersize=4, markeredgewidth=0, alpha=0.75)
    for x, row, colour, name in ((before, 1.35, EXACT, "m"), (after, 0.35, SHIFTED, f"{1 - uploads_read.share:g}\\,m")):
        axes.plot(x, row, "D", color=colour, markersize=4)
        up = 1 if row > 1 else -1
        axes.text(x, row + 0.2 * up, f"${name}={x:.2g}$", ha="center", va=SIDE[up], color=colour)
    arrow = {"arrowstyle": "-|>", "color": SHIFTED, "linewidth": 0.9, "shrinkA": 4, "shrinkB": 4}
    axes.annotate("", (after, 0.35), (before, 1.35), arrowprops=arrow)
    aside = "right" if after > before else "left"  # of the arrow, where nothing else is
    axes.text((before + after) / 2, 0.8, rf"$-{uploads_read.share:g}\,m\;$ ", color=SHIFTED, ha=aside, va="top")
    axes.axvline(0, color=FAINT, linewidth=0.5, zorder=0)
    least, most = min([*uploads_read.means, 0.0]), max([*uploads_read.means, 0.0])
    room = 0.2 * (most - least)
    axes.set_xlim(least - room, most + room)
    axes.locator_params(axis="x", nbins=6)
