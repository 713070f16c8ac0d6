"""Zstd and Range: exact round trips, small sizes, refused bytes."""

import pytest
import torch
import zstandard

from fedshift import Range, Uniform, Zstd

CODERS = [Zstd(), Zstd(19), Range()]


def uniform_codes(bits: int, n: int = 50_000) -> torch.Tensor:
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    return Uniform(bits).encode(x)[0][0]


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_round_trip(coder: Zstd | Range, bits: int) -> None:
    for n in (0, 1, 2, 9, 1000):
        codes = torch.randint(0, 2**bits, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
        assert torch.equal(coder.decode(coder.encode(codes, 2**bits), n, 2**bits), codes)
        same = torch.full((n,), 2**bits - 1, dtype=torch.uint8)
        assert torch.equal(coder.decode(coder.encode(same, 2**bits), n, 2**bits), same)
    assert coder.size(1000, 2**bits) is None


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("levels", [1, 3, 5, 7, 9, 15, 17, 33, 65, 127, 129, 255])
def test_alphabets_of_any_size(coder: Zstd | Range, levels: int) -> None:
    """The codes of a larger alphabet with the same number of bits are refused if one of them is not below `levels`."""
    codes = torch.randint(0, levels, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(levels))
    data = coder.encode(codes, levels)
    assert len(data) <= coder.most(500, levels)
    assert torch.equal(coder.decode(data, 500, levels), codes)
    codes[7] = levels
    larger = 2 ** max(1, (levels - 1).bit_length())
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        coder.decode(coder.encode(codes, larger), 500, levels)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_zstd_compresses_uniform_codes(bits: int) -> None:
    codes = uniform_codes(bits, 500_000)
    assert len(Zstd().encode(codes, 2**bits)) < 0.85 * len(codes) * bits / 8


def test_a_zstd_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    with pytest.raises(ValueError, match="100000000 bytes instead of 10"):
        Zstd().decode(bomb, 10, 256)
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100_000_000))
    with pytest.raises(ValueError, match="instead of 10"):
        Zstd().decode(unknown, 10, 256)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("data", [b"", b"\x00", b"not a frame at all", bytes(100)])
def test_bytes_of_another_format_are_refused(coder: Zstd | Range, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"zstd|range-coded|range coder|the bits after|codes of 3 bits"):
        coder.decode(data, 10, 8)


def test_a_code_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="code 9 is outside a codebook of 8"):
        Zstd().decode(zstandard.ZstdCompressor().compress(bytes([1, 9])), 2, 8)


def test_bad_levels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Zstd\(level=23\): level must be between 1 and 22"):
        Zstd(23)
