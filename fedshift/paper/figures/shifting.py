"""Figure 4: the shift applied to the uploads of one round: weights of a layer and their means, before and after."""

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

EPOCHS = 1  # per client; the ten epochs of the paper take minutes on a CPU
BINS = 90
SIDE: dict[int, Literal["bottom", "top"]] = {1: "bottom", -1: "top"}


class DecodedRound(NamedTuple):
    """One layer of each decoded upload, of their average, and of the shifted average."""

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
    """Frames of the clients of the first round, each with the weights it encodes."""
    experiment = recipe(data)
    model, partition = named_model(experiment, data), split(experiment, data)
    groups, group = links(experiment)
    frames = []
    for client in range(experiment.train.cohort):  # every second client is inferior
        key = rng.key(experiment.seed, "client", 1, client)
        w = trained(model, data, partition.of(client), experiment, epochs, key)
        frames.append((pack(groups[int(group[client])].uplink.codec, w), w))
    return frames


def aggregated(frames: list[bytes], like: Params, layer: str | None = None) -> DecodedRound:
    """Aggregate frames as the server does; the default layer has the largest |mean| relative to its spread."""
    total = Mean(like)
    lossy = [total.add(frame).lossy for frame in frames]
    average, share = total.result(), total.share
    moved = shift(average, share)
    weights = {name: average[name] for name in layers(average)}
    layer = layer or max(weights, key=lambda name: abs(mean(weights[name])) / float(weights[name].std()))
    decoded = [unpack(frame, like)[layer] for frame in frames]
    return DecodedRound(layer, decoded, lossy, average[layer], moved[layer], share)


def draw() -> DrawnFigure:
    data = examples()
    frames = uploads(data)
    result = aggregated([frame for frame, _ in frames], frames[0][1])
    figure = sheet(PAGE, 2.6)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.15, 1])
    kinds = [
        [w for w, lossy in zip(result.uploads, result.lossy, strict=True) if lossy is kind] for kind in (True, False)
    ]
    inferior, superior = kinds
    reach = 3.6 * float(result.average.std())
    for row, (w, colour) in enumerate(
        (
            (result.shifted, SHIFTED),
            (result.average, EXACT),
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
    names += [f"average of {len(result.uploads)},\nmean $m$", f"shifted,\nmean ${1 - result.share:g}\\,m$"]
    left.set_yticks([3.35, 2.35, 1.35, 0.35], names)
    layer = result.layer.removesuffix(".weight")
    left.set_xlabel(f"weight of {layer}")
    letter(left, "a", "distribution of weights (first upload of each kind)")
    _means(right, result)
    right.set_xlabel(f"mean of {layer}")
    letter(right, "b", "means, enlarged")
    for panel in (left, right):
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
    training = f"{TITLES[data.name]}, {recipe(data).model.name}, {EPOCHS} local epoch"
    source = f"one round of {len(result.uploads)} clients trained for this figure: {training}"
    footnote(figure, source)
    return DrawnFigure(figure, source)


def _ridge(axes: Axes, w: Tensor, row: int, reach: float, colour: str) -> None:
    """Draw a histogram scaled to the height of its row, with a line at the mean."""
    counts = torch.histc(w.float(), BINS, -reach, reach)
    edges = torch.linspace(-reach, reach, BINS + 1).tolist()
    tops = (row + 0.75 * counts / counts.max()).tolist()
    axes.stairs(tops, edges, baseline=row, fill=True, color=colour, alpha=0.4, linewidth=0)
    axes.plot([-reach, reach], [row, row], color=colour, linewidth=0.4)
    axes.plot([mean(w)] * 2, [row, row + 0.85], color=colour, linewidth=1)


def _means(axes: Axes, result: DecodedRound) -> None:
    """Draw the means on an enlarged scale, in the same rows as the weights."""
    before, after = mean(result.average), mean(result.shifted)
    for x, lossy in zip(result.means, result.lossy, strict=True):
        colour, row = (INFERIOR, 3.35) if lossy else (SUPERIOR, 2.35)
        axes.plot(x, row, "o", color=colour, markersize=4, markeredgewidth=0, alpha=0.75)
    for x, row, colour, name in ((before, 1.35, EXACT, "m"), (after, 0.35, SHIFTED, f"{1 - result.share:g}\\,m")):
        axes.plot(x, row, "D", color=colour, markersize=4)
        up = 1 if row > 1 else -1
        axes.text(x, row + 0.2 * up, f"${name}={x:.2g}$", ha="center", va=SIDE[up], color=colour)
    arrow = {"arrowstyle": "-|>", "color": SHIFTED, "linewidth": 0.9, "shrinkA": 4, "shrinkB": 4}
    axes.annotate("", (after, 0.35), (before, 1.35), arrowprops=arrow)
    side = "right" if after > before else "left"  # the free side of the arrow
    axes.text((before + after) / 2, 0.8, rf"$-{result.share:g}\,m\;$ ", color=SHIFTED, ha=side, va="top")
    axes.axvline(0, color=FAINT, linewidth=0.5, zorder=0)
    least, most = min([*result.means, 0.0]), max([*result.means, 0.0])
    margin = 0.2 * (most - least)
    axes.set_xlim(least - margin, most + margin)
    axes.locator_params(axis="x", nbins=6)
