"""Contracts of codecs: quantizers, coders and groups.

    tensor --groups--> rows of numbers --quantizer--> rows of codes + side --coder--> bytes

A quantizer turns each row into small integers and side data that a decoder needs (a range, a
codebook). A coder turns the codes of one tensor into bytes, without loss. Groups define the rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedshift.codecs.bitpack import BitPack
from fedshift.core import rng

Side = Tensor  # float32 (rows, width): data that a decoder needs in addition to the codes
Shape = Sequence[int]
NOT_FINITE = "contains NaN or infinity, which cannot be quantized"
LANES = 64  # counters per code on a GPU
CHUNK = 1 << 17  # values processed at a time on a CPU: a chunk and its temporaries stay in the L2 cache


class Quantizer(Protocol):
    """Rows of numbers <-> rows of codes, on any device."""

    @property
    def bits(self) -> int:
        """Bits per value; above 8, the codes of a value are its bits / 8 bytes."""

    @property
    def lossy(self) -> bool: ...

    @property
    def random(self) -> bool:
        """True if the quantizer needs a key."""

    def width(self, n: int) -> int:
        """Numbers of side data for a row of n values."""

    def encode(self, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Side]:
        """x float32 (rows, n), n > 0; key int64 (rows,), for random rounding -> codes uint8 (rows, n), side."""

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """codes uint8 (rows, n), side (rows, width) -> float32 (rows, n)."""


@dataclass(frozen=True)
class Lookup(ABC):
    """A quantizer of 1 to 8 bits that decodes with a table: code q of row r represents table[r, q]."""

    bits: int
    random = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"{type(self).__name__}(bits={self.bits}): bits must be between 1 and 8")

    @property
    def lossy(self) -> bool:
        return True

    @abstractmethod
    def width(self, n: int) -> int: ...

    @abstractmethod
    def levels(self, n: int) -> int:
        """Entries of the table of a row of n values."""

    @abstractmethod
    def table(self, side: Side) -> Tensor:
        """side (rows, width) -> float32 (rows, levels)."""

    @abstractmethod
    def encode(self, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Side]: ...

    def reach(self, side: Side, highest: int) -> float:
        """Largest magnitude that codes up to `highest` can represent; NaN if the side data contain NaN."""
        return max(map(abs, ends(side)), key=lambda end: (math.isnan(end), end))

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """out[r, i] = table[r, codes[r, i]], where tables are computed chunk by chunk.

        Subclasses must not compute a table with more entries than the row has values: it would cost more than the row.
        """
        out = torch.empty(codes.shape, device=codes.device)
        for r, c in chunks(codes):
            table = self.table(side[r])
            index = codes[r, c].int()
            if len(table) > 1:
                index += torch.arange(len(table), dtype=torch.int32, device=codes.device)[:, None] * table.shape[1]
            out[r, c] = table.flatten().index_select(0, index.flatten()).view(index.shape)
        return out


class Coder(Protocol):
    """The codes of one tensor <-> bytes, without loss."""

    def encode(self, codes: Tensor, bits: int) -> bytes:
        """codes uint8 (n,), each below 2^bits."""

    def decode(self, data: bytes | memoryview, n: int, bits: int) -> Tensor:
        """Return the n codes; raise ValueError if data cannot be the encoding of n codes."""

    def size(self, n: int, bits: int) -> int | None:
        """len(encode(...)) for any n codes, or None if it depends on the codes."""

    def most(self, n: int, bits: int) -> int:
        """Upper bound on len(encode(...)) for any n codes."""

    def estimate(self, counts: Tensor, bits: int) -> Tensor | None:
        """Expected len(encode(...)) of codes with counts[..., q] occurrences of code q; None if unknown.

        counts (..., 2^bits) of any integer type -> float64 (...) on the device of counts, without synchronization.
        """


class Groups(Protocol):
    """Values that share side data."""

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        """Consecutive matrices (rows, n) of the flattened tensor; [] for an empty tensor."""


@dataclass(frozen=True)
class PerTensor:
    """One row per tensor, as in the paper.

    >>> PerTensor().segments((64, 3, 5, 5))
    [(1, 4800)]
    """

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        return _matrices((1, math.prod(shape)))


@dataclass(frozen=True)
class PerChannel:
    """One row per index of the first axis: an output channel, a neuron.

    >>> PerChannel().segments((64, 3, 5, 5))
    [(64, 75)]
    """

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        return _matrices((shape[0], math.prod(shape[1:]))) if shape else _matrices((1, 1))


@dataclass(frozen=True)
class PerBlock:
    """One row per n consecutive values; the last row may be shorter.

    >>> PerBlock(4).segments((3, 3))
    [(2, 4), (1, 1)]
    """

    n: int

    def __post_init__(self) -> None:
        if not 1 <= self.n < 1 << 32:
            raise ValueError(f"PerBlock(n={self.n}): n must be between 1 and 2^32 - 1")

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        full, rest = divmod(math.prod(shape), self.n)
        return _matrices((full, self.n), (1, rest))


def _matrices(*segments: tuple[int, int]) -> list[tuple[int, int]]:
    return [(rows, n) for rows, n in segments if rows * n]


@dataclass(frozen=True)
class Codec:
    """Quantizer, coder and groups: `Codec(KMeans(4))` is the paper's 4-bit upload.

    Tensors with fewer than `min_axes` axes (biases, norms) and integer tensors are sent exactly,
    unless `min_axes` is lowered or `integers` is set.

    >>> from fedshift import Codec, KMeans
    >>> codec = Codec(KMeans(4))
    >>> codec.coder, codec.groups, codec.min_axes, codec.integers
    (BitPack(), PerTensor(), 2, False)
    """

    quantizer: Quantizer
    coder: Coder = BitPack()
    groups: Groups = PerTensor()
    min_axes: int = 2
    integers: bool = False

    def covers(self, x: Tensor) -> bool:
        """True if x is quantized rather than sent exactly."""
        return x.ndim >= self.min_axes and (self.integers or x.is_floating_point())

    def encode(self, x: Tensor, key: Tensor | None = None) -> list[tuple[Tensor, Side]]:
        """K stacked tensors (K, *shape) -> codes (K * rows, n) and side data of each segment; key int64 (K,)."""
        stack = x.shape[0]
        flat = x.detach().reshape(stack, -1).float()
        parts, start, first = [], 0, 0
        for rows, n in self.groups.segments(x.shape[1:]):
            matrix = flat[:, start : start + rows * n].reshape(stack * rows, n)
            row = torch.arange(first, first + rows, device=x.device)
            keys = None if key is None else rng.fold(key.to(x.device)[:, None], row).flatten()
            parts.append(self.quantizer.encode(matrix, keys))
            start, first = start + rows * n, first + rows
        return parts

    def decode(self, parts: list[tuple[Tensor, Side]], stack: int, shape: Shape) -> Tensor:
        """Codes and side data of each segment -> decoded values, float32 (K, *shape)."""
        flat = [self.quantizer.decode(codes, side).reshape(stack, -1) for codes, side in parts]
        return (torch.cat(flat, dim=1) if flat else torch.zeros(stack, 0)).reshape(stack, *shape)


def counts(codes: Sequence[Tensor], stack: int, bits: int) -> Tensor:
    """Occurrences of each code in each of K stacked tensors, from the codes (K * rows, n) of every segment.

    Returns int64 (K, 2^bits) on the device of the codes, without synchronization.

    >>> counts([torch.tensor([[0, 3, 3], [1, 1, 1]], dtype=torch.uint8)], stack=2, bits=2)
    tensor([[1, 0, 0, 2],
            [0, 3, 0, 0]])
    """
    levels = 1 << bits
    total = torch.zeros(stack, levels, dtype=torch.int64, device=codes[0].device)
    for part in codes:
        rows = part.reshape(stack, -1)
        if rows.device.type == "cpu":
            total += torch.stack([torch.bincount(row, minlength=levels) for row in rows])
        else:  # torch.bincount would synchronize with the device
            total += counts_by_lanes(rows, levels)
    return total


def counts_by_lanes(rows: Tensor, levels: int) -> Tensor:
    """Occurrences of each code in each row, uint8 (K, n) -> int64 (K, levels), without synchronization.

    Each lane has separate counters, so that neighbouring threads of a GPU do not wait for one another.
    """
    stack, n = rows.shape
    lane = torch.arange(n, dtype=torch.int32, device=rows.device) % LANES
    first = torch.arange(stack, dtype=torch.int32, device=rows.device)[:, None] * (levels * LANES)
    slot = rows.int().mul_(LANES).add_(lane).add_(first)
    ones = torch.ones(1, dtype=torch.int32, device=rows.device).expand(slot.numel())
    counters = torch.zeros(stack * levels * LANES, dtype=torch.int32, device=rows.device)
    return counters.index_add_(0, slot.flatten(), ones).view(stack, levels, LANES).sum(2)


def chunks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of x (rows, n) with about CHUNK values each; on a GPU, which needs no cache blocking, one slice."""
    rows, n = x.shape
    if x.device.type != "cpu":
        yield slice(0, rows), slice(0, n)
        return
    tall, wide = max(1, CHUNK // max(n, 1)), min(n, CHUNK)
    for r in range(0, rows, tall):
        for c in range(0, n, wide):
            yield slice(r, min(r + tall, rows)), slice(c, min(c + wide, n))


@contextmanager
def any_order() -> Iterator[None]:
    """Allow operations that torch does not list as deterministic: sums of integers, and scans along rows."""
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)


def finite(x: Tensor) -> bool:
    """True if x contains neither NaN nor infinity: minimum and maximum, found in one pass, show both."""
    return not x.numel() or all(math.isfinite(end) for end in ends(x))


def ends(x: Tensor) -> tuple[float, float]:
    """Minimum and maximum, both NaN if x contains NaN."""
    low, high = torch.aminmax(x)
    return float(low), float(high)
