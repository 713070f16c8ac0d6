"""Evenly spaced levels around zero, for updates and entropy coders.

    k = floor(|x| / step + 1 - DEAD),  code 0 for k = 0, 2k - 1 for x > 0, 2k for x < 0
    x ~ (k - offset) step,             one offset for k = 1 and one for all larger k

At equal entropy, evenly spaced levels with a dead zone have a smaller error than the levels of K-means, which are
optimal for codes of equal length (Gish and Pierce 1968). The offsets move each level to the mean of its values.

Long rows, and few rows, are coded one by one with NumPy on a CPU, which is several times faster; many short rows, and
rows on a GPU, are coded together with torch. The results are the same.
"""

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import CHUNK, NOT_FINITE, FixedWidth, Side, any_order, chunks, ends
from fedshift.codecs.codec import Codec
from fedshift.codecs.entropy import Range

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Counts = NDArray[np.int64]
Codes = NDArray[np.uint8]

DEAD = 0.65  # half of the zero level's width, in steps
LOW, HIGH = -16, 16  # octaves around the root mean square that bins of magnitudes cover
DROPPED = 16  # low bits of a float32 that its bin ignores: an octave has 128 bins
FIRST, BINS = (LOW + 127) << (23 - DROPPED), (HIGH - LOW) << (23 - DROPPED)
ROWS = 128  # rows whose step is searched at once: each takes a few hundred kilobytes
LONG = 8192  # values from which a row is long
FEW = 6  # rows
COUNTED = 1 << 16  # values of a row from which upper halves of a float32 are counted first, and then their bins
HIGHER = 1 if sys.byteorder == "little" else 0  # place of the upper half of a float32
LEAST = 2.0**-110  # smallest step: a smaller one becomes zero
PARTS, PASSES = 12, 3  # the search divides an interval into PARTS, then one of these parts, PASSES times
ABOVE = 4  # the part of the first interval that begins at the root mean square: smaller steps are seldom needed


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
        largest = torch.stack([_largest(x) for x in tensors]).amax(0)
        return torch.maximum(self._steps(tensors, rate), largest / (self.top + DEAD))

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        if _one_by_one(x):
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
        largest = _largest(x)
        _check(float(largest.max()), self.bits)
        if self.common and scale is not None:
            step = scale
        else:
            rate = torch.full_like(largest, self.rate or 0.0) if scale is None else scale
            step = self._steps([x], rate)
        step = torch.maximum(step, largest / (self.top + DEAD))
        step = torch.where(step < LEAST, 0.0, step)
        mantissa, exponent = torch.frexp(step)
        return torch.ldexp((mantissa * 4096).ceil() / 4096, exponent).float()

    def _steps(self, tensors: Sequence[Tensor], rate: Tensor) -> Tensor:
        """One step for all tensors (K, n_i) of a client: float64 (K,); `rate` is used unless `self.rate` is None."""
        if _one_by_one(*tensors):
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
            tails = reduce(torch.add, (_tails(x[r], rms[r]) for x in tensors))
            found.append(steps_for(tails, total, rate[r], self.top))
        return rms * torch.cat(found)

    def _encode_row(self, row: Floats, scale: float | None, out: Codes) -> tuple[float, float, float]:
        """Write the codes of one row; step and offsets."""
        _check(largest := _row_largest(row), self.bits)
        if self.common and scale is not None:
            step = scale
        else:
            step = self._row_step([row], (self.rate or 0.0) if scale is None else scale)
        step = max(step, largest / (self.top + DEAD))
        if step < LEAST or not math.isfinite(step):  # not finite: another tensor, which is refused, is the reason
            step = 0.0
        mantissa, exponent = math.frexp(step)
        step = math.ldexp(math.ceil(mantissa * 4096) / 4096, exponent)
        inverse = float(np.float32(1) / np.float32(step)) if step else 0.0
        ones, size, further, short = _row_codes(row, inverse, self.top, out)
        first = round((1 - size / ones) * 4096) / 4096 if ones else 0.0
        return step, first, round(short / further * 4096) / 4096 if further else 0.0

    def _row_step(self, rows: Sequence[Floats], rate: float) -> float:
        """`_steps` for the rows of one client."""
        total = sum(len(row) for row in rows)
        rms = math.sqrt(sum(map(_row_squares, rows))) / math.sqrt(total)
        if self.rate is None:
            return rms * self.step
        counts = reduce(np.add, (_row_counts(row, np.float32(rms)) for row in rows))
        return rms * row_step_for(counts, total, rate, self.top)


def common_step(rate: float = 0.8) -> Codec:
    """Multiples of one step for all tensors, most codes zero: `rate` bits per value over all of them."""
    return Codec(Step(rate=rate, common=True), Range())


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


