"""Bins for float32 numbers, without a given range.

The top 18 bits of a float32 (sign, exponent, nine bits of mantissa) are its key. Bins are the keys in
the order of the numbers: the negative ones in reverse, then the positive ones. They cover every number
with a relative width of at most 2^-9, and no bin contains numbers on both sides of a power of two.
"""

from functools import cache

import numpy as np
import torch

from fedshift.codecs.kmeans.arrays import Array, arange, cast, constant, device, module, places, runs, sort, spread

DROPPED = 14  # low bits of a float32 that its key ignores
BINS = 1 << (32 - DROPPED)
HALF = BINS // 2  # bins of one sign
BLUR = 0.02  # squared error of the bins, over that of the codes, above which they are too coarse
MISPLACED = 0.008  # share of values that the table may give the neighbouring code
MOST = 1 << 15  # bins counted per row on a GPU; millions of weights of one scale fill half of them
DENSE = 1 << 17  # number of values from which a counter per bin is faster than sorting the keys


def keys(x: Array) -> Array:
    """Key of every value: float32 -> int32."""
    if isinstance(x, np.ndarray):
        return (x.view(np.uint32) >> np.uint32(DROPPED)).view(np.int32)
    return (x.view(torch.int32) >> DROPPED) & (BINS - 1)


def count(key: Array) -> tuple[Array, Array, Array]:
    """Nonempty bins, ascending, and their numbers of values: keys (rows, n) -> (rows, m), (rows, m).

    The last bin of a row is repeated, with zero values, up to the width m. The third result is the number of bins
    of each row (rows, 1); if it is m or more, some bins are missing. A numpy array must have one row.
    """
    rows, n = key.shape
    if isinstance(key, np.ndarray):
        return runs(sort(_in_order(key))) if n < DENSE else _count_row(key[0])
    slot = (key + torch.arange(rows, dtype=torch.int32, device=key.device)[:, None] * BINS).flatten()
    ones = torch.ones(1, dtype=torch.int32, device=key.device).expand(len(slot))
    counts = torch.zeros(rows * BINS, dtype=torch.int32, device=key.device).index_add_(0, slot, ones).view(rows, BINS)
    counts = torch.cat([counts[:, HALF:].flip(1), counts[:, :HALF]], dim=1)
    bins, number = places(counts != 0, min(n, MOST), BINS - 1)
    column = arange(bins, bins.shape[1])
    bins = bins.clip(max=bins.gather(1, number.clip(max=len(column)) - 1))
    return bins.int(), torch.where(column < number, counts.gather(1, bins), 0).long(), number


def _count_row(key: Array) -> tuple[Array, Array, Array]:
    counts = torch.bincount(torch.from_numpy(key), minlength=BINS).numpy()
    nonempty = np.flatnonzero(counts != 0)
    negative = nonempty[nonempty.searchsorted(HALF) :]
    nonempty = np.concatenate([negative[::-1], nonempty[: nonempty.size - negative.size]])
    nonempty = np.append(nonempty, nonempty[-1])[None]
    weight = counts[nonempty]
    weight[:, -1] = 0
    return _in_order(nonempty).astype(np.int32), weight, np.array([[weight.size - 1]])


def _in_order(key: Array) -> Array:
    """Keys -> bins: inverts the sign bit and, for negative numbers, all other bits."""
    return key ^ (HALF + (key >> (31 - DROPPED)) * (HALF - 1))


def bins_of(values: Array) -> Array:
    """float32 -> int32 of the same shape."""
    return _in_order(keys(values))


def spans(bins: Array) -> tuple[Array, Array, Array]:
    """Middle of each bin, zero for the two bins next to zero, and its least and greatest magnitude, in float64."""
    xp, signed = module(bins), bins - HALF
    sign = signed >> 31
    size = signed ^ sign
    bits = size << DROPPED
    inner = xp.where(size == 0, 0, bits + (sign << 31) + (1 << (DROPPED - 1)))
    middle, near, far = (cast(b.view(xp.float32), "float64") for b in (inner, bits, bits + (1 << DROPPED)))
    return middle, near, far


def table(begins: Array) -> Array:
    """Key -> code, uint8 (rows, BINS), where code i + 1 of row r begins at bin begins[r, i]."""
    xp, (rows, k) = module(begins), (begins.shape[0], begins.shape[1] + 1)
    low = begins.clip(max=HALF)
    cuts = xp.concatenate([begins - low, xp.full_like(begins[:, :1], HALF), BINS - xp.flip(low, (1,))], 1)
    return spread(_codes(rows, k, device(begins)), cuts, BINS)


@cache
def _codes(rows: int, k: int, where: torch.device | None) -> Array:
    """Codes of the positive keys, ascending, then those of the negative keys, descending."""
    code = np.arange(k, dtype=np.uint8)
    return constant(np.tile(np.concatenate([code, code[::-1]]), (rows, 1)), where)
