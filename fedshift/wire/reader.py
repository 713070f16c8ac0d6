"""Reading a frame: all checks against the expected model, then access tensor by tensor.

The checks take no more memory than the expected model. A `Part` of a checked frame can be decoded,
piece by piece, without further errors.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import CHUNK, Side, chunks, ends, reason, require
from fedshift.codecs.bitpack import BitPack, bits_for, reader
from fedshift.codecs.codec import Codec, Coded
from fedshift.codecs.exact import EXACT
from fedshift.core.types import Params
from fedshift.wire.frame import Cursor, Header, ParsedFrame, WireError, describe, digest, parse, read_layout
from fedshift.wire.plan import Buffer, FramePlan, Place, layout, place, read_codecs
from fedshift.wire.registry import DTYPES, codec_bytes

LARGEST = 2.0**24  # float32 represents every integer up to this one
FLOATS = (torch.float32, torch.float64)
KNOWN = 16  # plans of frames that a reader stores
Codes = NDArray[np.uint8]


class Part(NamedTuple):
    """One tensor of a frame, still coded, with everything needed to decode it."""

    codec: Codec
    dtype: torch.dtype
    shape: tuple[int, ...]
    sides: list[Side]  # one per segment; [] if the codec has no side data
    seeds: Tensor | None  # of the transform, (1,)
    codes: Codes  # packed, `stored` bits per code
    stored: int
    whole: Tensor | None = None  # the values, if they are few and exact, of a user's codec, or were decoded
    reach: float = 0.0  # largest magnitude

    def values(self, weight: float = 1.0) -> Iterator[tuple[int, Tensor]]:
        """(start, weight * values): the flattened tensor piece by piece, each valid until the next.

        Integers that are sent exactly are not weighted.
        """
        quantizer = self.codec.quantizer
        if self.whole is not None:
            yield 0, self.whole if weight == 1 or not self.whole.is_floating_point() else self.whole * weight
        elif quantizer.plain:
            yield from self._plain(weight)
        elif self.seeds is not None:
            yield 0, self.codec.decode(Coded(list(self.rows()), self.seeds), 1, self.shape).flatten().mul_(weight)
        else:
            yield from self._table(weight)

    def _table(self, weight: float) -> Iterator[tuple[int, Tensor]]:
        """Values of a quantizer with rows: a row alone is looked up in its table, others are decoded together."""
        quantizer, start = self.codec.quantizer, 0
        for (rows, n), side in zip(self.codec.segments(self.shape), self.sides, strict=True):
            table = quantizer.table(side) if rows == 1 else None
            if table is not None:
                look_up = reader(table[0] * weight, self.stored)
                for at in range(0, n, CHUNK):  # CHUNK codes take whole bytes for every width
                    packed = self.codes[(start + at) * self.stored // 8 : _bytes((start + at + CHUNK) * self.stored)]
                    yield start + at, look_up(packed)[: n - at]
            else:
                codes = torch.from_numpy(self.codes[start : start + rows * n].reshape(rows, n))
                for r, c in chunks(codes):
                    values = quantizer.decode(codes[r, c], side[r]) * weight
                    yield start + r.start * n + c.start, values.flatten()
            start += rows * n

    def rows(self) -> Iterator[tuple[Tensor, Side]]:
        """Codes and side data of each segment; the codes must not be packed."""
        start = 0
        for (rows, n), side in zip(self.codec.segments(self.shape), self.sides, strict=True):
            yield torch.from_numpy(self.codes[start : start + rows * n].reshape(rows, n)), side
            start += rows * n

    def decoded(self) -> "Part":
        """The same part with decoded values."""
        if self.whole is not None or not math.prod(self.shape):
            return self
        pieces = [values.clone() for _, values in self.values()]  # each is valid until the next
        return self._replace(whole=torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def _plain(self, weight: float) -> Iterator[tuple[int, Tensor]]:
        dtype = self.codec.quantizer.stored(self.dtype)
        for at in range(0, math.prod(self.shape), CHUNK):
            piece = self.codes[at * dtype.itemsize : (at + CHUNK) * dtype.itemsize].copy()  # aligned and writable
            values = torch.from_numpy(piece).view(dtype)
            if values.is_floating_point():
                values = values if values.dtype == torch.float64 else values.float()
                values = values if weight == 1 else values * weight
            yield at, values

    def largest(self) -> float:
        """Largest magnitude; NaN or infinity if the tensor contains one; 0 for integers that are sent exactly."""
        quantizer = self.codec.quantizer
        if not quantizer.plain:
            highest = int(self.codes.max(initial=0)) if self.stored == 8 else 2**self.stored - 1
            reaches = [quantizer.reach(side, highest) for side in self.sides]
            far = max(reaches, key=lambda far: (math.isnan(far), far), default=0.0)
            transform = self.codec.transform
            return far if transform is None else transform.reach(far, math.prod(self.shape))
        if not quantizer.stored(self.dtype).is_floating_point:
            return 0.0
        largest = [abs(end) for _, values in self._plain(1.0) for end in ends(values)]
        return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)


class Reader:
    """Read frames of one model.

    Frames of a round differ in their buffers and rarely in their codecs, so the plans of checked codecs are stored.
    """

    def __init__(self, like: Params) -> None:
        self.like = like
        self.layout = describe(layout(like))
        self.digest = digest(self.layout)
        self.known: dict[tuple[bytes, bool, bytes], FramePlan] = {}

    def open(
        self, data: bytes | memoryview, codecs: Mapping[str, Codec] | None = None
    ) -> tuple[Header, dict[str, Part]]:
        """Return header and tensors of a frame after all checks against the expected model.

        With `codecs`, a tensor must be coded with its codec, or be exact and packed, which is always fast to read.
        """
        frame = parse(data)
        plan = self._plan(frame)
        if codecs is not None:
            _check_codecs(plan, codecs)
        if frame.header.lossy != plan.lossy:
            raise WireError("the frame's lossy flag contradicts its codecs")
        sizes, rest = _sizes(plan, frame.rest)
        sides, at = [], 0
        for tensor in plan.places:
            sides.append(rest[at : at + tensor.seeds + tensor.side])
            at += tensor.seeds + tensor.side
        parts: dict[str, Part] = {}
        for buffer, size in zip(plan.buffers, sizes, strict=True):
            opened = _open(plan, buffer, rest[at : at + size], sides)
            parts |= opened
            at += size
        for tensor in plan.places:
            if not tensor.total:
                parts[tensor.name] = _part(tensor, memoryview(b""), np.zeros(0, np.uint8), 8)
        return frame.header, parts

    def _plan(self, frame: ParsedFrame) -> FramePlan:
        key = frame.digest, frame.described is not None, frame.coding
        if key in self.known:
            return self.known[key]
        names = [*self.like] if frame.digest == self.digest else self._names(frame)
        codecs = read_codecs(frame.coding, len(names))
        plan = FramePlan([_place(name, codec, self.like[name]) for name, codec in zip(names, codecs, strict=True)])
        if len(self.known) < KNOWN:
            self.known[key] = plan
        return plan

    def _names(self, frame: ParsedFrame) -> list[str]:
        """Names of a described layout, in its order; WireError if it is that of another model."""
        if frame.described is None:
            raise WireError(
                f"the frame's layout {frame.digest.hex()} is not that of the model, {self.digest.hex()}: "
                "names, shapes or dtypes of their tensors differ"
            )
        tensors = read_layout(frame.described)
        if len(tensors) != len(self.like):
            raise WireError(f"the frame has {len(tensors)} tensors, the model has {len(self.like)}")
        names = [tensor.name for tensor in tensors]
        if sorted(names) != sorted(self.like):
            missing, other = sorted(set(self.like) - set(names)), sorted(set(names) - set(self.like))
            wrong = f"missing {missing[:3]}" if missing else f"unexpected {other[:3]}" if other else "duplicate names"
            raise WireError(f"the frame's tensors are not the model's: {wrong}")
        for name, dtype, shape in tensors:
            x = self.like[name]
            if shape != tuple(x.shape):
                raise WireError(f"{name}: shape {shape} instead of {tuple(x.shape)}")
            if DTYPES.get(dtype) != x.dtype:
                raise WireError(f"{name}: dtype {DTYPES.get(dtype)} instead of {x.dtype}")
        return names


@contextmanager
def _refusing(name: str, codec: Codec) -> Iterator[None]:
    """Turn a ValueError into a WireError that names the tensor, and any other exception of a user's part, too."""
    try:
        yield
    except WireError:
        raise
    except ValueError as error:
        raise WireError(f"{name}: {reason(error)}") from None
    except Exception as error:
        if not codec.by_user:
            raise
        raise WireError(f"{name}: {_shown(codec)}: {reason(error)}") from error


