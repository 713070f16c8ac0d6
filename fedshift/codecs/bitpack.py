"""Packing of codes of 1 to 8 bits.

Code i takes bits i * b .. i * b + b - 1 of a little-endian bit stream, least significant first, so
eight codes take b bytes. Eight codes in a 64-bit word, one per byte, are packed in three steps:

    ....dddd....cccc....bbbb....aaaa  ->  ........ddddcccc........bbbbaaaa  ->  ddddccccbbbbaaaa
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs.base import Coder

Words = NDArray[np.uint64]
Packed = NDArray[np.uint8]

WORDS = 1 << 13  # words packed at a time, so that they stay in the cache


@dataclass(frozen=True)
class BitPack(Coder, number=0):
    """b bits per code, as many as the largest code needs: ceil(n * b / 8) bytes.

    >>> BitPack().encode(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), levels=16).hex(" ")
    '21 43 05'
    """

    def encode(self, codes: Tensor, levels: int) -> bytes:
        flat, bits = codes.cpu().numpy(), bits_for(levels)
        if bits == 8:
            return flat.tobytes()
        n = len(flat)
        if n % 8:
            flat = np.append(flat, np.zeros(-n % 8, np.uint8))
        words = flat.view("<u8")
        packed = np.empty((len(words), bits), np.uint8)
        for at in range(0, len(words), WORDS):
            packed[at : at + WORDS] = _fold(words[at : at + WORDS], bits).view(np.uint8).reshape(-1, 8)[:, :bits]
        return packed.tobytes()[: self.size(n, levels)]

    def decode(self, data: bytes | memoryview, n: int, levels: int) -> Tensor:
        bits = bits_for(levels)
        if len(data) != self.size(n, levels):
            raise ValueError(f"{len(data)} bytes instead of {self.size(n, levels)} for {n} codes of {bits} bits")
        codes = unpack(np.frombuffer(data, np.uint8), bits)
        if codes[n:].any():
            raise ValueError("the bits after the last code are not zero")
        found = torch.from_numpy(codes[:n])
        return found if levels == 1 << bits else below(found, levels)

    def size(self, n: int, levels: int) -> int:
        return (n * bits_for(levels) + 7) // 8

    def most(self, n: int, levels: int) -> int:
        return self.size(n, levels)

    def estimate(self, counts: Tensor) -> Tensor:
        return torch.ceil(counts.double().sum(-1) * bits_for(counts.shape[-1]) / 8)


def bits_for(levels: int) -> int:
    """Bits of a code below `levels`.

    >>> [bits_for(levels) for levels in (1, 2, 3, 4, 255, 256)]
    [1, 1, 2, 2, 8, 8]
    """
    return max(1, (levels - 1).bit_length())


def below(codes: Tensor, levels: int) -> Tensor:
    """Check that all codes are below `levels`."""
    if len(codes) and (highest := int(codes.max())) >= levels:
        raise ValueError(f"code {highest} is outside a codebook of {levels}")
    return codes


@cache
def _lanes(bits: int) -> list[tuple[int, np.uint64, np.uint64]]:
    """For each step: the distance by which the upper half of each pair of lanes moves, and the masks of both halves."""
    steps = []
    for codes in (1, 2, 4):  # codes that a lane contains so far
        lane = 8 * codes
        ones = (1 << (bits * codes)) - 1
        low = sum(ones << at for at in range(0, 64, 2 * lane))
        steps.append((lane - bits * codes, np.uint64(low), np.uint64(low << lane)))
    return steps


def _fold(words: Words, bits: int) -> Words:
    for shift, low, high in _lanes(bits):
        words = (words & low) | ((words & high) >> np.uint64(shift))
    return words


def unpack(packed: Packed, bits: int) -> NDArray[np.uint8]:
    """Packed bytes -> one code per byte, in groups of eight codes; missing bytes at the end count as zero."""
    if bits == 8:
        return packed.copy()
    groups = -(-len(packed) // bits)
    spread = np.zeros((groups, 8), np.uint8)
    full = len(packed) // bits
    spread[:full, :bits] = packed[: full * bits].reshape(full, bits)
    if full < groups:
        spread[full, : len(packed) - full * bits] = packed[full * bits :]
    words: Words = spread.reshape(-1).view("<u8")
    for shift, low, high in reversed(_lanes(bits)):
        words = (words & low) | ((words << np.uint64(shift)) & high)
    return words.view(np.uint8)


def reader(table: Tensor, bits: int) -> Callable[[Packed], Tensor]:
    """Function from packed bytes to values, table[code], for whole groups of eight codes of one row.

    Its result is valid until the next call. The 8, 4 or 2 values of a byte of 1-, 2- or 4-bit codes are looked up
    together.
    """
    table = torch.cat([table, table.new_zeros(2**bits - len(table))])
    if bits in (1, 2, 4):
        table = table[_codes_of_bytes(bits)]
    if bits == 4:  # two float32 are copied fastest as one 8-byte number
        table = table.view(torch.float64).flatten()
    index, values = torch.empty(0, dtype=torch.int32), table.new_empty(0)

    def look_up(packed: Packed) -> Tensor:
        nonlocal index, values
        codes = unpack(packed, bits) if 8 % bits else packed
        if len(index) != len(codes):
            index = torch.empty(len(codes), dtype=torch.int32)
            values = table.new_empty(len(codes), *table.shape[1:])
        index.numpy()[:] = codes
        return torch.index_select(table, 0, index, out=values).view(torch.float32).flatten()

    return look_up


@cache
def _codes_of_bytes(bits: int) -> Tensor:
    """Codes in each of the 256 bytes: int64 (256, 8 / bits)."""
    return torch.from_numpy(unpack(np.arange(256, dtype=np.uint8), bits).reshape(256, 8 // bits)).long()
