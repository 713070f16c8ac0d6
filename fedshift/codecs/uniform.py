"""The paper's min-max quantizer (its equations for Q and DeQ), and stochastic rounding to the same grid."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, FixedWidth, Side, chunks
from fedshift.core import rng


@dataclass(frozen=True)
class Grid(FixedWidth):
    """2^bits evenly spaced levels between the minimum and the maximum of a row."""

    @property
    def expands(self) -> bool:  # type: ignore[override]
        """With one bit: an error is up to a whole range (Uniform: half of it), which grows by it at both ends."""
        return self.bits == 1

    def width(self, n: int) -> int:
        return 2

    def levels(self, n: int) -> int:
        return int(2**self.bits)

    def table(self, side: Side) -> Tensor:
        """min + q (max - min) / (2^bits - 1) for q = 0 .. 2^bits - 1, in float64; both ends are exact."""
        return self._levels(torch.arange(2**self.bits, device=side.device), side)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """table[codes]; the table is only computed for rows with at least as many values as it has entries."""
        if codes.shape[1] >= 2**self.bits:
            return super().decode(codes, side)
        out = torch.empty(codes.shape, device=codes.device)
        for r, c in chunks(codes):
            out[r, c] = self._levels(codes[r, c], side[r])
        return out

    def _levels(self, codes: Tensor, side: Side) -> Tensor:
        low, high = side.double()[:, :1], side.double()[:, 1:]
        top = 2**self.bits - 1
        return torch.where(codes == top, side[:, 1:], (low + codes.double() / top * (high - low)).float())


@dataclass(frozen=True)
class Uniform(Grid, number=1):
    """Q(w) = round((w - min) / (max - min) * (2^bits - 1)), one range per row.

    Both ends of the range are decoded exactly, every other value within half a step.

    >>> codes, side = Uniform(2).encode(torch.tensor([[0.0, 0.9, 2.0, 3.0]]))
    >>> codes.tolist(), side.tolist()
    ([[0, 1, 2, 3]], [[0.0, 3.0]])
    >>> Uniform(2).decode(codes, side).tolist()
    [[0.0, 1.0, 2.0, 3.0]]
    """

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        side = span(x)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        low, steps = grid(side, self.bits)
        for r, c in chunks(x):
            store(scaled(x[r, c], low[r], steps[r]).round_(), codes[r, c])
        return codes, side


@dataclass(frozen=True)
class Stochastic(Grid, number=3):
    """Unbiased rounding to the same grid: up with a probability equal to the fractional part.

    E[DeQ(Q(w))] = w. Draws are determined by the keys, one per row: same keys, same codes.
    Based on QSGD (Alistarh et al. 2017), with the row's range instead of its norm.

    >>> x, key = torch.tensor([[0.0, 0.25, 1.0]]).expand(1000, 3), torch.arange(1000)
    >>> Stochastic(1).decode(*Stochastic(1).encode(x, key)).mean(0).round(decimals=1).tolist()
    [0.0, 0.20000000298023224, 1.0]
    """

    random = True

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if key is None:
            raise ValueError("Stochastic rounds at random and needs a key, for example rng.key(seed, 'upload')")
        side = span(x)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        low, steps = grid(side, self.bits)
        for r, c in chunks(x):
            exact = scaled(x[r, c], low[r], steps[r]).clamp_(max=2**self.bits - 1)
            below = exact.floor()
            store(below + (rng.uniform(key[r], exact.shape[1], c.start) < exact - below), codes[r, c])
        return codes, side


def span(x: Tensor) -> Side:
    """(min, max) of each row; ValueError for NaN and infinity."""
    ends = torch.aminmax(x) if len(x) == 1 else torch.aminmax(x, dim=1)  # twelve times faster without dim
    side = torch.stack(ends, dim=-1).view(-1, 2)
    if not side.isfinite().all():
        raise ValueError(NOT_FINITE)
    return side


def grid(side: Side, bits: int) -> tuple[Tensor, Tensor]:
    """min and steps per unit, (rows, 1), in float32 if (w - min) * steps fits, else in float64."""
    low, high = side.double()[:, :1], side.double()[:, 1:]
    steps = torch.where(high > low, (2**bits - 1) / (high - low), 0.0)
    fits = (high - low <= 2.0**127) & (steps <= 2.0**127)  # False if the range overflows or is denormal
    return (low.float(), steps.float()) if fits.all() else (low, steps)


def scaled(x: Tensor, low: Tensor, steps: Tensor) -> Tensor:
    """(w - min) / (max - min) * (2^bits - 1)"""
    return x.sub(low).mul_(steps)


def store(values: Tensor, codes: Tensor) -> None:
    """Write whole numbers into codes; NumPy casts three times as fast as torch."""
    if codes.device.type == "cpu":
        np.copyto(codes.numpy(), values.numpy(), casting="unsafe")
    else:
        codes.copy_(values)
