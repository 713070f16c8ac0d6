"""Histograms of magnitudes, and the search for the step at which the codes of a row have a given entropy.

Values are read once, to count their magnitudes in bins of 1/128 octave; the entropy for any step is computed from these
counts. Rows on a GPU, and many short rows, are searched together with torch, others one by one with NumPy, which is
several times faster on a CPU. The results are the same.
"""

import math
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import CHUNK, NOT_FINITE, any_order, ends

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Counts = NDArray[np.int64]

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


def one_by_one(*tensors: Tensor) -> bool:
    """True if rows, which are tensors (rows, n_i) side by side, are coded one by one with NumPy."""
    x = tensors[0]
    return x.device.type == "cpu" and (len(x) <= FEW or max(x.shape[1] for x in tensors) >= LONG)


def largest(x: Tensor) -> Tensor:
    """Largest magnitude of each row, float64 (rows,); NaN or infinity if it contains one."""
    if one_by_one(x):
        return torch.tensor([row_largest(row) for row in x.numpy()], dtype=torch.float64)
    return torch.as_tensor(torch.linalg.vector_norm(x, torch.inf, dim=1)).double()


def row_largest(row: Floats) -> float:
    return max(map(abs, ends(torch.from_numpy(row))))  # twelve times faster than along a dimension


def check_largest(found: float, bits: int) -> None:
    """Raise ValueError for a largest magnitude that cannot be encoded."""
    if not found < torch.finfo(torch.float32).max / 2**bits:
        raise ValueError(f"contains a number beyond 2^{128 - bits}" if math.isfinite(found) else NOT_FINITE)


def row_squares(row: Floats) -> float:
    """|x|^2 of one row; without a product of vectors, for which NumPy's BLAS would use several threads."""
    return math.fsum(float(np.square(row[c], dtype=np.float64).sum()) for c in pieces(row))


def pieces(row: Floats) -> list[slice]:
    """Pieces of a row that fit the cache."""
    return [slice(c, c + CHUNK) for c in range(0, len(row), CHUNK)]


def rounded(step: Tensor) -> Tensor:
    """Steps, rounded up so that they do not depend on the order of summation: float64 -> float32."""
    step = torch.where(step < LEAST, 0.0, step)
    mantissa, exponent = torch.frexp(step)
    return torch.ldexp((mantissa * 4096).ceil() / 4096, exponent).float()


def row_rounded(step: float) -> float:
    """The same for one row."""
    if step < LEAST or not math.isfinite(step):  # not finite: another tensor, which is refused, is the reason
        step = 0.0
    mantissa, exponent = math.frexp(step)
    return math.ldexp(math.ceil(mantissa * 4096) / 4096, exponent)


def searched(entropy: Callable[[Tensor], Tensor], rate: Tensor) -> Tensor:
    """Step divided by rms at which the codes have an entropy of `rate` bits, (rows,): float64 (rows,).

    entropy: bits per value for steps (rows, steps).
    """
    parts = torch.arange(PARTS + 1, device=rate.device, dtype=torch.float64)
    low, width = torch.full_like(rate, LOW + 8), float(HIGH - LOW - 8)  # octaves
    for _ in range(PASSES):
        width /= PARTS
        bits = entropy((low[:, None] + width * parts).exp2())
        last = torch.where(bits > rate[:, None], parts, 0.0).amax(1, keepdim=True)  # the largest with a higher rate
        place = (last.long() + 1).clamp(1, PARTS)
        low = low + width * (place[:, 0] - 1)
    more, less = bits.gather(1, place - 1)[:, 0], bits.gather(1, place)[:, 0]
    return (low + width * ((more - rate) / (more - less).clamp(min=1e-9)).clamp(0, 1)).exp2()


def row_searched(entropy: Callable[[Doubles], Doubles], rate: float) -> float:
    """The same for one row: `entropy` gets steps (steps,)."""
    parts = np.arange(PARTS + 1.0)
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