def row_step_for(counts: Counts, n: int, rate: float, top: int) -> float:
    """The same for one row, from the numbers of values in each bin, by sign: int64 (2 bins,)."""
    tails = np.zeros((2, BINS + 1))
    tails[:, :-1] = counts.reshape(2, BINS)[:, ::-1].cumsum(1)[:, ::-1]
    filled = int(np.count_nonzero(tails, axis=1).max())  # bins up to that of the largest value
    reach = 2.0 ** (LOW + 1 + (filled << DROPPED >> 23))  # the end of its octave
    levels, parts = np.arange(top) + DEAD, np.arange(PARTS + 1.0)

    def entropy(steps: Doubles) -> Doubles:
        """Levels beyond the largest value are empty, and left out."""
        return _row_entropy(tails, steps[:, None] * levels[: 1 + int(min(reach / steps[0], top - 1))], n)

    low, width, skipped = float(LOW + 8), float(HIGH - LOW - 8), ABOVE
    for _ in range(PASSES):
        width /= PARTS
        steps = np.exp2(low + width * parts)
        higher = ((bits := entropy(steps[skipped:])) > rate).nonzero()[0]
        if skipped and not len(higher):
            skipped = 0
            higher = ((bits := entropy(steps)) > rate).nonzero()[0]
        place = min(skipped + int(higher[-1]) + 1, PARTS) if len(higher) else 1
        low, skipped = low + width * (place - 1), 0
    more, less = float(bits[place - 1]), float(bits[place])
    return float(np.exp2(low + width * min(max((more - rate) / max(more - less, 1e-9), 0.0), 1.0)))


def _check(largest: float, bits: int) -> None:
    """Raise ValueError for a largest magnitude that cannot be encoded."""
    if not largest < torch.finfo(torch.float32).max / 2**bits:
        raise ValueError("contains a number beyond 2^120" if math.isfinite(largest) else NOT_FINITE)


def _one_by_one(*tensors: Tensor) -> bool:
    """True if rows, which are tensors (rows, n_i) side by side, are coded one by one with NumPy."""
    x = tensors[0]
    return x.device.type == "cpu" and (len(x) <= FEW or max(x.shape[1] for x in tensors) >= LONG)


def _largest(x: Tensor) -> Tensor:
    """Largest magnitude of each row, float64 (rows,); NaN or infinity if it contains one."""
    if _one_by_one(x):
        return torch.tensor([_row_largest(row) for row in x.numpy()], dtype=torch.float64)
    return torch.as_tensor(torch.linalg.vector_norm(x, torch.inf, dim=1)).double()


def _row_largest(row: Floats) -> float:
    return max(map(abs, ends(torch.from_numpy(row))))  # twelve times faster than along a dimension


def _row_squares(row: Floats) -> float:
    """|x|^2 of one row."""
    wide = (row[c].astype(np.float64) for c in _pieces(row))
    return math.fsum(float(x @ x) for x in wide)


def _pieces(row: Floats) -> list[slice]:
    """Pieces of a row that fit the cache."""
    return [slice(c, c + CHUNK) for c in range(0, len(row), CHUNK)]


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
    for c in _pieces(row):
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


def _row_counts(row: Floats, rms: np.float32) -> Counts:
    """Numbers of values of one row in each bin, by sign: the upper half of a float32 is sign and bin."""
    many = len(row) >= COUNTED
    counts = np.zeros(1 << 16 if many else 2 * BINS, np.int64)
    for c in _pieces(row):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            upper = np.divide(row[c], rms).view(np.uint16)[HIGHER::2]
        counts += np.bincount(upper if many else _places()[upper], minlength=len(counts))
    return np.bincount(_places(), weights=counts, minlength=2 * BINS).astype(np.int64) if many else counts


@cache
def _places() -> NDArray[np.int64]:
    """Bin of each upper half of a float32, after all bins of positive numbers for a negative one; 0 for NaN."""
    half = np.arange(1 << 16)
    size, negative = half & 0x7FFF, half >> 15
    places = np.clip(size - FIRST, 0, BINS - 1) + negative * BINS
    return np.where(size > 0x7F80, 0, places)


def _entropy(tails: Tensor, borders: Tensor, n: int) -> Tensor:
    """Bits per value of levels that begin at these multiples of rms: borders (rows, steps, levels) -> (rows, steps)."""
    place = (_bits(borders.flatten(1).float()).double() / 2**DROPPED - FIRST).clamp(0, BINS)
    below = place.long().clamp(max=BINS - 1)
    near, far = (tails.gather(2, (below + offset).expand(2, -1, -1)) for offset in (0, 1))
    above = (near + (far - near) * (place - below)).view(2, *borders.shape)  # values of each sign beyond each border
    above[..., :-1] -= above[..., 1:].clone()  # values of each sign and level
    part = torch.cat([*above, n - above.sum((0, 3), keepdim=True)[0]], dim=2).mul_(1 / n)
    return -(part.clamp(min=1e-300).log2_().mul_(part)).sum(2)


def _row_entropy(tails: Doubles, borders: Doubles, n: int) -> Doubles:
    """The same for one row: tails (2, bins + 1), borders (steps, levels) -> (steps,)."""
    place = np.minimum(borders.astype(np.float32).view(np.int32) / 2**DROPPED - FIRST, BINS)
    below = np.minimum(place.astype(np.intp), BINS - 1)
    near = tails.take(below, axis=1)
    above = near + (tails.take(below + 1, axis=1) - near) * (place - below)
    above[..., :-1] -= above[..., 1:]
    part = np.concatenate([*above, n - above.sum((0, 2))[:, None]], axis=1) * (1 / n)
    bits: Doubles = -(np.log2(np.maximum(part, 1e-300)) * part).sum(1)
    return bits


def _bits(size: Tensor) -> Tensor:
    """Bits of a nonnegative float32 as an integer in the same order; 0 for NaN."""
    return size.nan_to_num_(nan=0.0).view(torch.int32)
