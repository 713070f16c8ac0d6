"""Codecs: a quantizer, a coder, groups and a transform together."""

import math
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fedshift.codecs.base import (
    MOST_LEVELS,
    Coder,
    Groups,
    Numbered,
    Quantizer,
    Shape,
    Side,
    Transform,
    any_order,
    dequantized,
    quantized,
    reason,
    require,
    require_integer,
)
from fedshift.codecs.bitpack import BitPack, bits_for
from fedshift.core import rng

LANES = 64  # counters per code on a GPU
LONG = 1 << 16  # values of a row that is long enough for all codes
SEEDS = 1 << 32  # seeds of transforms are below this


@dataclass(frozen=True)
class PerTensor(Groups, number=0):
    """One row per tensor, as in the paper.

    >>> PerTensor().segments((64, 3, 5, 5))
    [(1, 4800)]
    """

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        return _matrices((1, math.prod(shape)))


@dataclass(frozen=True)
class PerChannel(Groups, number=1):
    """One row per index of the first axis: an output channel, a neuron.

    >>> PerChannel().segments((64, 3, 5, 5))
    [(64, 75)]
    """

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        return _matrices((shape[0], math.prod(shape[1:]))) if shape else _matrices((1, 1))


@dataclass(frozen=True)
class PerBlock(Groups, number=2):
    """One row per n consecutive values; the last row may be shorter.

    >>> PerBlock(4).segments((3, 3))
    [(2, 4), (1, 1)]
    """

    n: int

    def __post_init__(self) -> None:
        require_integer(self, n=self.n)
        if not 1 <= self.n < 1 << 32:
            raise ValueError(f"PerBlock(n={self.n}): n must be between 1 and 2^32 - 1")

    def parameters(self) -> bytes:
        return struct.pack("<I", self.n)

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        if len(parameters) != 4:
            raise ValueError(f"PerBlock has {len(parameters)} bytes of parameters instead of 4")
        return cls(*struct.unpack("<I", parameters))

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        full, rest = divmod(math.prod(shape), self.n)
        return _matrices((full, self.n), (1, rest))


def _matrices(*segments: tuple[int, int]) -> list[tuple[int, int]]:
    return [(rows, n) for rows, n in segments if rows * n]


class Coded(NamedTuple):
    """K stacked tensors after the quantizer."""

    parts: list[tuple[Tensor, Side]]  # codes (K * rows, n) and side data of each segment
    seeds: Tensor | None = None  # of the transform, int64 (K,)


@dataclass(frozen=True)
class Codec:
    """Quantizer, coder, groups and transform: `Codec(KMeans(4))` is the paper's 4-bit upload.

    Tensors with fewer than `min_axes` axes (biases, norms) and integer tensors are sent exactly,
    unless `min_axes` is lowered or `integers` is set.

    >>> from fedshift import Codec, KMeans
    >>> codec = Codec(KMeans(4))
    >>> codec.coder, codec.groups, codec.transform, codec.min_axes, codec.integers
    (BitPack(), PerTensor(), None, 2, False)
    """

    quantizer: Quantizer
    coder: Coder = BitPack()
    groups: Groups = PerTensor()
    transform: Transform | None = None
    min_axes: int = 2
    integers: bool = False

    def __post_init__(self) -> None:
        kinds: dict[str, type[Numbered]] = {"quantizer": Quantizer, "coder": Coder, "groups": Groups}
        for name, kind in (kinds if self.transform is None else kinds | {"transform": Transform}).items():
            if not isinstance(part := getattr(self, name), kind):
                raise ValueError(f"Codec({name}={part!r}): {name} must be a {kind.__name__} of fedshift.codecs")
            _check_part(part)
        if type(self.min_axes) is not int:
            raise ValueError(f"Codec(min_axes={self.min_axes!r}): min_axes must be an integer")
        if self.transform is not None and (isinstance(self.groups, PerChannel) or self.quantizer.plain):
            raise ValueError(
                f"Codec({self.quantizer}, {self.groups}, {self.transform}): a transform mixes the values of a tensor, "
                "so it needs a quantizer of 1 to 8 bits, per tensor or per block"
            )

    @cached_property
    def by_user(self) -> bool:
        """True if a part is not one of fedshift."""
        return any(part.by_user for part in (self.quantizer, self.coder, self.groups, self.transform) if part)

    @property
    def random(self) -> bool:
        """True if `encode` needs a key: for random rounding, or for the seed of the transform."""
        return self.quantizer.random or self.transform is not None

    @property
    def bits(self) -> int:
        """Bits per value of float32 before the coder: 1 to 8, 16 or 32."""
        if self.quantizer.plain:
            return 8 * self.quantizer.stored(torch.float32).itemsize
        return bits_for(self.quantizer.levels(LONG))

    @property
    def stack(self) -> Hashable:
        """Key of codecs that encode stacked tensors alike, given the results of their own `prepare`."""
        return self.quantizer.stack, self.coder, self.groups, self.transform, self.min_axes, self.integers

    def covers(self, x: Tensor) -> bool:
        """True if x is quantized rather than sent exactly."""
        return x.ndim >= self.min_axes and (self.integers or x.is_floating_point())

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        """Matrices (rows, n) of a tensor of this shape, after the transform."""
        if self.transform is None or not math.prod(shape):
            return self.groups.segments(shape)
        return self.groups.segments((self.transform.length(math.prod(shape)),))

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> Coded:
        """Quantize K stacked tensors (K, *shape); key int64 (K,); scale: result of the quantizer's `prepare`, (K,)."""
        stack, seeds = x.shape[0], None
        flat = x.detach().reshape(stack, -1).float()
        if self.transform is not None:
            if key is None:
                raise ValueError(f"{self.transform} is random and needs a key, for example rng.key(seed, 'upload')")
            seeds = rng.fold(key.to(x.device), SEEDS) % SEEDS
            wanted = stack, self.transform.length(flat.shape[1])
            # a user's part gets a copy, which it may change
            flat = self.transform.encode(flat.clone() if self.transform.by_user else flat, seeds)
            require(flat, torch.float32, wanted, f"{self.transform} made values")
        parts, start, first = [], 0, 0
        for rows, n in self.segments(x.shape[1:]):
            matrix = flat[:, start : start + rows * n].reshape(stack * rows, n)
            row = torch.arange(first, first + rows, device=x.device)
            keys = None if key is None else rng.fold(key.to(x.device)[:, None], row).flatten()
            scales = None if scale is None else scale[:, None].expand(stack, rows).flatten()
            parts.append(quantized(self.quantizer, matrix, keys, scales))
            start, first = start + rows * n, first + rows
        return Coded(parts, seeds)

    def decode(self, coded: Coded, stack: int, shape: Shape) -> Tensor:
        """Decoded values of K stacked tensors, float32 (K, *shape)."""
        flat = [dequantized(self.quantizer, codes, side).reshape(stack, -1) for codes, side in coded.parts]
        values = torch.cat(flat, dim=1) if flat else torch.zeros(stack, 0)
        if self.transform is not None and coded.seeds is not None and flat:
            values = self.transform.decode(values, coded.seeds, math.prod(shape))
            require(values, torch.float32, (stack, math.prod(shape)), f"{self.transform} decoded values")
        return values.reshape(stack, *shape)

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        """Result of the quantizer's `prepare` for the tensors (K, ...) that this codec encodes."""
        matrices = [x.detach().reshape(len(x), -1).float() for x in tensors]
        found = self.quantizer.prepare([x.clone() for x in matrices] if self.quantizer.by_user else matrices)
        if self.quantizer.by_user:
            require(found, torch.float64, (len(tensors[0]),), f"{self.quantizer} prepared")
        return found