def _place(name: str, codec: Codec, x: Tensor) -> Place:
    with _refusing(name, codec):
        return place(name, codec, x.dtype, x.shape)


def _check_codecs(plan: FramePlan, codecs: Mapping[str, Codec]) -> None:
    exact = codec_bytes(EXACT)
    for tensor in plan.places:
        found, wanted = codec_bytes(tensor.codec), codec_bytes(codecs[tensor.name])
        if found not in (exact, wanted):
            raise WireError(f"{tensor.name}: coded by {_shown(tensor.codec)} instead of {_shown(codecs[tensor.name])}")


def _sizes(plan: FramePlan, rest: memoryview) -> tuple[list[int], memoryview]:
    """Sizes of the buffers of codes, and the bytes after the lengths; WireError if they do not fill the frame."""
    cursor, sizes = Cursor(rest, 0), []
    for buffer in plan.buffers:
        size = cursor.varint("lengths") if buffer.size is None else buffer.size
        name = plan.places[buffer.places[0]].name
        with _refusing(name, buffer.codec):
            most = buffer.most
        if size > most:
            raise WireError(f"{name}: {size} bytes of codes instead of at most {most}")
        sizes.append(size)
    if plan.side + sum(sizes) != len(cursor.rest):
        raise WireError(
            f"side data and codes take {len(cursor.rest)} bytes instead of {plan.side + sum(sizes)}, which the frame's "
            "codecs and lengths require"
        )
    return sizes, cursor.rest


