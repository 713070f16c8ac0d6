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
