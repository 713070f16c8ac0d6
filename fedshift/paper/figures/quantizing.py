"""Figure 2: weights of one filter, quantized and dequantized at 8 and at 4 bits."""

import math
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor

from fedshift.codecs import Uniform
from fedshift.models import PaperCNN
from fedshift.paper.figures.style import EXACT, FAINT, PAGE, SHIFTED, SMALL, TINT, DrawnFigure, letter, sheet

BITS = (8, 4)


class CodedWeights(NamedTuple):
    """Q(w) and DeQ(Q(w)) of some weights."""

    bits: int
    weights: list[float]
    codes: list[int]
    decoded: list[float]
    low: float
    high: float

    @property
    def step(self) -> float:
        """Distance between two codes; no error is larger than half of it."""
        return (self.high - self.low) / self.most

    @property
    def most(self) -> int:
        """Largest code."""
        return int(2**self.bits) - 1

    def code_at(self, value: Any) -> Any:
        """Position of a value or an array on the scale of codes, not rounded."""
        return (value - self.low) / self.step

    def value_of(self, code: Any) -> Any:
        return self.low + code * self.step

    @property
    def errors(self) -> list[float]:
        return [b - a for a, b in zip(self.weights, self.decoded, strict=True)]

    @property
    def bytes(self) -> int:
        """Size of the packed codes."""
        return math.ceil(self.bits * len(self.codes) / 8)


def kernel(seed: int = 0) -> Tensor:
    """5x5 initial weights of the paper's CNN."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PaperCNN().conv1.weight.detach()[0, 0].flatten()


def coded(w: Tensor, bits: int) -> CodedWeights:
    """
    >>> weights = coded(torch.tensor([0.0, 0.9, 2.0, 3.0]), 2)
    >>> weights.codes, weights.decoded, weights.step, weights.bytes
    ([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], 1.0, 1)
    """
    codes, side = Uniform(bits).encode(w[None])
    decoded = Uniform(bits).decode(codes, side)
    low, high = side[0].tolist()
    return CodedWeights(bits, w.tolist(), codes[0].tolist(), decoded[0].tolist(), low, high)


def draw() -> DrawnFigure:
    w = kernel()
    figure = sheet(PAGE, 2.75)
    axes = figure.subplots(2, len(BITS), sharex=True, sharey="row", height_ratios=[2.2, 1])
    for column, bits in enumerate(BITS):
        coded_weights = coded(w, bits)
        _values(axes[0, column], coded_weights, "ab"[column])
        _errors(axes[1, column], coded_weights)
    axes[0, 0].set_ylabel("weight")
    axes[1, 0].set_ylabel("error")
    axes[0, 0].legend(loc="upper left", ncols=2, borderpad=0, bbox_to_anchor=(0.0, 1.02))
    return DrawnFigure(figure, f"{len(w)} weights of the paper's CNN, quantized for this figure")


def _values(axes: Axes, weights: CodedWeights, which: str) -> None:
    positions = range(1, len(weights.weights) + 1)
    axes.plot(positions, weights.weights, "o", color=FAINT, markersize=4.5, markeredgewidth=0, label="weight, 32 bits")
    axes.plot(
        positions, weights.decoded, "_", color=SHIFTED, markersize=7, markeredgewidth=1.3, label="after DeQ(Q(w))"
    )
    span = weights.high - weights.low
    axes.set_ylim(weights.low - 0.08 * span, weights.high + 0.25 * span)
    size = f"{4 * len(weights.codes)} bytes become {weights.bytes}"
    letter(axes, which, f"{weights.bits} bits: {weights.most + 1} codes, {size}")
    right = axes.secondary_yaxis("right", functions=(weights.code_at, weights.value_of))
    right.set_ylabel("code Q(w)")
    right.set_yticks(range(0, weights.most + 1, weights.most // 5))
    if weights.most < 20:
        for code in range(weights.most + 1):
            axes.axhline(weights.value_of(code), color=TINT, linewidth=0.6, zorder=0)


def _errors(axes: Axes, weights: CodedWeights) -> None:
    positions = range(1, len(weights.weights) + 1)
    half, worst = weights.step / 2, max(map(abs, weights.errors))
    axes.axhspan(-half, half, color=TINT, linewidth=0, zorder=0)
    axes.axhline(0, color=EXACT, linewidth=0.4)
    axes.vlines(positions, 0, weights.errors, color=SHIFTED, linewidth=1.6)
    axes.set_xlabel("position in the 5x5 filter")
    axes.margins(y=0.3)
    text = f"largest {worst:.4f}, half a step {half:.4f} (shaded)"
    axes.text(0.99, 0.98, text, transform=axes.transAxes, ha="right", va="top", fontsize=SMALL)
