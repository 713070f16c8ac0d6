"""A reader of frames written from docs/wire.md alone, without fedshift: slow, for valid frames of known quantizers."""

import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

Array = NDArray[Any]
WHOLE = 1 << 24
FLOAT32, FLOAT64, FLOAT16, BFLOAT16, BOOL = 0, 1, 2, 3, 9
STORED = ["<f4", "<f8", "<f2", "<u2", "i1", "<i2", "<i4", "<i8", "u1", "?"]  # by number; bfloat16 as its bits
SMALL = 4096


class Tensor(NamedTuple):
    """One tensor of a layout."""

    name: str
    dtype: int
    shape: tuple[int, ...]


class PageCodec(NamedTuple):
    """Numbers and parameters of the parts of a codec."""

    quantizer: tuple[int, bytes]
    coder: int
    groups: tuple[int, bytes]
    hadamard: bool = False


class PageFrame(NamedTuple):
    """Content of a frame; bfloat16 tensors are float32 here."""

    update: bool
    reset: bool
    lossy: bool
    run: int
    base: int
    client: int | None
    examples: int
    tensors: dict[str, Array]


EXACT = PageCodec((0, b""), 0, (0, b""))


class Bytes:
    """Bytes of a frame that are read one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        assert self.at + n <= len(self.data)
        self.at += n
        return self.data[self.at - n : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        number = shift = 0
        while True:
            byte = self.byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number


def describe(tensors: Sequence[Tensor]) -> bytes:
    """Bytes of a layout."""
    out = varint(len(tensors))
    for name, dtype, shape in tensors:
        out += varint(len(name.encode())) + name.encode() + bytes([dtype, len(shape)]) + b"".join(map(varint, shape))
    return out


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([128 | number & 127]) + varint(number >> 7)


def read(data: bytes, model: Sequence[Tensor]) -> PageFrame:
    """Decode a frame of this model."""
    assert struct.unpack("<I", data[-4:])[0] == zlib.crc32(data[:-4])
    frame = Bytes(data[:-4])
    assert frame.take(5) == b"FEDS\2"
    flags = frame.byte()
    (run,) = struct.unpack("<Q", frame.take(8))
    base, client, examples = frame.varint(), frame.varint(), frame.varint()
    if flags & 8:
        model = read_layout(Bytes(frame.take(frame.varint())))
    else:
        assert frame.take(8) == hashlib.sha256(describe(model)).digest()[:8]
    codecs = read_codecs(Bytes(frame.take(frame.varint())), len(model))
    tensors = read_tensors(frame, model, codecs)
    assert frame.at == len(frame.data)
    lossy = any(codec.quantizer[0] for codec in codecs)
    assert lossy == bool(flags & 4)
    number = client - 1 if client else None
    return PageFrame(bool(flags & 1), bool(flags & 2), lossy, run, base, number, examples, tensors)


def read_layout(layout: Bytes) -> list[Tensor]:
    tensors = []
    for _ in range(layout.varint()):
        name = layout.take(layout.varint()).decode()
        dtype, axes = layout.byte(), layout.byte()
        tensors.append(Tensor(name, dtype, tuple(layout.varint() for _ in range(axes))))
    assert layout.at == len(layout.data)
    return tensors


def read_codecs(coding: Bytes, tensors: int) -> list[PageCodec]:
    """Codec of each tensor."""
    codecs = [EXACT]
    for _ in range(coding.varint()):
        quantizer, (coder, none) = read_part(coding), read_part(coding)
        flags = coding.byte()
        assert (none, flags & ~3) == (b"", 0)
        groups = read_part(coding) if flags & 1 else (0, b"")
        if flags & 2:
            assert read_part(coding) == (1, b"")
        codecs.append(PageCodec(quantizer, coder, groups, bool(flags & 2)))
    found: list[PageCodec] = []
    while len(found) < tensors:
        count, index = coding.varint(), coding.varint()
        found += [codecs[index]] * count
    assert coding.at == len(coding.data)
    return found


def read_part(coding: Bytes) -> tuple[int, bytes]:
    number = coding.byte()
    return number, coding.take(coding.byte())


def codes_of(codec: PageCodec, shape: tuple[int, ...]) -> int:
    """Number of codes of a tensor."""
    n = math.prod(shape)
    return n + -n % block_of(n) if codec.hadamard else n


def block_of(n: int) -> int:
    """Values per block of the Hadamard transform."""
    return max(size for size in (1 << bit for bit in range(16)) if 16 * (-n % size) <= n)


def rows_of(codec: PageCodec, shape: tuple[int, ...]) -> list[int]:
    """Values of each row."""
    n, (groups, parameters) = codes_of(codec, shape), codec.groups
    if not n:
        return []
    if groups == 1 and shape:
        return [n // shape[0]] * shape[0]
    if groups == 2:
        (block,) = struct.unpack("<I", parameters)
        return [block] * (n // block) + [n % block] * (n % block > 0)
    return [n]


def inner_of(parameters: bytes) -> tuple[int, bytes]:
    """Quantizer in a top-k quantizer."""
    assert len(parameters) == 2 + parameters[1]
    return parameters[0], parameters[2:]


def levels_of(quantizer: tuple[int, bytes], n: int) -> int:
    number, parameters = quantizer
    if number == 12:
        return levels_of(inner_of(parameters), n) + 1
    if number in (7, 9):
        return {7: 3, 9: 2}[number]
    if number == 8:
        return 2 * parameters[0] + 1
    most: int = 2 ** parameters[0]
    return {1: most, 2: min(n, most), 3: most, 6: most - 1, 10: most, 11: most, 13: most - 1}[number]


def width_of(quantizer: tuple[int, bytes], n: int) -> int:
    """Numbers of side data."""
    number, parameters = quantizer
    if number == 12:
        return width_of(inner_of(parameters), n)
    return levels_of(quantizer, n) if number == 2 else {1: 2, 3: 2, 6: 3, 7: 2, 8: 1, 9: 1, 10: 1, 11: 0, 13: 1}[number]


def read_tensors(frame: Bytes, model: Sequence[Tensor], codecs: Sequence[PageCodec]) -> dict[str, Array]:
    plain = [codec.quantizer[0] in (0, 4) for codec in codecs]
    rows = [[] if plain[i] else rows_of(codecs[i], tensor.shape) for i, tensor in enumerate(model)]
    totals, levels = [], []
    for i, tensor in enumerate(model):
        n, size = codes_of(codecs[i], tensor.shape), np.dtype(STORED[tensor.dtype]).itemsize
        totals.append(n * (2 if codecs[i].quantizer[0] == 4 else size) if plain[i] else n)
        levels.append(256 if plain[i] else max((levels_of(codecs[i].quantizer, row) for row in rows[i]), default=1))
    buffers: list[list[int]] = []
    shared: dict[PageCodec, list[int]] = {}
    for i, codec in enumerate(codecs):
        if totals[i] and codec.coder and totals[i] < SMALL:
            if codec not in shared:
                shared[codec] = []
                buffers.append(shared[codec])
            shared[codec].append(i)
        elif totals[i]:
            buffers.append([i])
    lengths = []
    for places in buffers:
        count, most = sum(totals[i] for i in places), max(levels[i] for i in places)
        lengths.append(frame.varint() if codecs[places[0]].coder else (count * bits_of(most) + 7) // 8)
    seeds, sides = [], []
    for i, codec in enumerate(codecs):
        seeds.append(struct.unpack("<I", frame.take(4))[0] if codec.hadamard and totals[i] else 0)
        widths = [width_of(codec.quantizer, n) for n in rows[i]]
        sides.append([np.frombuffer(frame.take(4 * width), "<f4") for width in widths])
    found: dict[str, Array] = {}
    for places, length in zip(buffers, lengths, strict=True):
        count, most = sum(totals[i] for i in places), max(levels[i] for i in places)
        codes = decode(codecs[places[0]].coder, frame.take(length), count, most)
        for i in places:
            mine, codes = codes[: totals[i]], codes[totals[i] :]
            values = exact(codecs[i], model[i], mine) if plain[i] else quantized(codecs[i], rows[i], sides[i], mine)
            if codecs[i].hadamard:
                values = rotated_back(values, seeds[i], math.prod(model[i].shape))
            found[model[i].name] = as_dtype(values, model[i].dtype).reshape(model[i].shape)
    for tensor in model:
        dtype = np.float32 if tensor.dtype == BFLOAT16 else STORED[tensor.dtype]
        found.setdefault(tensor.name, np.zeros(tensor.shape, dtype))
    return found


def exact(codec: PageCodec, tensor: Tensor, codes: NDArray[np.uint8]) -> Array:
    """Values whose bytes are the codes."""
    dtype = tensor.dtype if codec.quantizer[0] == 0 else (FLOAT16, BFLOAT16)[codec.quantizer[1][0]]
    values = codes.view(STORED[dtype])
    if dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if codec.quantizer[0] == 4 else values


def quantized(codec: PageCodec, rows: list[int], sides: list[Array], codes: NDArray[np.uint8]) -> Array:
    values = []
    for n, side in zip(rows, sides, strict=True):
        mine, codes = codes[:n], codes[n:]
        assert mine.max() < levels_of(codec.quantizer, n)
        values.append(table(codec.quantizer, n, side)[mine])
    return np.concatenate(values)


def table(quantizer: tuple[int, bytes], n: int, side: Array) -> Array:
    """Values of all codes of a row, float32."""
    (number, parameters), levels = quantizer, levels_of(quantizer, n)
    q = np.arange(levels)
    k = (q + 1) // 2
    if number == 2:
        return side
    if number == 7:
        return np.array([0, *side], np.float32)
    if number == 6:
        step, first, further = side
        size = (k.astype(np.float32) - np.where(k == 1, first, further)) * step
        return np.where(q == 0, np.float32(0), np.where(q % 2 == 1, size, -size))
    if number == 13:
        size = k.astype(np.float32) * side
        return np.where(q == 0, np.float32(0), np.where(q % 2 == 1, size, -size))
    if number == 8:
        size = side.astype(np.float64) * (k / parameters[0])
        return np.where(q == 0, 0, np.where(q % 2 == 1, size, -size)).astype(np.float32)
    if number == 9:
        return np.array([side[0], -side[0]], np.float32)
    if number == 10:
        half = normal_levels(levels // 2, zero=False)
        return side * np.array([*-half[::-1], *half], np.float32)
    if number == 11:
        if levels == 2:
            half = normal_levels(1, zero=False)
            return np.array([*-half, *half], np.float32)
        above, below = normal_levels(levels // 2, zero=True), normal_levels(levels // 2 - 1, zero=True)
        return np.array([*-below[::-1], 0, *above], np.float32)
    if number == 12:
        return np.array([0, *table(inner_of(parameters), n, side)], np.float32)
    low, high = side.astype(np.float64)
    values: Array = (low + q / (levels - 1) * (high - low)).astype(np.float32)
    values[-1] = side[1]
    return np.asarray(values)


@cache
def normal_levels(m: int, zero: bool) -> Array:
    """Positive levels of a normal distribution, by Newton's method with a numerical derivative."""

    def residual(c: Array) -> Array:
        borders = [c[0] / 2 if zero else 0.0, *((c[1:] + c[:-1]) / 2), math.inf]
        density = np.array([math.exp(-b * b / 2) / math.sqrt(2 * math.pi) for b in borders])
        above = np.array([math.erfc(b / math.sqrt(2)) / 2 for b in borders])
        return np.asarray(c - (density[:-1] - density[1:]) / (above[:-1] - above[1:]))

    c = np.array([NormalDist(0, math.sqrt(3)).inv_cdf(0.5 + (i + 0.75) / (2 * m + 1)) for i in range(m)])
    for _ in range(12):
        slope = np.stack([(residual(c + d) - residual(c - d)) / 2e-6 for d in 1e-6 * np.eye(m)], axis=1)
        c = c - np.linalg.solve(slope, residual(c))
    return np.asarray(np.rint(c * 65536) / 65536)


