"""Multiples of a step, rounded at random without bias, at a given rate: for updates and entropy coders.

    l = floor(|x| / step),  k = l + 1 with probability |x| / step - l, else l:  E[k step] = |x|
    code 0 for k = 0, 2k - 1 for x > 0, 2k for x < 0;  x ~ k step

This is QSGD's rounding (Alistarh et al. 2017) with the step at which the codes have an entropy of `rate` bits, instead
of a norm and a number of levels. Errors of different clients and rounds are independent with mean zero, so they cancel
in the mean of a round without error feedback: clients keep nothing between rounds.

A value contributes max(0, 1 - | |x| / step - k |) to the expected number of codes k. With R(y) = sum_i
max(0, |x_i| - y), it is (R((k - 1) step) - 2 R(k step) + R((k + 1) step)) / step, and R is found from a histogram.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fedshift.codecs import magnitudes
from fedshift.codecs.base import Side, chunks
from fedshift.codecs.magnitudes import DROPPED, FIRST, LEAST, ROWS, Doubles, Floats, largest, one_by_one
from fedshift.codecs.step import StepLevels
from fedshift.core import rng


@dataclass(frozen=True)
class RandomStep(StepLevels, number=13):
    """Multiples of a step, rounded at random without bias, with `rate` bits per value.

    The rate is the entropy of the codes, which a range coder reaches. `bits` is the width of a code before that: a row
    has at most 2^bits - 1 levels, and its step is increased if its largest value would need more. The step of a row of
    one value is its magnitude.

    >>> x, key = torch.tensor([[1.0, -0.25, 0.0, 0.0]]).expand(1000, 4), torch.arange(1000)
    >>> RandomStep(rate=1.0).decode(*RandomStep(rate=1.0).encode(x, key)).mean(0).round(decimals=1).tolist()
    [1.0, -0.20000000298023224, 0.0, 0.0]
    """

    bits: int = 8
    rate: float = 0.8
    random = True
    expands = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(self.rate)

    def width(self, n: int) -> int:
        return 1

    def reach(self, side: Side, highest: int) -> float:
        return float(self._values(torch.tensor(highest, device=side.device), side).abs().amax())

    def _values(self, codes: Tensor, side: Side) -> Tensor:
        size = ((codes + 1) >> 1) * side
        return torch.where(codes & 1 == 1, size, -size) + 0.0  # -0 + 0 = 0

    @property
    def across(self) -> bool:
        return False

    @property
    def stack(self) -> Hashable:
        return type(self), self.bits

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        """The rate: clients with different rates are encoded as one stack."""
        return torch.full((len(tensors[0]),), self.rate, dtype=torch.float64, device=tensors[0].device)

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if key is None:
            raise ValueError("RandomStep rounds at random and needs a key, for example rng.key(seed, 'upload')")
        most = largest(x)
        magnitudes.check_largest(float(most.max()), self.bits + magnitudes.HIGH)  # the step may be 2^HIGH times larger
        rate = self.prepare([x]) if scale is None else scale
        if x.shape[1] == 1:
            step = torch.where(most < LEAST, 0.0, most).float()
        else:
            step = magnitudes.rounded(torch.maximum(self._steps(x, rate), most / self.top))
        inverse = torch.where(step > 0, 1 / step, 0.0)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        for r, c in chunks(x):
            part = x[r, c].abs().mul_(inverse[r, None])
            k = part.floor()
            part.sub_(k)
            k.add_(rng.uniform(key[r], part.shape[1], c.start).lt_(part)).clamp_(max=self.top)
            # in place: 0.0 and 1.0 instead of booleans
            codes[r, c] = k.mul_(2).sub_(x[r, c].gt(0).float()).clamp_(min=0)
        return codes, step[:, None]

    def _steps(self, x: Tensor, rate: Tensor) -> Tensor:
        """Step of each row for its rate: float64 (rows,)."""
        if one_by_one(x):
            rows = zip(x.numpy(), rate.tolist(), strict=True)
            return torch.tensor([_row_step(row, r, self.top) for row, r in rows], dtype=torch.float64)
        rms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) / math.sqrt(x.shape[1])
        found = [
            _steps_for(
                magnitudes.tails(x[at : at + ROWS], rms[at : at + ROWS]), x.shape[1], rate[at : at + ROWS], self.top
            )
            for at in range(0, len(x), ROWS)
        ]
        return rms * torch.cat(found)


def _steps_for(tails: Tensor, n: int, rate: Tensor, top: int) -> Tensor:
    """Step divided by rms at which codes of n values have an expected entropy of `rate` bits: (rows,)."""
    borders = torch.from_numpy(_borders()).to(tails.device)
    tails[..., 0] = tails[..., 1]  # zeros, which may have a sign, are in the first bin
    area = (tails[..., 1:] + tails[..., :-1]).mul_(borders.diff() / 2)  # of each bin, under the number of larger values
    beyond = torch.nn.functional.pad(area.flip(2).cumsum(2).flip(2), (0, 1))  # R at each border
    levels = torch.arange(1, top + 2, device=tails.device, dtype=torch.float64)

    def entropy(steps: Tensor) -> Tensor:
        y = steps[:, :, None] * levels
        below, place = magnitudes.place_of(y.flatten(1))
        near, far = (tails.gather(2, (below + offset).expand(2, -1, -1)) for offset in (0, 1))
        part = place - below
        rest = (near + (far - near) * part + far) / 2 * (1 - part) * borders.diff()[below]
        excess = (beyond.gather(2, (below + 1).expand(2, -1, -1)) + rest).view(2, *y.shape)  # R(k step) of each sign
        total = (beyond[..., 0] + tails[..., 0] * borders[0])[..., None, None].expand(-1, -1, y.shape[1], 1)  # R(0)
        r = torch.cat([total, excess], dim=3)
        counts = (r[..., :-2] - 2 * r[..., 1:-1] + r[..., 2:]) / steps[:, :, None]
        return magnitudes.bits_per_value(counts.clamp_(min=0), n)

    return magnitudes.searched(entropy, rate)


def _row_step(row: Floats, rate: float, top: int) -> float:
    """`_steps` for one row."""
    n = len(row)
    rms = math.sqrt(magnitudes.row_squares(row)) / math.sqrt(n)
    tails, borders = magnitudes.row_tails(magnitudes.row_counts(row, np.float32(rms))), _borders()
    widths, reach = np.diff(borders), magnitudes.row_reach(tails)
    tails[:, 0] = tails[:, 1]
    beyond = np.zeros_like(tails)
    beyond[:, :-1] = ((tails[:, 1:] + tails[:, :-1]) * (widths / 2))[:, ::-1].cumsum(1)[:, ::-1]
    total = (beyond[:, 0] + tails[:, 0] * borders[0])[:, None, None]

    def entropy(steps: Doubles) -> Doubles:
        """Levels beyond the largest value are empty, and left out."""
        y = steps[:, None] * np.arange(1, 3 + int(min(reach / steps[0], top - 1)))
        below, place = magnitudes.row_place_of(y)
        near, far = (tails.take(below + offset, axis=1) for offset in (0, 1))
        part = place - below
        excess = beyond.take(below + 1, axis=1) + (near + (far - near) * part + far) / 2 * (1 - part) * widths[below]
        r = np.concatenate([np.broadcast_to(total, (2, len(steps), 1)), excess], axis=2)
        counts = (r[..., :-2] - 2 * r[..., 1:-1] + r[..., 2:]) / steps[:, None]
        return magnitudes.row_bits_per_value(np.maximum(counts, 0), n)

    return rms * magnitudes.row_searched(entropy, rate)


@cache
def _borders() -> Doubles:
    """Lower borders of the bins of magnitudes, in units of rms, and the upper border of the last: (bins + 1,)."""
    first = np.arange(FIRST, FIRST + magnitudes.BINS + 1, dtype=np.int32) << DROPPED
    return first.view(np.float32).astype(np.float64)
