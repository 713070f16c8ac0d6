"""Bins for float32 numbers that need no range.

The top 18 bits of a float32 (sign, exponent, nine bits of mantissa) are its key. Bins are the keys
in the order of the numbers: the negative ones backwards, then the positive ones. They cover every
number with a relative width of at most 2^-9, and none lies across a power of two.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE

Bins = NDArray[np.intp]
Floats = NDArray[np.float64]

DROPPED = 14  # low bits of a float32 that its key ignores
BINS = 1 << (32 - DROPPED)
HALF = BINS // 2  # bins of one sign
BLUR = 0.02  # squared error of the bins, over that of the codes, above which they are too coarse
MISPLACED = 0.008  # share of values that the table may give the neighbouring code


def keys(row: Tensor) -> Tensor:
    """The key of every value: float32 (n,) -> int32 (n,)."""
    if row.device.type == "cpu":  # numpy shifts without the sign in one pass
        return torch.from_numpy((row.numpy().view(np.uint32) >> np.uint32(DROPPED)).view(np.int32))
    return (row.view(torch.int32) >> DROPPED) & (BINS - 1)


def count(key: Tensor) -> tuple[Bins, Floats]:
    """The bins that hold something, ascending, and how many values each holds."""
    counts = torch.bincount(key, minlength=BINS).cpu().numpy()
    some = np.flatnonzero(counts != 0)
    if (((some >> (23 - DROPPED)) & 0xFF) == 0xFF).any():  # this exponent means infinity or NaN
        raise ValueError(NOT_FINITE)
    some = np.concatenate([some[some >= HALF][::-1], some[some < HALF]])
    return _in_order(some), counts[some].astype(np.float64)


def bin_of(values: NDArray[np.float32]) -> Bins:
    return _in_order((values.view(np.uint32) >> np.uint32(DROPPED)).astype(np.intp))


def _in_order(key: Bins) -> Bins:
    return np.where(key < HALF, HALF + key, BINS - 1 - key)


def edges(bins: Bins) -> tuple[Floats, Floats]:
    """Where each bin begins and ends."""
    key = np.where(bins < HALF, HALF - 1 - bins, bins - HALF).astype(np.uint32)  # of the magnitude
    near = (key << np.uint32(DROPPED)).view(np.float32).astype(np.float64)
    far = ((key + np.uint32(1)) << np.uint32(DROPPED)).view(np.float32).astype(np.float64)
    return np.where(bins < HALF, -far, near), np.where(bins < HALF, -near, far)


def middle(low: Floats, high: Floats) -> Floats:
    """The number that stands for a bin: its middle, or zero for the two bins that begin there."""
    return np.where((low == 0) | (high == 0), 0.0, (low + high) * 0.5)


def table(first: Bins) -> Tensor:
    """Key -> code, uint8 (BINS,), where code i + 1 begins at bin first[i]."""
    lengths = np.diff(first, prepend=0, append=BINS)
    codes = np.repeat(np.arange(len(lengths), dtype=np.uint8), lengths)
    return torch.from_numpy(np.concatenate([codes[HALF:], codes[:HALF][::-1]]))


def slots(x: Tensor) -> Tensor:
    """Where each value is counted, float32 (rows, n) -> int32 (rows, n): the slots of row r begin at r BINS.

    They are its bins, with the negative ones backwards.
    """
    first = torch.arange(len(x), dtype=torch.int32, device=x.device) * BINS + HALF
    return (x.view(torch.int32) >> DROPPED).add_(first[:, None])


def counts(slot: Tensor) -> Tensor:
    """How many values each bin holds, int32 (rows, BINS), in the order of the numbers."""
    zero = torch.zeros(len(slot) * BINS, dtype=torch.int32, device=slot.device)
    one = torch.ones(1, dtype=torch.int32, device=slot.device).expand(slot.numel())
    counted = zero.index_add_(0, slot.flatten(), one).view(-1, BINS)
    return torch.cat([counted[:, :HALF].flip(1), counted[:, HALF:]], dim=1)


def tables(first: Tensor) -> Tensor:
    """Slot -> code, uint8 (rows, BINS), where code i + 1 of row r begins at bin first[r, i]; first is int32."""
    bins = torch.arange(BINS, dtype=torch.int32, device=first.device)
    slot = torch.cat([bins[:HALF].flip(0), bins[HALF:]]).repeat(len(first), 1)
    return torch.searchsorted(first, slot, right=True, out_int32=True).to(torch.uint8)


def bins_of(values: Tensor) -> Tensor:
    """float32 -> int32, of the same shape."""
    key = values.view(torch.int32) >> DROPPED
    return torch.where(key < 0, ~key, key + HALF)


def spans(bins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Middle of each bin, and its least and greatest magnitude, in float64."""
    key = bins.int() - HALF
    size = torch.where(key < 0, ~key, key)
    near, far = ((size + one << DROPPED).view(torch.float32).double() for one in (0, 1))
    half = (near + far) * 0.5
    return torch.where(size == 0, 0.0, torch.where(key < 0, -half, half)), near, far