def _shown(codec: Codec) -> str:
    transform = "" if codec.transform is None else f", {codec.transform}"
    return f"{codec.quantizer}, {codec.coder}, {codec.groups}{transform}"


def _open(plan: FramePlan, buffer: Buffer, data: memoryview, sides: list[memoryview]) -> dict[str, Part]:
    """Tensors of one buffer."""
    tensors = [(plan.places[i], sides[i]) for i in buffer.places]
    first, side = tensors[0]
    with _refusing(first.name, buffer.codec):
        packed = np.frombuffer(data, np.uint8)
        if type(buffer.codec.coder) is BitPack and buffer.codec.quantizer.plain:
            return {first.name: _part(first, side, packed, 8)}
        if type(buffer.codec.coder) is BitPack and _one_full_row(first):
            bits = bits_for(first.levels)
            if first.total * bits % 8 and packed[-1] >> (first.total * bits % 8):
                raise ValueError("the bits after the last code are not zero")
            return {first.name: _part(first, side, packed, bits)}  # decoded later, a chunk at a time
        found = buffer.codec.coder.decode(data, buffer.total, buffer.levels)
        require(found, torch.uint8, (buffer.total,), f"{buffer.codec.coder} decoded codes")
        codes = found.numpy()
    parts, start = {}, 0
    for tensor, side in tensors:
        parts[tensor.name] = _part(tensor, side, codes[start : start + tensor.total], 8)
        start += tensor.total
    return parts


def _one_full_row(tensor: Place) -> bool:
    """True if the tensor is one row with a table of 2^b values, so that its codes of b bits need no check."""
    segments = tensor.codec.segments(tensor.shape)
    single = len(segments) == 1 and segments[0][0] == 1 and tensor.codec.transform is None and not tensor.codec.by_user
    return single and tensor.codec.quantizer.tabled and tensor.levels == 1 << bits_for(tensor.levels)


