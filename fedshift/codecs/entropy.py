"""Coders that spend fewer bits on frequent codes.

Zstandard compresses codes of 3, 5, 6 or 7 bits as one byte each: packing would spread them over byte
boundaries and hide their frequencies (5 bits: 3.9 bits per code, 4.7 after packing). Codes of 1, 2 or 4
bits are packed first: a byte of them is one symbol, and zstd, which spends at least one bit per symbol,
comes closer to their entropy (4 bits: 2.4 bits per code instead of 3.0).
"""

import math
from dataclasses import dataclass
from typing import Any

import constriction
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import Coder, read_varint, require_integer, varint
from fedshift.codecs.bitpack import BitPack, below, bits_for

Counts = NDArray[np.int64]

# A block of Zstandard can contain decoding tables, which take more time than a few bytes of content. The encoder
# writes blocks of up to 128 KB, and divides each into at most 196: one per 668 bytes.
LEAST_BLOCK = 512
RLE, RESERVED = 1, 3  # types of blocks

PACKED, PLAIN, GAPS = 0, 1, 2  # the first byte of a range-coded tensor
WHOLE = 1 << 24  # sum of the frequencies of a model, and the coder's state before the first symbol
LONGEST = 63  # digits of a gap: 0..62 end it, 63 adds 63 codes and continues it
DENSEST = 3  # least number of codes per digit for gaps to be coded: with more digits, plain codes are faster
SKIP = 32  # bytes of the table below this skip codes, the others are frequencies
PAIRS = 1 << 18  # number of codes from which they are counted in pairs: fewer steps, but a table of 65,536


