"""Evenly spaced levels around zero, for updates and entropy coders.

    k = floor(|x| / step + 1 - DEAD),  code 0 for k = 0, 2k - 1 for x > 0, 2k for x < 0
    x ~ (k - offset) step,             one offset for k = 1 and one for all larger k

At equal entropy, evenly spaced levels with a dead zone have a smaller error than the levels of K-means, which are
optimal for codes of equal length (Gish and Pierce 1968). The offsets move each level to the mean of its values.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, FixedWidth, Side, any_order, chunks

DEAD = 0.65  # half of the zero level's width, in steps
LOW, HIGH = -16, 16  # octaves around the root mean square that bins of magnitudes cover
DROPPED = 16  # low bits of a float32 that its bin ignores: an octave has 128 bins
FIRST, BINS = (LOW + 127) << (23 - DROPPED), (HIGH - LOW) << (23 - DROPPED)
ROWS = 128  # rows whose step is searched at once: each takes a few hundred kilobytes
LEAST = 2.0**-110  # smallest step: a smaller one becomes zero
PARTS, PASSES = 12, 3  # the search divides an interval into PARTS, then one of these parts, PASSES times


@dataclass(frozen=True)
class Step(FixedWidth, number=6):
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
        if self.bits < 2:
            raise ValueError(f"Step(bits={self.bits}): bits must be between 2 and 8")
        if not 0.01 <= self.step <= 1000:
            raise ValueError(f"Step(step={self.step}): step must be between 0.01 and 1000 times the root mean square")
        if self.rate is not None and not 0.001 <= self.rate <= self.bits - 1:
            raise ValueError(f"Step(rate={self.rate}): rate must be between 0.001 and {self.bits - 1} bits per value")

    @property
    def top(self) -> int:
        """The largest k."""
        return int(2 ** (self.bits - 1) - 1)

    def with_bits(self, bits: int) -> FixedWidth:
        raise ValueError(f"{self} cannot have {bits} bits")  # its size is set by its rate

    def width(self, n: int) -> int:
        return 3

    def levels(self, n: int) -> int:
        return 2 * self.top + 1

    def table(self, side: Side) -> Tensor:
        return self._values(torch.arange(2 * self.top + 1, device=side.device), side)

    def reach(self, side: Side, highest: int) -> float:
        step, first, further = map(float, side.abs().amax(0))
        farthest = (highest + 1) // 2 + max(first, further, key=lambda offset: (math.isnan(offset), offset))
        return step * farthest * (1 + 2.0**-22)  # differences are rounded to float32

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """table[codes]; the table is only computed for rows with at least as many values as it has entries."""
        if codes.shape[1] >= 2**self.bits:
            return super().decode(codes, side)
        return self._values(codes.int(), side)

    def _values(self, codes: Tensor, side: Side) -> Tensor:
        step, first, further = side[:, :, None].unbind(1)
        k = (codes + 1) >> 1
        size = (k - torch.where(k == 1, first, further)).mul_(step)
        return torch.where(k == 0, 0.0, torch.where(codes & 1 == 1, size, -size))

    @property
    def prepares(self) -> bool:
        return self.common or self.rate is not None

    @property
    def stack(self) -> Hashable:
        return (type(self), self.bits, self.common) if self.prepares else self

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        """The common step, else the rate."""
        stack, total = len(tensors[0]), sum(x.shape[1] for x in tensors)
        if not self.common:
            return torch.full((stack,), self.rate or 0.0, dtype=torch.float64, device=tensors[0].device)
        norms, largest = (
            torch.stack([torch.linalg.vector_norm(x, p, dim=1, dtype=torch.float64) for x in tensors]).norm(p, dim=0)
            for p in (2, torch.inf)
        )
        rms = norms / math.sqrt(total)
        if self.rate is None:
            step = rms * self.step
        else:
            rate = torch.full_like(rms, self.rate)
            parts = [
                steps_for(reduce(torch.add, (_tails(x[r], rms[r]) for x in tensors)), total, rate[r], self.top)
                for r in (slice(at, at + ROWS) for at in range(0, stack, ROWS))
            ]
            step = rms * torch.cat(parts)
        return torch.maximum(step, largest / (self.top + DEAD))

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        step = self._step(x, scale)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        sums = torch.zeros(4, len(x), dtype=torch.float64, device=x.device)
        inverse = torch.where(step > 0, 1 / step, 0.0)
        for r, c in chunks(x):
            size = x[r, c].abs().mul_(inverse[r, None])
            k = (size + (1 - DEAD)).floor_().clamp_(max=self.top)
            first, more = k == 1, k > 1
            part = first.sum(1), (size * first).sum(1), more.sum(1), ((k - size) * more).sum(1)
            sums[:, r] += torch.stack([x.double() for x in part])
            codes[r, c] = torch.where(x[r, c] > 0, 2 * k - 1, 2 * k).clamp_(min=0).to(torch.uint8)
        ones, size, further, short = sums
        offsets = torch.stack([1 - size / ones.clamp(min=1), short / further.clamp(min=1)])
        offsets = torch.where(torch.stack([ones, further]) > 0, (offsets * 4096).round() / 4096, 0.0)
        return codes, torch.stack([step, *offsets.float()], dim=1)

    def _step(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Step of each row, float32 (rows,), rounded so that it does not depend on the order of summation."""
        largest = torch.linalg.vector_norm(x, torch.inf, dim=1).double()
        if not (largest < torch.finfo(torch.float32).max / 2**self.bits).all():
            raise ValueError(NOT_FINITE if not largest.isfinite().all() else "contains a number beyond 2^120")
        step = scale if self.common and scale is not None else self._own_step(x, scale)
        step = torch.maximum(step, largest / (self.top + DEAD))
        step = torch.where(step < LEAST, 0.0, step)
        mantissa, exponent = torch.frexp(step)
        return torch.ldexp((mantissa * 4096).ceil() / 4096, exponent).float()

    def _own_step(self, x: Tensor, rates: Tensor | None) -> Tensor:
        """Step of each row from its own values and rate, float64 (rows,)."""
        rms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) / math.sqrt(x.shape[1])
        if self.rate is None:
            return rms * self.step
        rates = torch.full_like(rms, self.rate) if rates is None else rates
        parts = zip(*(torch.split(part, ROWS) for part in (x, rms, rates)), strict=True)
        return rms * torch.cat([steps_for(_tails(y, r), x.shape[1], rate, self.top) for y, r, rate in parts])


