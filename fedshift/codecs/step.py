"""Evenly spaced levels around zero, for updates and entropy coders.

    k = floor(|x| / step + 1 - DEAD),  code 0 for k = 0, 2k - 1 for x > 0, 2k for x < 0
    x ~ (k - offset) step,             one offset for k = 1 and one for all larger k

At equal entropy, evenly spaced levels with a dead zone have a smaller error than the levels of K-means, which are
optimal for codes of equal length (Gish and Pierce 1968). The offsets move each level to the mean of its values.

Long rows, and few rows, are coded one by one with NumPy on a CPU; many short rows, and rows on a GPU, are coded
together with torch. The results are the same.
"""

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs import magnitudes
from fedshift.codecs.base import FixedWidth, Side, chunks, require_number
from fedshift.codecs.codec import Codec
from fedshift.codecs.entropy import Range
from fedshift.codecs.magnitudes import ROWS, Counts, Doubles, Floats, largest, one_by_one

Codes = NDArray[np.uint8]

DEAD = 0.65  # half of the zero level's width, in steps


class StepLevels(FixedWidth):
    """Levels at multiples of a step on both sides of zero: code 0 for k = 0, 2k - 1 for x > 0 and 2k for x < 0."""

    @property
    def top(self) -> int:
        """The largest k."""
        return int(2 ** (self.bits - 1) - 1)

    def with_bits(self, bits: int) -> FixedWidth:
        raise ValueError(f"{self} cannot have {bits} bits")  # its size is set by its rate

    def levels(self, n: int) -> int:
        return 2 * self.top + 1

    def table(self, side: Side) -> Tensor:
        return self._values(torch.arange(2 * self.top + 1, device=side.device), side)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """table[codes]; the table is only computed for rows with at least as many values as it has entries."""
        if codes.shape[1] >= 2**self.bits:
            return super().decode(codes, side)
        return self._values(codes.int(), side)

    @abstractmethod
    def _values(self, codes: Tensor, side: Side) -> Tensor:
        """codes of any integer type (n,) or (rows, n) -> float32 (rows, n)."""

    def _check(self, rate: float | None) -> None:
        name = type(self).__name__
        if self.bits < 2:
            raise ValueError(f"{name}(bits={self.bits}): bits must be between 2 and 8")
        if rate is not None:
            require_number(self, rate=rate)
        if rate is not None and not 0.001 <= rate <= self.bits - 1:
            raise ValueError(f"{name}(rate={rate}): rate must be between 0.001 and {self.bits - 1} bits per value")


