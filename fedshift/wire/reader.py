"""Reading a frame: all checks against the expected model, then access tensor by tensor.

The checks take no more memory than the expected model. A `Part` of a checked frame can be decoded,
piece by piece, without further errors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import CHUNK, Codec, Lookup, Side, chunks, ends
from fedshift.codecs.bitpack import BitPack, reader
from fedshift.codecs.exact import Cast, Identity
from fedshift.core.types import Params
from fedshift.wire.frame import Header, ParsedFrame, TensorRecord, WireError, parse, records
from fedshift.wire.registry import DTYPES, codec_of, numbers_of

LARGEST = 2.0**24  # float32 represents every integer up to this one
FLOATS = (torch.float32, torch.float64)
KNOWN = 16  # layouts that a reader stores: with entropy coders, every frame has a new one


class Part(NamedTuple):
    """One tensor of a frame, still coded, with everything needed to decode it."""

    codec: Codec
    dtype: torch.dtype
    shape: tuple[int, ...]
    sides: list[Side]  # one per segment; [] if the codec has no side data
    codes: NDArray[np.uint8]  # packed, `stored` bits per code
    stored: int
    whole: Tensor | None = None  # the values, if they are few and exact, or were decoded
    reach: float = 0.0  # largest magnitude

    def values(self, weight: float = 1.0) -> Iterator[tuple[int, Tensor]]:
        """(start, weight * values): the flattened tensor piece by piece, each valid until the next.

        Integers that are sent exactly are not weighted.
        """
        quantizer = self.codec.quantizer
        if self.whole is not None:
            yield 0, self.whole if weight == 1 or not self.whole.is_floating_point() else self.whole * weight
            return
        if not isinstance(quantizer, Lookup):
            yield from self._plain(weight)
            return
        start = 0
        for (rows, n), side in zip(self.codec.groups.segments(self.shape), self.sides, strict=True):
            if rows == 1:
                look_up = reader(quantizer.table(side)[0] * weight, self.stored)
                for at in range(0, n, CHUNK):  # CHUNK codes take whole bytes for every width
                    packed = self.codes[(start + at) * self.stored // 8 : _bytes((start + at + CHUNK) * self.stored)]
                    yield start + at, look_up(packed)[: n - at]
            else:
                codes = torch.from_numpy(self.codes[start : start + rows * n].reshape(rows, n))
                for r, c in chunks(codes):
                    values = quantizer.decode(codes[r, c], side[r]) * weight
                    yield start + r.start * n + c.start, values.flatten()
            start += rows * n

    def decoded(self) -> "Part":
        """The same part with decoded values."""
        if self.whole is not None or not math.prod(self.shape):
            return self
        pieces = [values.clone() for _, values in self.values()]  # each is valid until the next
        return self._replace(whole=torch.cat(pieces) if len(pieces) > 1 else pieces[0])

    def _plain(self, weight: float) -> Iterator[tuple[int, Tensor]]:
        dtype = self.codec.quantizer.dtype if isinstance(self.codec.quantizer, Cast) else self.dtype
        for at in range(0, math.prod(self.shape), CHUNK):
            piece = self.codes[at * dtype.itemsize : (at + CHUNK) * dtype.itemsize].copy()  # aligned and writable
            values = torch.from_numpy(piece).view(dtype)
            if values.is_floating_point():
                values = values if values.dtype == torch.float64 else values.float()
                values = values if weight == 1 else values * weight
            yield at, values

    def largest(self) -> float:
        """Largest magnitude; NaN or infinity if the tensor contains one; 0 for integers that are sent exactly."""
        if isinstance(self.codec.quantizer, Lookup):
            highest = int(self.codes.max(initial=0)) if self.stored == 8 else 2**self.stored - 1
            reaches = [self.codec.quantizer.reach(side, highest) for side in self.sides]
            return max(reaches, key=lambda far: (math.isnan(far), far), default=0.0)
        elif isinstance(self.codec.quantizer, Identity) and not self.dtype.is_floating_point:
            return 0.0
        largest = [abs(end) for _, values in self._plain(1.0) for end in ends(values)]
        return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)


class Layout(NamedTuple):
    """Checked records of a frame: codec and number of bytes of each tensor."""

    described: bytes  # the records as in the frame
    places: list[tuple[str, Codec, int, int]]  # name, codec, bytes of side data, bytes of codes
    buffers: int  # bytes of all buffers
    lossy: bool


class Reader:
    """Read frames of one model.

    Frames of a round differ in their buffers and rarely in their records, so the layouts of checked
    records are stored and found again by their bytes.
    """

    def __init__(self, like: Params) -> None:
        self.like = like
        self.known: list[Layout] = []

    def open(
        self, data: bytes | memoryview, codecs: Mapping[str, Codec] | None = None
    ) -> tuple[Header, dict[str, Part]]:
        """Return header and tensors of a frame after all checks against the expected model.

        With `codecs`, a tensor must be coded with its codec, or be exact and packed, which is always fast to read.
        """
        frame = parse(data)
        layout = self._layout(frame)
        for name, codec, _, _ in layout.places:
            wanted, dtype = codecs[name] if codecs else codec, self.like[name].dtype
            if not _exact_and_packed(codec) and numbers_of(codec, dtype) != numbers_of(wanted, dtype):
                raise WireError(f"{name}: coded by {_shown(codec)} instead of {_shown(wanted)}")
        region = frame.rest[len(layout.described) :]
        if layout.buffers != len(region):
            raise WireError(
                f"the frame's buffers take {len(region)} bytes instead of {layout.buffers}, the sum of its records"
            )
        if frame.header.lossy != layout.lossy:
            raise WireError("the frame's lossy flag contradicts its codecs")
        parts, at = {}, 0
        for name, codec, side, codes in layout.places:
            middle, end = at + side, at + side + codes
            try:
                parts[name] = _open(codec, self.like[name], region[at:middle], region[middle:end])
            except ValueError as error:
                raise WireError(f"{name}: {error}") from None
            at = end
        return frame.header, parts

    def _layout(self, frame: ParsedFrame) -> Layout:
        for layout in self.known:
            same = frame.tensors == len(layout.places) and frame.rest[: len(layout.described)] == layout.described
            if same:
                return layout
        checked, length = records(frame, len(self.like))
        names = [record.name for record in checked]
        if sorted(names) != sorted(self.like):
            missing, other = sorted(set(self.like) - set(names)), sorted(set(names) - set(self.like))
            wrong = f"missing {missing[:3]}" if missing else f"unexpected {other[:3]}" if other else "duplicate names"
            raise WireError(f"the frame's tensors are not the model's: {wrong}")
        codecs = [_expect(record, self.like[record.name]) for record in checked]
        sides = [4 * side_numbers(codec, record.shape) for codec, record in zip(codecs, checked, strict=True)]
        codes = [record.codes for record in checked]
        places = list(zip(names, codecs, sides, codes, strict=True))
        lossy = any(codec.quantizer.lossy for codec in codecs)
        layout = Layout(bytes(frame.rest[:length]), places, sum(sides) + sum(codes), lossy)
        if len(self.known) < KNOWN:
            self.known.append(layout)
        return layout


def _expect(record: TensorRecord, x: Tensor) -> Codec:
    """Return the codec of a record; raise WireError if the record does not describe a tensor like x."""
    if record.shape != tuple(x.shape):
        raise WireError(f"{record.name}: shape {record.shape} instead of {tuple(x.shape)}")
    if DTYPES.get(record.dtype) != x.dtype:
        raise WireError(f"{record.name}: dtype {DTYPES.get(record.dtype)} instead of {x.dtype}")
    try:
        codec = codec_of(record)
    except ValueError as error:
        raise WireError(f"{record.name}: {error}") from None
    count = code_count(codec, x.dtype, x.shape)
    fixed = codec.coder.size(*count) if x.numel() else 0
    if fixed is not None and fixed != record.codes:
        raise WireError(f"{record.name}: {record.codes} bytes of codes instead of {fixed}")
    if record.codes > (most := codec.coder.most(*count)):
        raise WireError(f"{record.name}: {record.codes} bytes of codes instead of at most {most}")
    return codec


def _exact_and_packed(codec: Codec) -> bool:
    return type(codec.quantizer) is Identity and type(codec.coder) is BitPack


def _shown(codec: Codec) -> str:
    return f"{codec.quantizer}, {codec.coder}, {codec.groups}"


def _open(codec: Codec, x: Tensor, side: memoryview, codes: memoryview) -> Part:
    if _exact_and_packed(codec) and x.dtype in FLOATS and 0 < x.numel() <= CHUNK:
        part = _few(codec, x, codes)
    else:
        sides = _sides(codec, x.shape, side) if len(side) else []
        part = Part(codec, x.dtype, tuple(x.shape), sides, *_check_codes(codec, x, codes))
        part = part._replace(reach=part.largest())
    if not part.reach <= (torch.finfo(x.dtype).max if x.is_floating_point() else LARGEST):
        raise ValueError(f"contains NaN, infinity or a number too large for {x.dtype}")
    return part


def _few(codec: Codec, x: Tensor, codes: memoryview) -> Part:
    """Part with few exact numbers: a fast path for the common case."""
    plain = np.frombuffer(codes, np.uint8)
    values = torch.from_numpy(plain.copy()).view(x.dtype)
    low, high = ends(values)
    return Part(codec, x.dtype, tuple(x.shape), [], plain, 8, values, max(abs(low), abs(high)))


def _sides(codec: Codec, shape: Sequence[int], data: memoryview) -> list[Side]:
    """Side data, one matrix per segment."""
    segments = codec.groups.segments(shape)
    numbers = torch.from_numpy(np.frombuffer(data, "<f4").copy())
    widths = [rows * codec.quantizer.width(n) for rows, n in segments]
    return [part.view(rows, -1) for part, (rows, _) in zip(torch.split(numbers, widths), segments, strict=True)]


def _check_codes(codec: Codec, x: Tensor, codes: memoryview) -> tuple[NDArray[np.uint8], int]:
    """Return the codes and the bits per code; raise ValueError for a code outside its table."""
    n, bits = code_count(codec, x.dtype, x.shape)
    quantizer, segments = codec.quantizer, codec.groups.segments(x.shape)
    packed = np.frombuffer(codes, np.uint8)
    if not n:
        return packed, bits
    if not isinstance(quantizer, Lookup):
        plain = packed if isinstance(codec.coder, BitPack) else codec.coder.decode(codes, n, bits).numpy()
        if x.dtype == torch.bool and plain.max() > 1:
            raise ValueError("contains a boolean other than 0 and 1")
        return plain, bits
    one_row = len(segments) == 1 and segments[0][0] == 1
    if one_row and isinstance(codec.coder, BitPack) and quantizer.levels(n) == 2**bits:
        if n * bits % 8 and packed[-1] >> (n * bits % 8):
            raise ValueError("the bits after the last code are not zero")
        return packed, bits  # decoded later, a chunk at a time
    plain = codec.coder.decode(codes, n, bits).numpy()
    start = 0
    for rows, row in segments:
        highest = plain[start : start + rows * row].max()
        if highest >= quantizer.levels(row):
            raise ValueError(f"code {highest} is outside a codebook of {quantizer.levels(row)}")
        start += rows * row
    return plain, 8


def code_count(codec: Codec, dtype: torch.dtype, shape: Sequence[int]) -> tuple[int, int]:
    """Number of codes of a tensor and bits per code, as the coder receives them."""
    n, bits = math.prod(shape), codec.quantizer.bits
    if isinstance(codec.quantizer, Identity):
        return n * dtype.itemsize, 8
    return (n * bits // 8, 8) if bits > 8 else (n, bits)


def side_numbers(codec: Codec, shape: Sequence[int]) -> int:
    """Number of values of side data."""
    return sum(rows * codec.quantizer.width(n) for rows, n in codec.groups.segments(shape))


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
