"""A frame that was checked against the model it should hold, tensor by tensor.

Everything that can be wrong with a frame is found here, in no more memory than the expected model
accounts for; after that a `Part` can be read, piece by piece, with nothing left to go wrong.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import CHUNK, Codec, Lookup, Side, chunks
from fedshift.codecs.bitpack import BitPack, reader
from fedshift.codecs.exact import Cast, Identity
from fedshift.frame import Header, Record, WireError, parse
from fedshift.registry import DTYPES, codec_of
from fedshift.types import Params

LARGEST = 2.0**24  # up to here a float32 holds every integer


class Part(NamedTuple):
    """One tensor of a frame, still coded: everything it takes to read it."""

    codec: Codec
    dtype: torch.dtype
    shape: tuple[int, ...]
    sides: list[Side]  # one for each segment
    codes: NDArray[np.uint8]  # packed, `stored` bits a code
    stored: int
    reach: float = 0.0  # the largest magnitude

    def values(self, weight: float = 1.0) -> Iterator[tuple[int, Tensor]]:
        """(where, weight * values there): the flattened tensor piece by piece, each good until the next.

        Integers that travel exactly are not weighted.
        """
        quantizer = self.codec.quantizer
        if not isinstance(quantizer, Lookup):
            yield from self._plain(weight)
            return
        start = 0
        for (rows, n), side in zip(self.codec.groups.segments(self.shape), self.sides, strict=True):
            if rows == 1:
                read = reader(quantizer.table(side)[0] * weight, self.stored)
                for at in range(0, n, CHUNK):  # CHUNK codes take whole bytes, whatever their width
                    packed = self.codes[(start + at) * self.stored // 8 : _up((start + at + CHUNK) * self.stored)]
                    yield start + at, read(packed)[: n - at]
            else:
                codes = torch.from_numpy(self.codes[start : start + rows * n].reshape(rows, n))
                for r, c in chunks(codes, 2**quantizer.bits):
                    values = quantizer.decode(codes[r, c], side[r]) * weight
                    yield start + r.start * n + c.start, values.flatten()
            start += rows * n

    def _plain(self, weight: float) -> Iterator[tuple[int, Tensor]]:
        dtype = self.codec.quantizer.dtype if isinstance(self.codec.quantizer, Cast) else self.dtype
        for at in range(0, math.prod(self.shape), CHUNK):
            piece = self.codes[at * dtype.itemsize : (at + CHUNK) * dtype.itemsize].copy()  # aligned, and ours
            values = torch.from_numpy(piece).view(dtype)
            if values.is_floating_point():
                values = values if values.dtype == torch.float64 else values.float()
                values = values if weight == 1 else values * weight
            yield at, values

    def largest(self) -> float:
        """The largest magnitude, NaN or infinity where the frame holds one; integers that travel exactly have none."""
        if isinstance(self.codec.quantizer, Lookup):
            ends = [torch.stack(torch.aminmax(side)) for side in self.sides]
        elif isinstance(self.codec.quantizer, Identity) and not self.dtype.is_floating_point:
            return 0.0
        else:
            ends = [torch.stack(torch.aminmax(values)) for _, values in self._plain(1.0)]
        return float(torch.stack(ends).abs().max()) if ends else 0.0


def open_frame(data: bytes | memoryview, like: Params) -> tuple[Header, dict[str, Part]]:
    """The whole frame, checked against the model it should hold."""
    said, records, region = parse(data, len(like))
    names = [record.name for record in records]
    if sorted(names) != sorted(like):
        missing, strange = sorted(set(like) - set(names)), sorted(set(names) - set(like))
        wrong = f"missing {missing[:3]}" if missing else f"unexpected {strange[:3]}" if strange else "one twice"
        raise WireError(f"the frame's tensors are not the model's: {wrong}")
    codecs = [_expect(record, like[record.name]) for record in records]
    sides = [4 * side_numbers(codec, record.shape) for codec, record in zip(codecs, records, strict=True)]
    if sum(sides) + sum(record.codes for record in records) != len(region):
        raise WireError(f"the frame's buffers take {len(region)} bytes, which is not what its records say")
    if said.lossy != any(codec.quantizer.lossy for codec in codecs):
        raise WireError("the frame's word on being lossy is not what its codecs say")
    parts, at = {}, 0
    for record, codec, length in zip(records, codecs, sides, strict=True):
        side, codes = region[at : at + length], region[at + length : at + length + record.codes]
        at += length + record.codes
        try:
            parts[record.name] = _open(codec, like[record.name], side, codes)
        except (ValueError, ModuleNotFoundError) as error:
            raise WireError(f"{record.name}: {error}") from None
    return said, parts


def _expect(record: Record, x: Tensor) -> Codec:
    """The codec of a record that describes a tensor like x."""
    if record.shape != tuple(x.shape):
        raise WireError(f"{record.name}: shape {record.shape} where {tuple(x.shape)} is expected")
    if DTYPES.get(record.dtype) != x.dtype:
        raise WireError(f"{record.name}: dtype {DTYPES.get(record.dtype)} where {x.dtype} is expected")
    try:
        codec = codec_of(record)
    except ValueError as error:
        raise WireError(f"{record.name}: {error}") from None
    fixed = codec.coder.size(*code_count(codec, x.dtype, x.shape)) if x.numel() else 0
    if fixed is not None and fixed != record.codes:
        raise WireError(f"{record.name}: {record.codes} bytes of codes where {fixed} are expected")
    return codec


def _open(codec: Codec, x: Tensor, side: memoryview, codes: memoryview) -> Part:
    quantizer, segments = codec.quantizer, codec.groups.segments(x.shape)
    numbers = torch.from_numpy(np.frombuffer(side, "<f4").copy())
    widths = [rows * quantizer.width(n) for rows, n in segments]
    sides = [part.view(rows, -1) for part, (rows, _) in zip(torch.split(numbers, widths), segments, strict=True)]
    plain, bits = _check_codes(codec, x, codes)
    part = Part(codec, x.dtype, tuple(x.shape), sides, plain, bits)
    part = part._replace(reach=part.largest())
    if not part.reach <= (torch.finfo(x.dtype).max if x.is_floating_point() else LARGEST):
        raise ValueError(f"holds NaN, infinity or a number too large for {x.dtype}")
    return part


def _check_codes(codec: Codec, x: Tensor, codes: memoryview) -> tuple[NDArray[np.uint8], int]:
    """The codes, of which none lies beyond its table, and how many bits each takes."""
    n, bits = code_count(codec, x.dtype, x.shape)
    quantizer, segments = codec.quantizer, codec.groups.segments(x.shape)
    packed = np.frombuffer(codes, np.uint8)
    if not n:
        return packed, bits
    if not isinstance(quantizer, Lookup):
        plain = packed if isinstance(codec.coder, BitPack) else codec.coder.decode(codes, n, bits).numpy()
        if x.dtype == torch.bool and plain.max() > 1:
            raise ValueError("holds a truth value other than 0 and 1")
        return plain, bits
    one_row = len(segments) == 1 and segments[0][0] == 1
    if one_row and isinstance(codec.coder, BitPack) and quantizer.levels(n) == 2**bits:
        if n * bits % 8 and packed[-1] >> (n * bits % 8):
            raise ValueError("the bits after the last code are not zero")
        return packed, bits  # read as they are, a chunk at a time
    plain = codec.coder.decode(codes, n, bits).numpy()
    start = 0
    for rows, row in segments:
        highest = plain[start : start + rows * row].max()
        if highest >= quantizer.levels(row):
            raise ValueError(f"code {highest} is beyond a codebook of {quantizer.levels(row)}")
        start += rows * row
    return plain, 8


def code_count(codec: Codec, dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, int]:
    """Codes of a tensor and bits of each, as its coder sees them."""
    n, bits = math.prod(shape), codec.quantizer.bits
    if isinstance(codec.quantizer, Identity):
        return n * dtype.itemsize, 8
    return (n * bits // 8, 8) if bits > 8 else (n, bits)


def side_numbers(codec: Codec, shape: Sequence[int]) -> int:
    return sum(rows * codec.quantizer.width(n) for rows, n in codec.groups.segments(shape))


def _up(bits: int) -> int:
    return (bits + 7) // 8


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded values as a tensor of the model: integers are rounded and kept within their dtype."""
    if dtype.is_floating_point or not values.is_floating_point():
        return values
    if dtype == torch.bool:
        return values >= 0.5
    info = torch.iinfo(dtype)
    return values.round().clamp(max(info.min, -LARGEST), min(info.max, LARGEST))
