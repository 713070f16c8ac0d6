"""Places of the tensors of one model in a frame: which bytes are side data and codes of which tensor.

    seeds and side data of each tensor in turn | buffers of codes

Each tensor has a buffer of codes of its own, except that small tensors with the same codec and a coder whose size
depends on the codes share one, which needs fewer tables and states of the coder.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from fedshift.codecs.base import MOST_LEVELS, Coder, reason, varint
from fedshift.codecs.codec import Codec
from fedshift.codecs.exact import EXACT
from fedshift.core.types import Params
from fedshift.wire.frame import Cursor, TensorLayout, WireError
from fedshift.wire.registry import codec_bytes, dtype_number, read_codec

SMALL = 4096  # codes: tensors with fewer share a buffer
SEED = 4  # bytes
LONGER = 64  # values that a transform may make beyond twice those it gets


class Place(NamedTuple):
    """One tensor of a frame."""

    name: str
    codec: Codec
    dtype: torch.dtype
    shape: tuple[int, ...]
    total: int  # number of codes
    levels: int  # codes are below this
    seeds: int  # bytes
    side: int  # bytes
    size: int | None  # bytes of the codes in a buffer of their own; None if it depends on the codes


class Buffer(NamedTuple):
    """Codes of one tensor, or of several small ones."""

    places: tuple[int, ...]
    codec: Codec
    total: int  # number of codes
    levels: int
    size: int | None  # bytes; None if it depends on the codes

    @property
    def most(self) -> int:
        """Upper bound on the number of bytes; ValueError if a user's coder returns none."""
        coder = self.codec.coder
        if coder.by_user:
            check_sizes(coder, self.total, self.levels)
        return coder.most(self.total, self.levels)


class FramePlan:
    """Places of the tensors of a model whose codecs are known."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.lossy = any(place.codec.quantizer.lossy for place in self.places)
        self.side = sum(place.seeds + place.side for place in self.places)

    @cached_property
    def buffers(self) -> list[Buffer]:
        """Buffers in the order of their first tensors."""
        shared: dict[bytes, list[int]] = {}  # by what a decoder knows of the codec
        for i, place in enumerate(self.places):
            if place.size is None and place.total < SMALL:
                shared.setdefault(codec_bytes(place.codec), []).append(i)
        found = []
        for i, place in enumerate(self.places):
            together = shared[codec_bytes(place.codec)] if place.size is None and place.total < SMALL else [i]
            if together[0] != i or not place.total:
                continue
            count, levels = sum(self.places[j].total for j in together), max(self.places[j].levels for j in together)
            found.append(Buffer(tuple(together), place.codec, count, levels, place.size))
        return found

    @cached_property
    def buffer_of(self) -> list[int | None]:
        """Number of the buffer of each tensor; None for an empty one."""
        found: list[int | None] = [None] * len(self.places)
        for at, buffer in enumerate(self.buffers):
            for i in buffer.places:
                found[i] = at
        return found

    @cached_property
    def coding(self) -> bytes:
        """Codecs of the tensors: distinct ones, then runs of tensors with the same codec; 0 is exact and packed."""
        distinct: dict[bytes, int] = {codec_bytes(EXACT): 0}
        runs: list[list[int]] = []
        for place in self.places:
            index = distinct.setdefault(codec_bytes(place.codec), len(distinct))
            if runs and runs[-1][1] == index:
                runs[-1][0] += 1
            else:
                runs.append([1, index])
        codecs = [*distinct][1:]
        return b"".join([varint(len(codecs)), *codecs, *(varint(n) + varint(index) for n, index in runs)])

    def lengths(self, sizes: Sequence[int]) -> bytes:
        """Bytes that state the sizes of buffers whose size depends on their codes."""
        return b"".join(varint(n) for n, buffer in zip(sizes, self.buffers, strict=True) if buffer.size is None)


def place(name: str, codec: Codec, dtype: torch.dtype, shape: Sequence[int]) -> Place:
    """Place of a tensor with this codec."""
    n = math.prod(shape)
    if codec.quantizer.plain:
        count = n * codec.quantizer.stored(dtype).itemsize
        return Place(name, codec, dtype, tuple(shape), count, 256, 0, 0, _size(codec, count, 256))
    segments = _segments(codec, shape)
    count = sum(rows * row for rows, row in segments)
    expected = n if codec.transform is None or not n else codec.transform.length(n)
    if not n <= expected <= 2 * n + LONGER:
        raise ValueError(f"{codec.transform} turns {n} values into {expected}; {n} to {2 * n + LONGER} are allowed")
    if count != expected:
        raise ValueError(f"{codec.groups} divides {expected} values into segments of {count}")
    levels = max((codec.quantizer.levels(row) for _, row in segments), default=1)
    if not 1 <= levels <= MOST_LEVELS:
        raise ValueError(f"{codec.quantizer} has {levels} levels; 1 to {MOST_LEVELS} are allowed")
    side = 4 * sum(rows * codec.quantizer.width(row) for rows, row in segments)
    seeds = SEED * (codec.transform is not None and n > 0)
    return Place(name, codec, dtype, tuple(shape), count, levels, seeds, side, _size(codec, count, levels))


def _segments(codec: Codec, shape: Sequence[int]) -> list[tuple[int, int]]:
    """Matrices of a tensor; ValueError if a user's groups or transform do not return such a list."""
    try:
        segments = codec.segments(shape)
        if any(len(segment) != 2 or not all(type(n) is int and n > 0 for n in segment) for segment in segments):
            raise ValueError(f"its segments {segments!r} are not pairs (rows, n)")
    except Exception as problem:
        if not codec.by_user:
            raise
        raise ValueError(f"{codec.groups}: {reason(problem)}") from problem
    return segments