def rotated_back(values: Array, seed: int, n: int) -> Array:
    """Inverse of the Hadamard transform."""
    size = block_of(n)
    bits = size.bit_length() - 1
    strides = [1 << bit for bit in (*range(bits // 2, bits), *range(bits // 2))]
    blocks = values.reshape(-1, size) * np.float32(size**-0.5)
    place = np.arange(size)
    for stride in strides:
        low = place[place & stride == 0]
        a, b = blocks[:, low], blocks[:, low + stride]
        blocks[:, low], blocks[:, low + stride] = a + b, a - b
    return np.asarray((blocks.flatten() * np.array([sign(seed, i) for i in range(len(values))], np.float32))[:n])


def sign(seed: int, i: int) -> int:
    mask = (1 << 64) - 1
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return -1 if (z ^ (z >> 31)) >> 63 else 1


def as_dtype(values: Array, dtype: int) -> Array:
    stored = np.dtype(STORED[dtype])
    if dtype == BFLOAT16:
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + (bits >> 16 & 1)).astype(np.uint32) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    if values.dtype == stored or stored.kind == "f":
        return values.astype(stored)
    if dtype == BOOL:
        return values >= 0.5
    info = np.iinfo(stored)
    return np.clip(np.rint(values.astype(np.float64)), max(info.min, -WHOLE), min(info.max, WHOLE)).astype(stored)


def bits_of(levels: int) -> int:
    return max(1, (levels - 1).bit_length())


def decode(coder: int, data: bytes, n: int, levels: int) -> NDArray[np.uint8]:
    """Codes of one buffer."""
    bits = bits_of(levels)
    if coder == 1:
        data = zstandard.ZstdDecompressor().decompress(data)
        return unpacked(data, n, bits if bits in (1, 2, 4, 8) else 8)
    if coder == 3:
        return range_decoded(data, n, levels)
    assert coder == 0
    return unpacked(data, n, bits)


def unpacked(data: bytes, n: int, bits: int) -> NDArray[np.uint8]:
    assert len(data) == (n * bits + 7) // 8
    stream = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    assert not stream[n * bits :].any()
    return np.packbits(stream[: n * bits].reshape(n, bits), axis=1, bitorder="little")[:, 0]


def range_decoded(data: bytes, n: int, levels: int) -> NDArray[np.uint8]:
    """Codes of the range coder."""
    source = Bytes(data)
    kind = source.byte()
    if kind == 0:
        return unpacked(data[1:], n, bits_of(levels))
    frequency: dict[int, int] = {}
    code = 0
    while code < levels:
        byte = source.byte()
        if byte < 32:
            code += byte + 1
            continue
        level = byte - 31
        frequency[code] = level if level < 8 else (8 + level % 8) << (level // 8 - 1)
        code += 1
    digits = source.varint() if kind == 2 else 0
    body = data[source.at :] + bytes(-len(data[source.at :]) % 4)
    words = [int.from_bytes(body[i : i + 4], "little") for i in range(0, len(body), 4)]
    state = words.pop()
    if words:
        state = state << 32 | words.pop()

    def next_of(scaled: list[int]) -> int:
        nonlocal state
        low, symbol = state % WHOLE, 0
        while low >= scaled[symbol]:
            low -= scaled[symbol]
            symbol += 1
        state = scaled[symbol] * (state >> 24) + low
        if state < 1 << 32 and words:
            state = state << 32 | words.pop()
        return symbol

    def scaled(shares: list[int]) -> list[int]:
        out = [1 + share * (WHOLE - len(shares)) // sum(shares) for share in shares]
        out[shares.index(max(shares))] += WHOLE - sum(out)
        return out

    if kind == 1:
        model = scaled(list(frequency.values()))
        codes = [list(frequency)[next_of(model)] for _ in range(n)]
    else:
        frequent = max(frequency, key=lambda code: (frequency[code], -code))
        whole, left, model = sum(frequency.values()), WHOLE - 64, []
        for _ in range(63):
            part = left * (whole - frequency[frequent]) // whole
            model.append(1 + part)
            left -= part
        model.append(1 + left)
        codes, places, place = [frequent] * n, [], 0
        for _ in range(digits):
            digit = next_of(model)
            place += digit
            if digit < 63:
                places.append(place)
                place += 1
        del frequency[frequent]
        values = scaled(list(frequency.values())) if frequency else []
        for place in places:
            codes[place] = list(frequency)[next_of(values) if len(values) > 1 else 0]
    assert (state, words) == (WHOLE, [])
    return np.array(codes, np.uint8)
