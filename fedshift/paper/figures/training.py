"""Figure 3: weights of a layer before and after four epochs of a training, with 4-bit quantizers."""

import math
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

from fedshift.codecs import KMeans, Quantizer, Uniform
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.data.datasets import Dataset
from fedshift.experiment.build import named_model
from fedshift.paper.figures.network import TITLES, examples, recipe, trained, weights
from fedshift.paper.figures.style import (
    FAINT,
    KMEANS,
    PAGE,
    SMALL,
    UNIFORM,
    DrawnFigure,
    footnote,
    legend,
    letter,
    sheet,
)

BITS, EPOCHS, BINS = 4, 4, 75
MOST = 5_000  # examples; an epoch over all of CIFAR-10 takes minutes on a CPU
LAYER = {"cifar10": "conv2.weight", "digits": "fc1.weight"}
QUANTIZERS: dict[str, tuple[Quantizer, str]] = {
    "uniform": (Uniform(BITS), UNIFORM),
    "K-means": (KMeans(BITS), KMEANS),
}


class WeightCounts(NamedTuple):
    """Histogram of a layer's weights before and after quantization."""

    edges: list[float]
    before: list[int]  # weights per bin
    after: dict[float, int]  # weights per decoded value
    mean: float
    spread: float
    error: float  # |DeQ(Q(w)) - w| / |w|


def course(data: Dataset, epochs: int = EPOCHS, most: int = MOST) -> tuple[Params, Params]:
    """Initial weights of a network, and weights after some epochs over a random sample of the examples."""
    experiment = recipe(data)
    model, key = named_model(experiment, data), rng.key(experiment.seed, "centralised")
    index = rng.uniform(key.view(1), len(data.y))[0].argsort(stable=True)[:most]
    return weights(model), trained(model, data, index, experiment, epochs, rng.fold(key, 1))


def counted(w: Tensor, quantizer: Quantizer, reach: float, bins: int = BINS) -> WeightCounts:
    """Counts of w between -reach and reach.

    >>> counts = counted(torch.tensor([-1.0, -0.9, 0.8, 1.0]), Uniform(1), 1.0, bins=4)
    >>> counts.before, counts.after
    ([2, 0, 0, 2], {-1.0: 2, 1.0: 2})
    """
    rows = w.reshape(1, -1).float()
    decoded = quantizer.decode(*quantizer.encode(rows))
    values, counts = torch.unique(decoded, return_counts=True)
    return WeightCounts(
        torch.linspace(-reach, reach, bins + 1).tolist(),
        torch.histc(rows, bins, -reach, reach).long().tolist(),
        dict(zip(values.tolist(), counts.tolist(), strict=True)),
        float(rows.mean()),
        float(rows.std()),
        float((decoded - rows).norm() / rows.norm()),
    )


def draw() -> DrawnFigure:
    data = examples()
    first, last = course(data)
    layer, experiment = LAYER[data.name], recipe(data)
    figure = sheet(PAGE, 3.3)
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    reach = 1.02 * max(float(params[layer].abs().max()) for params in (first, last))
    for row, (name, (quantizer, colour)) in enumerate(QUANTIZERS.items()):
        for column, (params, epoch) in enumerate(((first, "epoch 0 (initial weights)"), (last, f"epoch {EPOCHS}"))):
            counts = counted(params[layer], quantizer, reach)
            _panel(axes[row, column], counts, name, colour)
            letter(axes[row, column], "abcd"[2 * row + column], f"{name}, {BITS} bits, {epoch}")
    for panel in axes[:, 0]:
        panel.set_ylabel("number of weights")
    for panel in axes[1]:
        panel.set_xlabel(f"weight of {layer.removesuffix('.weight')}")
    legend(figure, axes.flat)
    amount = f"{MOST:,} of the {len(data.y):,}" if len(data.y) > MOST else f"all {len(data.y):,}"
    source = (
        f"one training of {experiment.model.name} on {amount} examples of {TITLES[data.name]}, "
        f"batch {experiment.train.batch}, lr {experiment.train.lr:g}, momentum {experiment.train.momentum:g}"
    )
    footnote(figure, source)
    return DrawnFigure(figure, source)


def _panel(axes: Axes, weights: WeightCounts, name: str, colour: str) -> None:
    """Draw a panel on a logarithmic scale, because a code covers the weights of many bins."""
    axes.stairs(weights.before, weights.edges, fill=True, color=FAINT, label="32 bits, per bin")
    values, counts = list(weights.after), list(weights.after.values())
    axes.vlines(values, 0.5, counts, color=colour, linewidth=1.4)
    axes.plot(values, counts, "o", color=colour, markersize=2.6, label=f"{name}, per code")
    axes.set_yscale("log")
    axes.set_ylim(0.7, 10 ** (math.log10(max(counts)) + 1.2))
    text = f"error {100 * weights.error:.1f} %, mean {weights.mean:.4f}, spread {weights.spread:.3f}".replace(
        "-", "\N{MINUS SIGN}"
    )
    axes.text(1, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=SMALL)