def _check_part(part: Numbered) -> None:
    """Raise ValueError if a user's part does not describe itself as the contracts require."""
    if not part.by_user:
        return
    for inner in part.parts[1:]:
        _check_part(inner)
    try:
        hash(part)
    except TypeError as problem:
        raise ValueError(f"{part}: {problem}; make its class a dataclass with frozen=True") from None
    try:
        parameters = part.parameters()
        sizes = [(part.levels(n), part.width(n)) for n in (1, LONG)] if isinstance(part, Quantizer) else []
        if isinstance(part, Coder):
            part.check_sizes(1, 1)
            part.check_sizes(LONG, MOST_LEVELS)
    except Exception as problem:
        raise ValueError(f"{part}: {reason(problem)}") from problem
    if not isinstance(parameters, bytes):
        raise ValueError(f"{part} has parameters {parameters!r}, which are not bytes")
    for levels, width in sizes:
        if not isinstance(levels, int) or not 1 <= levels <= MOST_LEVELS:
            raise ValueError(f"{part} has {levels!r} levels; 1 to {MOST_LEVELS} are allowed")
        if not isinstance(width, int) or width < 0:
            raise ValueError(f"{part} has {width!r} side data per row; a number from 0 on is needed")


def counts(codes: Sequence[Tensor], stack: int, levels: int) -> Tensor:
    """Occurrences of each code in each of K stacked tensors, from the codes (K * rows, n) of every segment.

    Returns int64 (K, levels) on the device of the codes, without synchronization.

    >>> counts([torch.tensor([[0, 3, 3], [1, 1, 1]], dtype=torch.uint8)], stack=2, levels=4)
    tensor([[1, 0, 0, 2],
            [0, 3, 0, 0]])
    """
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
    first = torch.arange(stack, dtype=torch.int32, device=rows.device).view(-1, 1, 1) * (levels * LANES)
    lane = first + torch.arange(LANES, dtype=torch.int32, device=rows.device)  # (K, 1, LANES)
    unit = torch.ones(1, dtype=torch.int32, device=rows.device)
    counters = torch.zeros(stack * levels * LANES, dtype=torch.int32, device=rows.device)
    whole = n - n % LANES
    with any_order():
        for part in (rows[:, :whole].view(stack, -1, LANES), rows[:, None, whole:]):
            slot = torch.add(lane[..., : part.shape[2]], part, alpha=LANES)  # counter of each code, in one pass
            counters.index_add_(0, slot.flatten(), unit.expand(slot.numel()))
    return counters.view(stack, levels, LANES).sum(2)