def _part(tensor: Place, side: memoryview, codes: Codes, stored: int) -> Part:
    """Check one tensor."""
    codec, dtype, shape = tensor.codec, tensor.dtype, tensor.shape
    with _refusing(tensor.name, codec):
        if codec.quantizer.plain and not codec.quantizer.lossy and dtype in FLOATS and 0 < math.prod(shape) <= CHUNK:
            part = _few(tensor, codes)
        else:
            _check_codes(tensor, codes, stored)
            seeds = torch.from_numpy(np.frombuffer(side[: tensor.seeds], "<u4").astype(np.int64))
            numbers = torch.from_numpy(np.frombuffer(side[tensor.seeds :], "<f4").copy())
            part = Part(codec, dtype, shape, _sides(tensor, numbers), seeds if tensor.seeds else None, codes, stored)
            part = part._replace(reach=part.largest() if tensor.total else 0.0)
            if codec.by_user and tensor.total and part.reach <= _most(tensor):
                part = _decoded(part)
        if not part.reach <= _most(tensor):
            raise ValueError(f"contains NaN, infinity or a number too large for {dtype}")
        return part


def _decoded(part: Part) -> Part:
    """Values of a user's codec, which may be wrong: they are decoded once, and checked, before any is used."""
    if part.codec.quantizer.plain:
        return part
    values = part.codec.decode(Coded(list(part.rows()), part.seeds), 1, part.shape).flatten()
    low, high = ends(values)
    return part._replace(whole=values, reach=max(abs(low), abs(high)))


def _most(tensor: Place) -> float:
    """Largest magnitude of decoded values: that of the dtype and, unless they are exact, of float32."""
    if not tensor.dtype.is_floating_point:
        return LARGEST
    most = torch.finfo(tensor.dtype).max
    return min(most, torch.finfo(torch.float32).max) if tensor.codec.quantizer.lossy else most


def _few(tensor: Place, codes: Codes) -> Part:
    """Part with few exact numbers: a fast path for the common case."""
    values = torch.from_numpy(codes.copy()).view(tensor.dtype)
    low, high = ends(values)
    return Part(tensor.codec, tensor.dtype, tensor.shape, [], None, codes, 8, values, max(abs(low), abs(high)))


def _sides(tensor: Place, numbers: Tensor) -> list[Side]:
    """Side data, one matrix per segment."""
    if tensor.codec.quantizer.plain:
        return []
    segments = tensor.codec.segments(tensor.shape)
    widths = [rows * tensor.codec.quantizer.width(n) for rows, n in segments]
    return [
        part.view(rows, width // rows)
        for part, width, (rows, _) in zip(torch.split(numbers, widths), widths, segments, strict=True)
    ]


def _check_codes(tensor: Place, codes: Codes, stored: int) -> None:
    """Raise ValueError for a code outside its table, or a boolean other than 0 and 1."""
    quantizer, start = tensor.codec.quantizer, 0
    if quantizer.plain:
        if quantizer.stored(tensor.dtype) == torch.bool and codes.max(initial=0) > 1:
            raise ValueError("contains a boolean other than 0 and 1")
        return
    if stored < 8 or tensor.levels == 256:
        return
    for rows, row in tensor.codec.segments(tensor.shape):
        highest = codes[start : start + rows * row].max()
        if highest >= quantizer.levels(row):
            raise ValueError(f"code {highest} is outside a codebook of {quantizer.levels(row)}")
        start += rows * row


def _bytes(bits: int) -> int:
    return (bits + 7) // 8


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded values for a tensor of the model: for an integer dtype, rounded and clamped to its range."""
    if dtype.is_floating_point or not values.is_floating_point():
        return values
    if dtype == torch.bool:
        return values >= 0.5
    info = torch.iinfo(dtype)
    return values.round().clamp(max(info.min, -LARGEST), min(info.max, LARGEST))
