"""Fixed levels for normally distributed values, which need no codebook.

    Lloyd and Max:  c_i = E[X | X is nearest to c_i],  X ~ N(0, 1)

`Normal` are these levels with a scale per row, for rotated values: EDEN (Vargaftik et al., EDEN:
Communication-Efficient and Robust Distributed Mean Estimation, 2022). `FixedCode` are levels of which one is zero,
without a scale, for values that the algorithm has standardised: FedWSQ (Kim et al. 2025).
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, FixedWidth, Side, chunks, ends, finite
from fedshift.codecs.bitpack import BitPack
from fedshift.codecs.codec import Codec, PerBlock
from fedshift.codecs.entropy import Range
from fedshift.codecs.rotation import Hadamard

FRACTION = 1 << 16  # levels are multiples of 1 / FRACTION, so that every machine has the same
STEPS = 8  # of Newton's method; after 5, levels change by less than 1e-12


@dataclass(frozen=True)
class Normal(FixedWidth, number=10):
    """Nearest of the 2^bits levels c of a standard normal distribution to x / rms, times a scale per row.

        scale = |x|^2 / <x, c(x / rms)>

    The decoded row then has the projection x onto x. After a random rotation, its expectation is x (EDEN).

    >>> codes, side = Normal(1).encode(torch.tensor([[1.0, -1.0, 3.0, 1.0]]))
    >>> codes.tolist(), Normal(1).decode(codes, side).tolist()  # 12 / 6
    ([[1, 0, 1, 1]], [[2.0, -2.0, 2.0, 2.0]])
    """

    def width(self, n: int) -> int:
        return 1

    def levels(self, n: int) -> int:
        return int(2**self.bits)

    def table(self, side: Side) -> Tensor:
        return side * _tensor(normal_levels(self.bits), side)

    def reach(self, side: Side, highest: int) -> float:
        return max(map(abs, ends(side * normal_levels(self.bits)[-1])))

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """table[codes], without a table that may have more entries than the row has values"""
        out = torch.empty(codes.shape, device=codes.device)
        levels = _tensor(normal_levels(self.bits), side)
        for r, c in chunks(codes):
            out[r, c] = levels[codes[r, c].int()] * side[r]
        return out

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if not finite(x):
            raise ValueError(NOT_FINITE)
        levels, square = _tensor(normal_levels(self.bits), x), torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        square = square[:, None].square()
        rms = (square / x.shape[1]).sqrt().float()
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        product = torch.zeros_like(square)
        for r, c in chunks(x):
            codes[r, c] = nearest(torch.where(rms[r] > 0, x[r, c] / rms[r], 0.0), levels)
            product[r] += (x[r, c].double() * levels[codes[r, c].int()]).sum(1, keepdim=True)
        side = torch.where(product > 0, square / product, 0.0).float()
        if not (side * levels[-1]).isfinite().all():
            raise ValueError(f"contains numbers too large for {self}: decoded values would exceed the range of float32")
        return codes, side


@dataclass(frozen=True)
class FixedCode(FixedWidth, number=11):
    """Nearest of 2^bits fixed levels, of which one is zero if there are more than two; no side data.

    Values are expected to have a standard deviation near one. Other values become the outermost levels.

    >>> [round(level, 4) for level in FixedCode(2).table(torch.zeros(1, 0))[0].tolist()]
    [-1.224, 0.0, 0.7646, 1.7242]
    >>> FixedCode(2).encode(torch.tensor([[-9.0, 0.3, 0.4, 2.0]]))[0].tolist()
    [[0, 1, 2, 3]]
    """

    def width(self, n: int) -> int:
        return 0

    def levels(self, n: int) -> int:
        return int(2**self.bits)

    def table(self, side: Side) -> Tensor:
        return _tensor(fixed_levels(self.bits), side).expand(len(side), -1)

    def reach(self, side: Side, highest: int) -> float:
        return max(map(abs, fixed_levels(self.bits)))

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        levels = _tensor(fixed_levels(self.bits), side)
        return levels.index_select(0, codes.flatten().int()).view(codes.shape)

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if not finite(x):
            raise ValueError(NOT_FINITE)
        codes, levels = torch.empty(x.shape, dtype=torch.uint8, device=x.device), _tensor(fixed_levels(self.bits), x)
        for r, c in chunks(x):
            codes[r, c] = nearest(x[r, c], levels)
        return codes, x.new_zeros(len(x), 0)


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Index of the nearest of ascending levels, uint8."""
    return torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)


@cache
def normal_levels(bits: int) -> tuple[float, ...]:
    """2^bits levels of Lloyd and Max.

    >>> [round(level, 3) for level in normal_levels(2)]
    [-1.51, -0.453, 0.453, 1.51]
    """
    half = _positive(2 ** (bits - 1), zero=False)
    return (*(-level for level in reversed(half)), *half)


@cache
def fixed_levels(bits: int) -> tuple[float, ...]:
    """2^bits levels of Lloyd and Max with one level at zero, and one more above than below; without zero for one bit.

    >>> [round(level, 4) for level in fixed_levels(1)]
    [-0.7979, 0.7979]
    """
    if bits == 1:
        return normal_levels(1)
    above, below = (_positive(2 ** (bits - 1) - less, zero=True) for less in (0, 1))
    return (*(-level for level in reversed(below)), 0.0, *above)


def _positive(count: int, zero: bool) -> tuple[float, ...]:
    """Positive levels c_1 < ... < c_count, by Newton's method; `zero`: a further level is 0."""
    places = [(i + 1) / (2 * count + 1) if zero else (i + 0.5) / (2 * count) for i in range(count)]
    c = np.array([NormalDist(0, math.sqrt(3)).inv_cdf(0.5 + place) for place in places])  # optimal for many levels
    for _ in range(STEPS):
        borders = [c[0] / 2 if zero else 0.0, *((c[1:] + c[:-1]) / 2), math.inf]
        density = np.array([math.exp(-b * b / 2) / math.sqrt(2 * math.pi) for b in borders])
        tail = np.array([math.erfc(b / math.sqrt(2)) / 2 for b in borders])
        part = tail[:-1] - tail[1:]
        mean = (density[:-1] - density[1:]) / part
        # derivatives of each mean with respect to the borders, which move half as much as the levels beside them
        lower = density[:-1] * (mean - borders[:-1]) / part / 2
        upper = density[1:-1] * (borders[1:-1] - mean[:-1]) / part[:-1] / 2
        slope = np.eye(count) - np.diag(lower[1:], -1) - np.diag(upper, 1)
        slope -= np.diag([lower[0] if zero else 0.0, *lower[1:]]) + np.diag([*upper, 0.0])
        c = c - np.linalg.solve(slope, c - mean)
    return tuple(float(level) / FRACTION for level in np.rint(c * FRACTION))


def _tensor(levels: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=like.device)


def eden(bits: int = 1) -> Codec:
    """EDEN: a random rotation, then the levels of a normal distribution, without bias.

    Each block of 4,096 values has its own scale, because values of an update differ in size between blocks.
    """
    return Codec(Normal(bits), Range() if bits > 1 else BitPack(), PerBlock(4096), Hadamard())


def fixed(bits: int = 2) -> Codec:
    """Fixed levels for standardised messages, such as those of the algorithm fedwsq."""
    return Codec(FixedCode(bits), Range() if bits > 1 else BitPack())