@dataclass(frozen=True)
class Step(StepLevels, number=6):
    """Levels at multiples of a step: `step` times the row's root mean square, or the step for `rate` bits per value.

    The rate is the entropy of the codes, which a range coder reaches. `bits` is the width of a code before that: a row
    has at most 2^bits - 1 levels, and its step is increased if its largest value would need more.

    common: one step for all tensors of a client, from the root mean square or the entropy over all of them. At equal
    entropy, it has the smallest error of all tensors together.

    >>> codes, side = Step(step=1.0).encode(torch.tensor([[1.0, -1.0, 2.0, 0.2]]))
    >>> codes.tolist()
    [[1, 2, 1, 0]]
    """

    bits: int = 8
    step: float = 2.0
    rate: float | None = None
    common: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self, step=self.step)
        if not 0.01 <= self.step <= 1000:
            raise ValueError(f"Step(step={self.step}): step must be between 0.01 and 1000 times the root mean square")
        self._check(self.rate)

    def width(self, n: int) -> int:
        return 3

    def reach(self, side: Side, highest: int) -> float:
        step, first, further = map(float, side.abs().amax(0))
        farthest = (highest + 1) // 2 + max(first, further, key=lambda offset: (math.isnan(offset), offset))
        return step * farthest * (1 + 2.0**-22)  # differences are rounded to float32

    def _values(self, codes: Tensor, side: Side) -> Tensor:
        step, first, further = side[:, :, None].unbind(1)
        k = (codes + 1) >> 1
        size = (k - torch.where(k == 1, first, further)).mul_(step)
        return torch.where(k == 0, 0.0, torch.where(codes & 1 == 1, size, -size))

    @property
    def prepares(self) -> bool:
        return self.common or self.rate is not None

    @property
    def across(self) -> bool:
        return self.common

    @property
    def stack(self) -> Hashable:
        return (type(self), self.bits, self.common) if self.prepares else self

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        """The common step, else the rate."""
        rate = torch.full((len(tensors[0]),), self.rate or 0.0, dtype=torch.float64, device=tensors[0].device)
        if not self.common:
            return rate
        most = torch.stack([largest(x) for x in tensors]).amax(0)
        return torch.maximum(self._steps(tensors, rate), most / (self.top + DEAD))

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        if one_by_one(x):
            scales = [None] * len(x) if scale is None else scale.tolist()
            rows = zip(x.numpy(), scales, codes.numpy(), strict=True)
            return codes, torch.tensor([self._encode_row(*row) for row in rows], dtype=torch.float32)
        step = self._step(x, scale)
        inverse = torch.where(step > 0, 1 / step, 0.0)
        ones, size, further, short = _codes(x, inverse, self.top, codes)
        offsets = torch.stack([1 - size / ones.clamp(min=1), short / further.clamp(min=1)])
        offsets = torch.where(torch.stack([ones, further]) > 0, (offsets * 4096).round() / 4096, 0.0)
        return codes, torch.stack([step, *offsets.float()], dim=1)

    def _step(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Step of each row, float32 (rows,), rounded so that it does not depend on the order of summation."""
        most = largest(x)
        magnitudes.check_largest(float(most.max()), self.bits)
        if self.common and scale is not None:
            step = scale
        else:
            rate = torch.full_like(most, self.rate or 0.0) if scale is None else scale
            step = self._steps([x], rate)
        return magnitudes.rounded(torch.maximum(step, most / (self.top + DEAD)))

    def _steps(self, tensors: Sequence[Tensor], rate: Tensor) -> Tensor:
        """One step for all tensors (K, n_i) of a client: float64 (K,); `rate` is used unless `self.rate` is None."""
        if one_by_one(*tensors):
            clients = zip(zip(*(x.numpy() for x in tensors), strict=True), rate.tolist(), strict=True)
            return torch.tensor([self._row_step(*client) for client in clients], dtype=torch.float64)
        total = sum(x.shape[1] for x in tensors)
        norms = torch.stack([torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in tensors])
        rms: Tensor = torch.linalg.vector_norm(norms, dim=0) / math.sqrt(total)
        if self.rate is None:
            return rms * self.step
        found = []
        for at in range(0, len(rms), ROWS):
            r = slice(at, at + ROWS)
            tails = reduce(torch.add, (magnitudes.tails(x[r], rms[r]) for x in tensors))
            found.append(steps_for(tails, total, rate[r], self.top))
        return rms * torch.cat(found)

    def _encode_row(self, row: Floats, scale: float | None, out: Codes) -> tuple[float, float, float]:
        """Write the codes of one row; step and offsets."""
        magnitudes.check_largest(most := magnitudes.row_largest(row), self.bits)
        if self.common and scale is not None:
            step = scale
        else:
            step = self._row_step([row], (self.rate or 0.0) if scale is None else scale)
        step = magnitudes.row_rounded(max(step, most / (self.top + DEAD)))
        inverse = float(np.float32(1) / np.float32(step)) if step else 0.0
        ones, size, further, short = _row_codes(row, inverse, self.top, out)
        first = round((1 - size / ones) * 4096) / 4096 if ones else 0.0
        return step, first, round(short / further * 4096) / 4096 if further else 0.0

    def _row_step(self, rows: Sequence[Floats], rate: float) -> float:
        """`_steps` for the rows of one client."""
        total = sum(len(row) for row in rows)
        rms = math.sqrt(sum(map(magnitudes.row_squares, rows))) / math.sqrt(total)
        if self.rate is None:
            return rms * self.step
        counts = reduce(np.add, (magnitudes.row_counts(row, np.float32(rms)) for row in rows))
        return rms * row_step_for(counts, total, rate, self.top)


def common_step(rate: float = 0.8) -> Codec:
    """Multiples of one step for all tensors, most codes zero: `rate` bits per value over all of them."""
    return Codec(Step(rate=rate, common=True), Range())


def steps_for(tails: Tensor, n: int, rate: Tensor, top: int) -> Tensor:
    """Step divided by rms at which the codes of n values have an entropy of `rate` bits, (rows,): float64 (rows,)."""
    levels = torch.arange(top, device=tails.device, dtype=torch.float64) + DEAD  # where k = 1, 2, ... begin
    return magnitudes.searched(lambda steps: _entropy(tails, steps[:, :, None] * levels, n), rate)


def row_step_for(counts: Counts, n: int, rate: float, top: int) -> float:
    """The same for one row, from the numbers of values in each bin, by sign: int64 (2 bins,)."""
    tails = magnitudes.row_tails(counts)
    reach, levels = magnitudes.row_reach(tails), np.arange(top) + DEAD

    def entropy(steps: Doubles) -> Doubles:
        """Levels beyond the largest value are empty, and left out."""
        return _row_entropy(tails, steps[:, None] * levels[: 1 + int(min(reach / steps[0], top - 1))], n)

    return magnitudes.row_searched(entropy, rate)


def _codes(x: Tensor, inverse: Tensor, top: int, codes: Tensor) -> Tensor:
    """Write the codes for steps of 1 / inverse.

    Returns for k = 1 the number of values and the sum of |x| / step, and for larger k their number and the sum of
    k - |x| / step: float64 (4, rows).
    """
    sums = torch.zeros(4, len(x), dtype=torch.float64, device=x.device)
    for r, c in chunks(x):
        size = x[r, c].abs().mul_(inverse[r, None])
        k = (size + (1 - DEAD)).floor_().clamp_(max=top)
        first, more = k == 1, k > 1
        parts = first, size * first, more, (k - size) * more
        sums[:, r] += torch.stack([part.sum(1, dtype=torch.float64) for part in parts])
        codes[r, c] = torch.where(x[r, c] > 0, 2 * k - 1, 2 * k).clamp_(min=0).to(torch.uint8)
    return sums


def _row_codes(row: Floats, inverse: float, top: int, codes: Codes) -> tuple[int, float, int, float]:
    """The same for one row: only values other than zero are summed."""
    ones, further, total, short = 0, 0, 0.0, 0.0
    for c in magnitudes.pieces(row):
        x, code = row[c], codes[c]
        size = np.abs(x)
        size *= np.float32(inverse)
        k = np.minimum(size + np.float32(1 - DEAD), np.float32(top)).astype(np.uint8)
        np.multiply(k, 2, out=code)
        code -= (x > 0) & (k > 0)
        where = np.flatnonzero(k)
        far, size = k[where], size[where]
        first = far == 1
        more = ~first
        ones += (number := int(np.count_nonzero(first)))
        further += len(far) - number
        total += float(size[first].sum(dtype=np.float64))
        short += float((far[more] - size[more]).sum(dtype=np.float64))
    return ones, total, further, short


def _entropy(tails: Tensor, borders: Tensor, n: int) -> Tensor:
    """Bits per value of levels that begin at these multiples of rms: borders (rows, steps, levels) -> (rows, steps)."""
    below, place = magnitudes.place_of(borders.flatten(1))
    near, far = (tails.gather(2, (below + offset).expand(2, -1, -1)) for offset in (0, 1))
    above = (near + (far - near) * (place - below)).view(2, *borders.shape)  # values of each sign beyond each border
    above[..., :-1] -= above[..., 1:].clone()  # values of each sign and level
    return magnitudes.bits_per_value(above, n)


def _row_entropy(tails: Doubles, borders: Doubles, n: int) -> Doubles:
    """The same for one row: tails (2, bins + 1), borders (steps, levels) -> (steps,)."""
    below, place = magnitudes.row_place_of(borders)
    near = tails.take(below, axis=1)
    above = near + (tails.take(below + 1, axis=1) - near) * (place - below)
    above[..., :-1] -= above[..., 1:]
    return magnitudes.row_bits_per_value(above, n)