def _size(codec: Codec, count: int, levels: int) -> int | None:
    if not count:
        return 0
    if codec.coder.by_user:
        check_sizes(codec.coder, count, levels)
    return codec.coder.size(count, levels)


def check_sizes(coder: Coder, count: int, levels: int) -> None:
    """Raise ValueError if `size` and `most` of a user's coder are not numbers of bytes, or contradict each other."""
    try:
        coder.check_sizes(count, levels)
    except Exception as problem:
        raise ValueError(f"{coder}: {reason(problem)}") from problem


def plan(codecs: Mapping[str, Codec], like: Params) -> FramePlan:
    """Plan of a frame of tensors like these with these codecs."""
    places = []
    for name, x in like.items():
        try:
            places.append(place(name, codecs[name], x.dtype, x.shape))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return FramePlan(places)


def layout(like: Params) -> list[TensorLayout]:
    """Names, dtypes and shapes of tensors."""
    found = []
    for name, x in like.items():
        try:
            found.append(TensorLayout(name, dtype_number(x.dtype), tuple(x.shape)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def read_codecs(coding: bytes, tensors: int) -> list[Codec]:
    """Codec of each tensor."""
    reader = Cursor(memoryview(coding), 0)
    count = reader.varint("codecs")
    if count > tensors:
        raise WireError(f"the frame has {count} codecs for {tensors} tensors")
    codecs = [EXACT] + [read_codec(reader) for _ in range(count)]
    if len(set(map(codec_bytes, codecs))) < len(codecs):
        raise WireError("the frame lists a codec twice")
    found: list[Codec] = []
    last, seen = -1, 0
    while len(found) < tensors:
        run, index = reader.varint("codecs"), reader.varint("codecs")
        if not 0 < run <= tensors - len(found) or index == last or index > min(seen + 1, count):
            raise WireError(f"the codecs of {run} tensors after the first {len(found)} of {tensors} are invalid")
        found += [codecs[index]] * run
        last, seen = index, max(seen, index)
    if seen < count or len(reader.rest):
        raise WireError("the frame has codecs that no tensor uses, or further bytes after them")
    return found
