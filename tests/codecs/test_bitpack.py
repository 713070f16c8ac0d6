"""Packing: the layout equals numpy.packbits, and decoding is exact."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift import BitPack
from fedshift.codecs.bitpack import bits_for, reader

BITS = range(1, 9)


def some(n: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


@given(st.integers(0, 300), st.integers(1, 8))
def test_layout_is_a_little_endian_bit_stream(n: int, bits: int) -> None:
    codes = some(n, bits)
    stream = np.unpackbits(codes.numpy()[:, None], axis=1, bitorder="little")[:, :bits]
    assert BitPack().encode(codes, 2**bits) == np.packbits(stream, bitorder="little").tobytes()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 70_001])
def test_round_trip_and_size(n: int, bits: int) -> None:
    codes = some(n, bits)
    data = BitPack().encode(codes, 2**bits)
    assert len(data) == BitPack().size(n, 2**bits) == (n * bits + 7) // 8
    assert torch.equal(BitPack().decode(data, n, 2**bits), codes)


@pytest.mark.parametrize("bits", BITS)
def test_reader_and_decode_give_the_same_values(bits: int) -> None:
    codes, table = some(1000, bits), torch.randn(2**bits)
    packed = np.frombuffer(BitPack().encode(codes, 2**bits), np.uint8)
    assert torch.equal(reader(table, bits)(packed)[:1000], table[codes.long()])


def test_wrong_lengths_and_stray_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="2 bytes instead of 3 for 5 codes of 4 bits"):
        BitPack().decode(b"\x00\x00", 5, 16)
    with pytest.raises(ValueError, match="after the last code"):
        BitPack().decode(b"\x00\x00\x10", 5, 16)


def test_codes_take_the_bits_of_the_largest_one() -> None:
    for levels in range(1, 257):
        bits = max(1, (levels - 1).bit_length())
        codes = torch.arange(levels, dtype=torch.uint8)
        data = BitPack().encode(codes, levels)
        assert bits_for(levels) == bits
        assert len(data) == BitPack().size(levels, levels) == (levels * bits + 7) // 8
        assert torch.equal(BitPack().decode(data, levels, levels), codes)
        if levels < 2**bits:
            over = BitPack().encode(torch.tensor([0, levels], dtype=torch.uint8), 2**bits)
            with pytest.raises(ValueError, match=f"code {levels} is outside a codebook of {levels}"):
                BitPack().decode(over, 2, levels)