@dataclass(frozen=True)
class Zstd(Coder, number=1):
    """Zstandard, levels 1 to 22: fast in both directions, saves 20 to 40 % of uniform codes, little of K-means codes.

    >>> codes = torch.zeros(1000, dtype=torch.uint8)
    >>> len(Zstd().encode(codes, levels=16)) < 30
    True
    """

    level: int = 3

    def __post_init__(self) -> None:
        require_integer(self, level=self.level)
        if not 1 <= self.level <= 22:
            raise ValueError(f"Zstd(level={self.level}): level must be between 1 and 22")

    def encode(self, codes: Tensor, levels: int) -> bytes:
        whole = BitPack().encode(codes, _packed_levels(levels))
        return zstandard.ZstdCompressor(level=self.level).compress(whole)

    def decode(self, data: bytes | memoryview, n: int, levels: int) -> Tensor:
        try:
            # The size is checked first, because zstd allocates the size that a frame declares.
            packed = _packed_levels(levels)
            declared, expected = zstandard.get_frame_parameters(data).content_size, BitPack().size(n, packed)
            if declared != expected:
                raise ValueError(f"a zstd frame of {declared} bytes instead of {expected}")
            _check_blocks(memoryview(data), 1 + expected // LEAST_BLOCK)
            whole = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
                data, max_output_size=expected, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise ValueError(f"not a zstd frame: {error}") from None
        return below(BitPack().decode(whole, n, packed), levels)

    def size(self, n: int, levels: int) -> None:
        return None

    def most(self, n: int, levels: int) -> int:
        """ZSTD_COMPRESSBOUND of the content."""
        content = BitPack().size(n, _packed_levels(levels))
        return content + (content >> 8) + (max(0, (128 << 10) - content) >> 11)


@dataclass(frozen=True)
class Range(Coder, number=3):
    """Range coder (rANS) with the frequencies of the codes: within 1 % of their entropy, fastest at low rates.

    The time is proportional to the number of symbols. If one code is frequent, the symbols are the gaps between
    the other codes, and the other codes: at 0.2 bits per code, one symbol per twenty codes. Gaps are geometric,
    P(gap = k) = p^k (1 - p) with p the share of the frequent code, so they need no table, and together with the other
    codes they take the entropy of the codes. Codes that would not become shorter are packed. Format: docs/wire.md.

    >>> codes = torch.tensor([0] * 999 + [3], dtype=torch.uint8)
    >>> len(Range().encode(codes, levels=4))  # packed: 250
    10
    """

    def encode(self, codes: Tensor, levels: int) -> bytes:
        symbols, n = codes.cpu().numpy(), len(codes)
        packed = BitPack().size(n, levels)
        if not n:
            return bytes([PACKED])
        counts = _count(symbols, levels)
        steps = _steps(counts)
        table = _table(steps)
        used = np.flatnonzero(steps)
        shares = _frequency(steps[used])
        top = int(shares.argmax())
        stack = constriction.stream.stack.AnsCoder(np.array([WHOLE], np.uint32))
        gaps = _gaps(symbols, int(used[top]), int(counts[used[top]]))
        if gaps is not None:
            where, digits = gaps
            others = np.delete(used, top)
            if len(others) > 1:
                stack.encode_reverse(_ranks(symbols[where], others), _model(_scaled(np.delete(shares, top))))
            if len(digits):
                stack.encode_reverse(digits, _model(_geometric(shares, top)))
            head = bytes([GAPS]) + table + varint(len(digits))
        else:
            head = bytes([PLAIN]) + table
            model = _scaled(shares)
            least = len(head) + math.floor(float(counts[used] @ np.log2(WHOLE / model)) / 8)
            if least > packed + 16:  # the margin makes the result independent of rounding errors of log2
                return bytes([PACKED]) + BitPack().encode(codes, levels)
            stack.encode_reverse(_ranks(symbols, used), _model(model))
        whole: bytes = head + stack.get_compressed().astype("<u4").tobytes().rstrip(b"\0")
        return whole if len(whole) <= packed else bytes([PACKED]) + BitPack().encode(codes, levels)

    def decode(self, data: bytes | memoryview, n: int, levels: int) -> Tensor:
        data = memoryview(data)
        if not len(data):
            raise ValueError("range-coded codes are missing: the buffer is empty")
        if data[0] == PACKED:
            return BitPack().decode(data[1:], n, levels)
        if data[0] > GAPS or not n:
            raise ValueError(f"kind {data[0]} of {n} range-coded codes; known are 0, 1 and 2, and only 0 without codes")
        steps, at = _read_table(data, levels)
        table = data[1:at]
        used = np.flatnonzero(steps)
        shares = _frequency(steps[used])
        digits = 0
        if data[0] == GAPS:
            digits, at = read_varint(data, at, "the range coder's number of digits")
        if DENSEST * digits > n or (len(used) == 1 and (digits or data[0] == PLAIN)):
            raise ValueError(
                f"{digits} digits of gaps for {n} codes, {len(used)} of them distinct, which no encoder writes"
            )
        if len(data) == at or data[-1] == 0:
            raise ValueError("the range coder's state is missing or ends with zero bytes")
        words = np.frombuffer(bytes(data[at:]) + bytes((at - len(data)) % 4), "<u4").astype(np.uint32)
        stack = constriction.stream.stack.AnsCoder(words)
        codes = _read_plain(stack, n, used, shares) if data[0] == PLAIN else _read_gaps(stack, digits, n, used, shares)
        if stack.get_compressed().tolist() != [WHOLE]:
            raise ValueError("the range coder's state does not end with the last code")
        if _table(_steps(_count(codes, levels))) != table:
            raise ValueError("the range coder's frequencies do not match its codes")
        return torch.from_numpy(codes)

    def size(self, n: int, levels: int) -> None:
        return None

    def most(self, n: int, levels: int) -> int:
        """Packed codes, and one byte for their kind."""
        return 1 + BitPack().size(n, levels)

    def estimate(self, counts: Tensor) -> Tensor:
        """1 + table + sum_q counts_q log2(1 / share_q) / 8 + 3.5, or the packed codes if these take fewer bytes.

        The state begins at three bytes, and its last byte is half full on average. With gaps, their number takes one
        to four bytes, and the codes after the last of them, log2(e) bits on average, take none. Within 1 % for 10,000
        and more independent codes.
        """
        c = counts.double()
        n, most = c.sum(-1), c.amax(-1)
        quantum = torch.ldexp(torch.ones_like(c), (torch.frexp(c).exponent - 4).clamp(min=0))
        f = (c / quantum + 0.5).floor() * quantum  # as _steps rounds them
        spent = -torch.xlogy(c, f / f.sum(-1, keepdim=True)).sum(-1) / math.log(2)
        code = torch.arange(c.shape[-1], device=c.device)
        last = torch.where(c > 0, code, -1).cummax(-1).values
        table = ((c > 0) | ((code - last - 1) % SKIP == 0)).sum(-1)
        digits = (n - most) / (1 - (most / n) ** LONGEST)
        length = 1 + (digits >= 1 << 7).double() + (digits >= 1 << 14).double() + (digits >= 1 << 21).double()
        gaps = torch.where(DENSEST * digits > n, 0, length - 1 / (8 * math.log(2)))
        coded = 1 + table + gaps + 3.5 + spent / 8
        packed = BitPack().estimate(counts)
        return 1 + torch.where(coded <= packed, coded - 1, packed)  # NaN, without codes, is not less


def _check_blocks(data: memoryview, most: int) -> None:
    """Refuse a Zstandard frame with more blocks than an encoder writes; only headers of blocks are read."""
    at = zstandard.frame_header_size(data)
    for _ in range(most):
        head = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = head & 1, head >> 1 & 3, head >> 3
        at += 3 + (1 if kind == RLE else size)
        if kind == RESERVED or at > len(data):
            raise ValueError("a zstd block extends beyond its frame or has an unknown type")
        if last:
            return
    raise ValueError(f"a zstd frame of more than {most} blocks, which no encoder writes")


def _packed_levels(levels: int) -> int:
    """Levels for which codes are packed before they are compressed: one byte per code if bytes would be divided."""
    return levels if 8 % bits_for(levels) == 0 else 256


def _count(symbols: NDArray[np.uint8], levels: int) -> Counts:
    """Counts of all codes: int64 (levels,)."""
    if len(symbols) < PAIRS:
        counts = np.bincount(symbols, minlength=256)
    else:
        even = len(symbols) & ~1
        pairs = np.bincount(np.ascontiguousarray(symbols[:even]).view(np.uint16), minlength=1 << 16).reshape(256, 256)
        counts = pairs.sum(0) + pairs.sum(1) + np.bincount(symbols[even:], minlength=256)
    if counts[levels:].any():
        raise ValueError(f"code {np.flatnonzero(counts)[-1]} is outside a codebook of {levels}")
    return counts[:levels]


def _steps(counts: Counts) -> Counts:
    """Nearest steps on a scale of eight steps per octave: 0..15 for these counts, 224 for 2^30 and more."""
    exponent = np.maximum(np.frexp(counts.astype(np.float64))[1] - 4, 0).astype(np.int64)  # of the lowest of four bits
    rounded = (counts + (1 << exponent >> 1)) >> exponent
    steps: Counts = np.minimum(8 * exponent + rounded, 255 - SKIP + 1)
    return steps


def _frequency(steps: Counts) -> Counts:
    """Counts that steps represent."""
    return np.where(steps < 8, steps, (8 + steps % 8) << np.maximum(steps // 8 - 1, 0))


def _table(steps: Counts) -> bytes:
    """One byte per code in use, SKIP - 1 + step, and one per run of up to SKIP unused codes, length - 1."""
    table, at = bytearray(), 0
    for code in [*np.flatnonzero(steps).tolist(), len(steps)]:
        whole, rest = divmod(code - at, SKIP)
        table += bytes([SKIP - 1]) * whole + bytes([rest - 1] * (rest > 0))
        if code < len(steps):
            table.append(SKIP - 1 + int(steps[code]))
        at = code + 1
    return bytes(table)


def _read_table(data: memoryview, levels: int) -> tuple[Counts, int]:
    """Steps of all codes, and the position after the table."""
    steps, code, at = np.zeros(levels, np.int64), 0, 1
    for byte in data[1 : 1 + levels]:
        at += 1
        if byte < SKIP:
            code += byte + 1
        else:
            steps[code] = byte - SKIP + 1
            code += 1
        if code >= levels:
            break
    if code != levels or not steps.any():
        raise ValueError(f"the range coder's table does not contain frequencies of {levels} codes")
    return steps, at


def _gaps(symbols: NDArray[np.uint8], frequent: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int32]] | None:
    """Positions of the other codes, and the digits of the gaps before them; None if plain codes are faster."""
    n = len(symbols)
    if DENSEST * (n - count) > n:
        return None
    where = np.flatnonzero(symbols != frequent)
    more, last = np.divmod(np.diff(where, prepend=-1) - 1, LONGEST)
    ends = np.cumsum(more + 1)
    total = int(ends[-1]) if len(ends) else 0
    if DENSEST * total > n:
        return None
    digits = np.full(total, LONGEST, np.int32)
    digits[ends - 1] = last
    return where, digits


def _ranks(symbols: NDArray[np.uint8], used: Counts) -> NDArray[np.int32]:
    """Indices of codes among those in use."""
    ranks = np.zeros(256, np.int32)
    ranks[used] = np.arange(len(used))
    # no index is out of bounds; "clip" skips the check
    return np.take(ranks, symbols, mode="clip")


def _scaled(shares: Counts) -> Counts:
    """f_i = 1 + floor(s_i (WHOLE - m) / sum s) for m shares s; the largest also gets the remainder to WHOLE."""
    scaled: Counts = 1 + shares * (WHOLE - len(shares)) // shares.sum()
    scaled[shares.argmax()] += WHOLE - scaled.sum()
    return scaled


def _geometric(shares: Counts, top: int) -> Counts:
    """Frequencies of digits: f_k = 1 + floor(r_k others / all), r_(k+1) = r_k + 1 - f_k; the last is 1 + r."""
    whole = int(shares.sum())
    others, left, parts = whole - int(shares[top]), WHOLE - LONGEST - 1, []
    for _ in range(LONGEST):
        parts.append(left * others // whole)
        left -= parts[-1]
    return 1 + np.array([*parts, left])


def _model(frequencies: Counts) -> object:
    """Model of exactly these frequencies: constriction scales its input to a sum of WHOLE - m and adds 1 to each."""
    return constriction.stream.model.Categorical((frequencies - 1).astype(np.float64), perfect=False)


def _read_plain(stack: Any, n: int, used: Counts, shares: Counts) -> NDArray[np.uint8]:
    ranks: NDArray[np.int32] = stack.decode(_model(_scaled(shares)), n)
    return np.take(used.astype(np.uint8), ranks, mode="clip")


def _read_gaps(stack: Any, digits: int, n: int, used: Counts, shares: Counts) -> NDArray[np.uint8]:
    top = int(shares.argmax())
    codes = np.full(n, used[top], np.uint8)
    if not digits:
        return codes
    decoded = stack.decode(_model(_geometric(shares, top)), digits)
    ends = decoded < LONGEST
    where = np.cumsum(decoded + ends, dtype=np.int64)
    if not ends[-1] or where[-1] > n:
        raise ValueError("the range coder's gaps extend beyond the last code")
    where = where[ends] - 1
    others, rest = np.delete(used, top).astype(np.uint8), np.delete(shares, top)
    values = stack.decode(_model(_scaled(rest)), len(where)) if len(rest) > 1 else np.zeros(len(where), np.int32)
    codes[where] = np.take(others, values, mode="clip")
    return codes
