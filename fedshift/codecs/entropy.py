"""Coders that spend fewer bits on frequent codes.

What they look at matters. Codes of 3, 5, 6 or 7 bits stay one a byte: packing would smear them over
byte borders and hide the very statistics a coder lives on (5 bit: zstd reaches 3.9 bits a code, 4.7
after packing). Codes of 1, 2 or 4 bits are packed first: a byte of them is a symbol of its own, and
zstd, which spends no less than one bit a symbol, gets nearer to their entropy (4 bit: 2.4, not 3.0).
"""

import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.bitpack import BitPack
from fedshift.extras import needs

# A block of Zstandard may bring decoding tables of its own, which cost more than a few bytes do. Its encoder makes
# a block of up to 128 KB, or at most 196 of it: one for 668 bytes.
LEAST_BLOCK = 512
RLE, RESERVED = 1, 3  # kinds of blocks


@dataclass(frozen=True)
class Zstd:
    """Zstandard, levels 1 to 22: quick both ways, 20 to 40 % off uniform codes, little off K-means codes.

    >>> codes = torch.zeros(1000, dtype=torch.uint8)
    >>> len(Zstd().encode(codes, bits=4)) < 30
    True
    """

    level: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 22:
            raise ValueError(f"Zstd(level={self.level}): level must be between 1 and 22")

    def encode(self, codes: Tensor, bits: int) -> bytes:
        whole = BitPack().encode(codes, bits if 8 % bits == 0 else 8)
        return zstandard.ZstdCompressor(level=self.level).compress(whole)

    def decode(self, data: bytes | memoryview, n: int, bits: int) -> Tensor:
        try:
            # The size is checked first, because zstd allocates whatever a frame claims to hold.
            width = bits if 8 % bits == 0 else 8
            claimed, expected = zstandard.get_frame_parameters(data).content_size, BitPack().size(n, width)
            if claimed != expected:
                raise ValueError(f"a zstd frame of {claimed} bytes where {expected} are expected")
            _check_blocks(memoryview(data), 1 + expected // LEAST_BLOCK)
            whole = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
                data, max_output_size=expected, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise ValueError(f"not a zstd frame: {error}") from None
        return _below(BitPack().decode(whole, n, width), bits)

    def size(self, n: int, bits: int) -> None:
        return None

    def most(self, n: int, bits: int) -> int:
        """ZSTD_COMPRESSBOUND of its content."""
        content = BitPack().size(n, bits if 8 % bits == 0 else 8)
        return content + (content >> 8) + (max(0, (128 << 10) - content) >> 11)

    def estimate(self, counts: Tensor, bits: int) -> None:
        return None


@dataclass(frozen=True)
class Range:
    """A range coder over the codes' own frequencies: within 1 % of their entropy, slower than Zstd.

    Needs the package constriction. The bytes: how often each code occurs, scaled to 16 bits
    (2^bits numbers, two bytes each), then the 32-bit words of the range coder.

    >>> codes = torch.tensor([0] * 999 + [3], dtype=torch.uint8)
    >>> len(Range().encode(codes, bits=2))  # packed: 250
    12
    """

    def __post_init__(self) -> None:
        _constriction()  # a missing package is reported before a run, not in it

    def encode(self, codes: Tensor, bits: int) -> bytes:
        symbols = codes.cpu().numpy()
        counts = np.bincount(symbols, minlength=2**bits)
        scaled = -(-counts * 65535 // max(1, len(symbols))).astype("<u2")  # rounded up: none becomes zero
        encoder = _constriction().stream.queue.RangeEncoder()
        encoder.encode(symbols.astype(np.int32), _model(scaled))
        words: NDArray[np.uint32] = encoder.get_compressed()
        return bytes(scaled.tobytes() + words.astype("<u4").tobytes())

    def decode(self, data: bytes | memoryview, n: int, bits: int) -> Tensor:
        head = 2 * 2**bits
        if len(data) < head or (len(data) - head) % 4:
            raise ValueError(f"{len(data)} bytes, which is not a table of {2**bits} frequencies and 32-bit words")
        scaled = np.frombuffer(data, "<u2", 2**bits)
        if not scaled.any():
            raise ValueError("no code has a frequency above zero")
        words = np.frombuffer(data, "<u4", offset=head).astype(np.uint32)
        try:
            decoder = _constriction().stream.queue.RangeDecoder(words)
            symbols = decoder.decode(_model(scaled), n)
            if not decoder.maybe_exhausted():
                raise ValueError("words are left after the last code")
        except (AssertionError, ValueError) as error:
            raise ValueError(f"not a range-coded row: {error}") from None
        return _below(torch.from_numpy(symbols.astype(np.uint8)), bits)

    def size(self, n: int, bits: int) -> None:
        return None

    def most(self, n: int, bits: int) -> int:
        """The table, the codes at `bits` bits each, a sixteenth for rounded frequencies, and the last words."""
        packed = BitPack().size(n, bits)
        return (2 << bits) + packed + packed // 16 + 16

    def estimate(self, counts: Tensor, bits: int) -> Tensor:
        """The table, and the entropy sum_q c_q log2(n / c_q) in whole 32-bit words.

        >>> Range().estimate(torch.tensor([[999, 0, 0, 1], [250, 250, 250, 250]]), bits=2)
        tensor([ 12., 260.], dtype=torch.float64)
        """
        c = counts.double()
        n = c.sum(-1)
        entropy = (torch.xlogy(n, n) - torch.xlogy(c, c).sum(-1)) / math.log(2)
        return (2 << bits) + 4 * torch.ceil(entropy.clamp(min=0) / 32)


def _check_blocks(data: memoryview, most: int) -> None:
    """Refuse a Zstandard frame of more blocks than its encoder makes, by their headers alone."""
    at = zstandard.frame_header_size(data)
    for _ in range(most):
        head = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = head & 1, head >> 1 & 3, head >> 3
        at += 3 + (1 if kind == RLE else size)
        if kind == RESERVED or at > len(data):
            raise ValueError("a zstd block runs beyond its frame or is of no known kind")
        if last:
            return
    raise ValueError(f"a zstd frame of more than {most} blocks, which no encoder makes")


def _below(codes: Tensor, bits: int) -> Tensor:
    if len(codes) and (highest := int(codes.max())) >= 1 << bits:
        raise ValueError(f"code {highest} does not fit {bits} bits")
    return codes


def _constriction() -> ModuleType:
    try:
        import constriction
    except ImportError:
        raise ModuleNotFoundError(f"the range coder {needs('constriction')}") from None
    module: ModuleType = constriction
    return module


def _model(scaled: NDArray[np.uint16]) -> object:
    return _constriction().stream.model.Categorical(scaled.astype(np.float32), perfect=False)