def tails(x: Tensor, rms: Tensor) -> Tensor:
    """Numbers of values, by sign, with at least the magnitude of each bin: float64 (2, rows, bins + 1)."""
    place = float_bits(x.abs() / rms[:, None].float()).bitwise_right_shift_(DROPPED).sub_(FIRST).clamp_(0, BINS - 1)
    place += torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None] * BINS
    place += (x < 0) * (len(x) * BINS)
    counts = torch.zeros(2 * len(x) * BINS, dtype=torch.int32, device=x.device)
    with any_order():
        counts.index_add_(0, place.flatten(), torch.ones(1, dtype=torch.int32, device=x.device).expand(x.numel()))
        tails = counts.view(2, len(x), BINS).flip(2).cumsum(2).flip(2)
    return torch.nn.functional.pad(tails.double(), (0, 1))


def row_counts(row: Floats, rms: np.float32) -> Counts:
    """Numbers of values of one row in each bin, by sign: the upper half of a float32 is sign and bin."""
    many = len(row) >= COUNTED
    counts = np.zeros(1 << 16 if many else 2 * BINS, np.int64)
    for c in pieces(row):
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            upper = np.divide(row[c], rms).view(np.uint16)[HIGHER::2]
        counts += np.bincount(upper if many else places()[upper], minlength=len(counts))
    return np.bincount(places(), weights=counts, minlength=2 * BINS).astype(np.int64) if many else counts


def row_tails(counts: Counts) -> Doubles:
    """`tails` of one row from `row_counts`: float64 (2, bins + 1)."""
    found = np.zeros((2, BINS + 1))
    found[:, :-1] = counts.reshape(2, BINS)[:, ::-1].cumsum(1)[:, ::-1]
    return found


def row_reach(tails: Doubles) -> float:
    """Upper bound on the largest magnitude divided by rms: the end of the octave of the last bin that is not empty."""
    filled = int(np.count_nonzero(tails, axis=1).max())
    return float(2.0 ** (LOW + 1 + (filled << DROPPED >> 23)))


def bits_per_value(counts: Tensor, n: int) -> Tensor:
    """Entropy of n codes with these numbers of values of each sign and level, all others being zero.

    counts (2, rows, steps, levels) -> (rows, steps)
    """
    part = torch.cat([*counts, n - counts.sum((0, 3), keepdim=True)[0]], dim=2).mul_(1 / n)
    return -(part.clamp(min=1e-300).log2_().mul_(part)).sum(2)


def row_bits_per_value(counts: Doubles, n: int) -> Doubles:
    """The same for one row: counts (2, steps, levels) -> (steps,)."""
    part = np.concatenate([*counts, n - counts.sum((0, 2))[:, None]], axis=1) * (1 / n)
    bits: Doubles = -(np.log2(np.maximum(part, 1e-300)) * part).sum(1)
    return bits


def place_of(borders: Tensor) -> tuple[Tensor, Tensor]:
    """Bin that each multiple of rms is in, and its place in units of bins: int64 and float64, as `borders`."""
    place = (float_bits(borders.float()).double() / 2**DROPPED - FIRST).clamp(0, BINS)
    return place.long().clamp(max=BINS - 1), place


def row_place_of(borders: Doubles) -> tuple[NDArray[np.intp], Doubles]:
    """The same for one row."""
    place = np.minimum(borders.astype(np.float32).view(np.int32) / 2**DROPPED - FIRST, BINS)
    return np.minimum(place.astype(np.intp), BINS - 1), place


@cache
def places() -> NDArray[np.int64]:
    """Bin of each upper half of a float32, after all bins of positive numbers for a negative one; 0 for NaN."""
    half = np.arange(1 << 16)
    size, negative = half & 0x7FFF, half >> 15
    places = np.clip(size - FIRST, 0, BINS - 1) + negative * BINS
    return np.where(size > 0x7F80, 0, places)


def float_bits(size: Tensor) -> Tensor:
    """Bits of a nonnegative float32 as an integer in the same order; 0 for NaN."""
    return size.nan_to_num_(nan=0.0).view(torch.int32)
