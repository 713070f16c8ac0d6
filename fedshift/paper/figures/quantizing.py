"""Figure 2: the weights of one filter quantized and dequantized, at 8 and at 4 bits."""

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
        """Between two codes; no weight is off by more than half of it."""
        return (self.high - self.low) / self.most

    @property
    def most(self) -> int:
        """The largest code."""
        return int(2**self.bits) - 1

    def code_at(self, value: Any) -> Any:
        """As a scale: codes are whole, places between them are not. Numbers or arrays."""
        return (value - self.low) / self.step

    def value_of(self, code: Any) -> Any:
        return self.low + code * self.step

    @property
    def errors(self) -> list[float]:
        return [b - a for a, b in zip(self.weights, self.decoded, strict=True)]

    @property
    def bytes(self) -> int:
        """Of the codes, packed."""
        return math.ceil(self.bits * len(self.codes) / 8)


def kernel(seed: int = 0) -> Tensor:
    """5x5 weights of the paper's CNN, as it is initialised."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PaperCNN().conv1.weight.detach()[0, 0].flatten()


def coded(w: Tensor, bits: int) -> CodedWeights:
    """
    >>> one = coded(torch.tensor([0.0, 0.9, 2.0, 3.0]), 2)
    >>> one.codes, one.decoded, one.step, one.bytes
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
        one = coded(w, bits)
        _values(axes[0, column], one, "ab"[column])
        _errors(axes[1, column], one)
    axes[0, 0].set_ylabel("weight")
    axes[1, 0].set_ylabel("error")
    axes[0, 0].legend(loc="upper left", ncols=2, borderpad=0, bbox_to_anchor=(0.0, 1.02))
    return DrawnFigure(figure, f"{len(w)} weights of the paper's CNN, quantized here")


def _values(axes: Axes, one: CodedWeights, which: str) -> None:
    places = range(1, len(one.weights) + 1)
    axes.plot(places, one.weights, "o", color=FAINT, markersize=4.5, markeredgewidth=0, label="weight, 32 bits")
    axes.plot(places, one.decoded, "_", color=SHIFTED, markersize=7, markeredgewidth=1.3, label="after DeQ(Q(w))")
    room = one.high - one.low
    axes.set_ylim(one.low - 0.08 * room, one.high + 0.25 * room)
    size = f"{4 * len(one.codes)} bytes become {one.bytes}"
    letter(axes, which, f"{one.bits} bits: {one.most + 1} codes, {size}")
    right = axes.secondary_yaxis("right", functions=(one.code_at, one.value_of))
    right.set_ylabel("code Q(w)")
    right.set_yticks(range(0, one.most + 1, one.most // 5))
    if one.most < 20:
        for code in range(one.most + 1):
            axes.axhline(one.value_of(code), color=TINT, linewidth=0.6, zorder=0)


def _errors(axes: Axes, one: CodedWeights) -> None:
    places = range(1, len(one.weights) + 1)
    half, worst = one.step / 2, max(map(abs, one.errors))
    axes.axhspan(-half, half, color=TINT, linewidth=0, zorder=0)
    axes.axhline(0, color=EXACT, linewidth=0.4)
    axes.vlines(places, 0, one.errors, color=SHIFTED, linewidth=1.6)
    axes.set_xlabel("place in the 5x5 filter")
    axes.margins(y=0.3)
    told = f"largest {worst:.4f}, half a step {half:.4f} (shaded)"
    axes.text(0.99, 0.98, told, transform=axes.transAxes, ha="right", va="top", fontsize=SMALL)