def steps_for(tails: Tensor, n: int, rate: Tensor, top: int) -> Tensor:
    """Step divided by rms at which the codes of n values have an entropy of `rate` bits, (rows,): float64 (rows,).

    The entropy is computed from a histogram of magnitudes, so that values are read only once.
    """
    device = tails.device
    levels = torch.arange(top, device=device, dtype=torch.float64) + DEAD  # where k = 1, 2, ... begin
    parts = torch.arange(PARTS + 1, device=device, dtype=torch.float64)
    low, width = torch.full_like(rate, LOW + 8), float(HIGH - LOW - 8)  # octaves
    for _ in range(PASSES):
        width /= PARTS
        steps = (low[:, None] + width * parts).exp2()
        bits = _entropy(tails, steps[:, :, None] * levels, n)
        last = torch.where(bits > rate[:, None], parts, 0.0).amax(1, keepdim=True)  # the largest with a higher rate
        place = (last.long() + 1).clamp(1, PARTS)
        low = low + width * (place[:, 0] - 1)
    more, less = bits.gather(1, place - 1)[:, 0], bits.gather(1, place)[:, 0]
    return (low + width * ((more - rate) / (more - less).clamp(min=1e-9)).clamp(0, 1)).exp2()


def _tails(x: Tensor, rms: Tensor) -> Tensor:
    """Numbers of values, by sign, with at least the magnitude of each bin: float64 (2, rows, bins + 1)."""
    place = _bits(x.abs() / rms[:, None].float()).bitwise_right_shift_(DROPPED).sub_(FIRST).clamp_(0, BINS - 1)
    place += torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None] * BINS
    place += (x < 0) * (len(x) * BINS)
    counts = torch.zeros(2 * len(x) * BINS, dtype=torch.int32, device=x.device)
    with any_order():
        counts.index_add_(0, place.flatten(), torch.ones(1, dtype=torch.int32, device=x.device).expand(x.numel()))
        tails = counts.view(2, len(x), BINS).flip(2).cumsum(2).flip(2)
    return torch.nn.functional.pad(tails.double(), (0, 1))


def _entropy(tails: Tensor, borders: Tensor, n: int) -> Tensor:
    """Bits per value of levels that begin at these multiples of rms: borders (rows, steps, levels) -> (rows, steps)."""
    place = (_bits(borders.flatten(1).float()).double() / 2**DROPPED - FIRST).clamp(0, BINS)
    below = place.long().clamp(max=BINS - 1)
    near, far = (tails.gather(2, (below + offset).expand(2, -1, -1)) for offset in (0, 1))
    above = (near + (far - near) * (place - below)).view(2, *borders.shape)  # values of each sign beyond each border
    above[..., :-1] -= above[..., 1:].clone()  # values of each sign and level
    part = torch.cat([*above, n - above.sum((0, 3), keepdim=True)[0]], dim=2).mul_(1 / n)
    return -(part.clamp(min=1e-300).log2_().mul_(part)).sum(2)


def _bits(size: Tensor) -> Tensor:
    """Bits of a nonnegative float32 as an integer in the same order; 0 for NaN."""
    return size.nan_to_num_(nan=0.0).view(torch.int32)
