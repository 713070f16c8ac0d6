"""The range coder: size close to the entropy, format as in docs/wire.md, refused bytes."""

import hashlib
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift import BitPack, Range, Zstd
from fedshift.codecs.base import Coder
from tests.page_reader import WHOLE, range_decoded

Floats = NDArray[np.float64]


def drawn(share: Floats, n: int, seed: int = 0) -> Tensor:
    """n independent codes."""
    picked = np.random.default_rng(seed).choice(len(share), n, p=share / share.sum())
    return torch.from_numpy(picked.astype(np.uint8))


def steps(rate: float, bits: int = 8) -> Floats:
    """Shares of the codes of a uniform step with this entropy: p_q proportional to r^|q - middle|."""
    distance = abs(np.arange(2**bits) - 2 ** (bits - 1))
    low, high = 0.0, 1.0
    share = np.ones(2**bits)
    for _ in range(50):
        r = (low + high) / 2
        share = r**distance / (r**distance).sum()
        low, high = (r, high) if entropy(share) < rate else (low, r)
    return share


def entropy(counts: NDArray[np.int64] | Floats) -> float:
    """Bits per code, order 0."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def counts_of(codes: Tensor, bits: int = 8) -> Tensor:
    return torch.bincount(codes, minlength=2**bits)


def distributions(n: int) -> Iterator[tuple[int, Tensor]]:
    """(bits, codes): typical codes of quantizers, and unusual ones."""
    for rate in (0.001, 0.02, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        yield 8, drawn(steps(rate), n)
    for zeros in (0.5, 0.66, 0.67, 0.95, 0.99):
        yield 2, drawn(np.array([(1 - zeros) / 2, zeros, (1 - zeros) / 2]), n)
        yield 1, drawn(np.array([zeros, 1 - zeros]), n)
        yield 8, drawn(np.eye(256)[[3, 250]].T @ [zeros, 1 - zeros], n)  # two codes far apart
    for bits in range(1, 9):
        yield bits, drawn(np.ones(2**bits), n)
        yield bits, torch.full((n,), 2**bits - 1, dtype=torch.uint8)
        yield bits, drawn(0.5 ** np.arange(2**bits), n)
    scattered = np.zeros(256)
    scattered[6::13] = 1  # 20 codes, a gap before each
    yield 8, drawn(scattered, n)
    yield 8, drawn(scattered * 0.6 ** np.arange(256), n)
    yield 8, drawn(np.arange(256.0), n)
    yield 8, torch.sort(drawn(steps(0.5), n)).values
    yield 4, torch.sort(drawn(steps(1.0, 4), n), descending=True).values
    weights = torch.randn(n // 4 + 1, generator=torch.Generator().manual_seed(0))
    yield 8, weights.view(torch.uint8)[:n]


@pytest.mark.parametrize("n", [1, 2, 10, 640, 10_000, 300_001])
def test_decoding_is_exact_and_the_size_is_within_one_percent_and_64_bytes_of_the_entropy(n: int) -> None:
    for bits, codes in distributions(n):
        data = Range().encode(codes, 2**bits)
        assert torch.equal(Range().decode(data, n, 2**bits), codes)
        counts = counts_of(codes, bits).numpy()
        table = 2 * max(0, int((counts > 0).sum()) - 20)  # 64 bytes include the table of 20 codes
        assert len(data) <= 1.01 * n * entropy(counts) / 8 + 64 + table
        assert len(data) <= Range().most(n, 2**bits) == 1 + BitPack().size(n, 2**bits)


def test_every_small_tensor_is_decoded_exactly() -> None:
    draw = np.random.default_rng(0)
    for n in range(400):
        codes = torch.from_numpy(np.where(draw.random(n) < draw.random(), draw.integers(0, 16, n), 3).astype(np.uint8))
        data = Range().encode(codes, 16)
        assert torch.equal(Range().decode(memoryview(data), n, 16), codes)
        same = torch.full((n,), 3, dtype=torch.uint8)
        assert torch.equal(Range().decode(Range().encode(same, 16), n, 16), same)


@pytest.mark.parametrize("n", [10_000, 80_000, 500_000])
def test_estimates_are_within_one_percent(n: int) -> None:
    cases = [drawn(steps(rate), n) for rate in (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.3, 1.6, 2.0, 3.0, 4.0, 5.0, 6.0)]
    cases += [drawn(np.ones(256), n), drawn(np.array([0.02, 0.96, 0.02]), n), drawn(np.array([0.5, 0.5]), n)]
    lengths = [len(Range().encode(codes, 256)) for codes in cases]
    estimates = Range().estimate(torch.stack([counts_of(codes) for codes in cases]))
    assert estimates.tolist() == pytest.approx(lengths, rel=0.01)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_estimates_take_stacks_of_counts_of_any_integer_type(kind: torch.dtype) -> None:
    counts = torch.tensor([[[100, 1, 2, 0], [0, 0, 0, 0]], [[0, 0, 9, 0], [25, 25, 25, 26]]], dtype=kind)
    packed = BitPack().estimate(counts)
    assert packed.tolist() == [[26, 0], [3, 26]]
    estimate = Range().estimate(counts)
    assert (estimate.dtype, estimate.shape) == (torch.float64, (2, 2))
    assert estimate[0, 0] < 16
    assert estimate.flatten()[1:].tolist() == [1, 4, 27]  # packed codes, and one byte for their kind
    other: Coder = Zstd()
    assert other.estimate(counts) is None


@pytest.mark.parametrize("bits", range(1, 9))
def test_estimates_of_packed_codes_are_exact(bits: int) -> None:
    for n in (0, 1, 7, 8, 1001):
        codes = drawn(np.ones(2**bits), n)
        assert float(BitPack().estimate(counts_of(codes, bits))) == len(BitPack().encode(codes, 2**bits))


def test_a_decoder_written_from_the_specification_gives_the_same_codes() -> None:
    kinds = set()
    for bits, codes in distributions(3000):
        data = Range().encode(codes, 2**bits)
        kinds.add(data[0])
        assert range_decoded(data, 3000, 2**bits).tolist() == codes.tolist()
    assert kinds == {0, 1, 2}


def test_the_example_of_the_specification() -> None:
    """39 zeros and, after five of them, a 3.

    Counts 39 and 1 become levels 26 (40) and 1. A gap of 5 has the frequency 1 + 361672 and 1948597 below it:
    2^24 = 46 * 361673 + 140258, so the state is 46 * 2^24 + 1948597 + 140258 = 0x2e1fdf97.
    """
    codes = torch.zeros(40, dtype=torch.uint8)
    codes[5] = 3
    data = bytes.fromhex("02 390120 01 97df1f2e")
    assert Range().encode(codes, 4) == data
    assert torch.equal(Range().decode(data, 40, 4), codes)
    assert range_decoded(data, 40, 4).tolist() == codes.tolist()


def test_the_bytes_are_the_same_on_every_machine() -> None:
    """Codes of integers alone: 3 % of seven others, products of two numbers below 16, and uniform ones."""
    mixed = np.arange(1, 20_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)
    low, high = (mixed % 1000).astype(int), (mixed // 1000).astype(int)
    cases = np.where(low < 30, 100 + low % 7, 128), low % 16 * (high % 16), low % 256, np.full(20_000, 5)
    frames = [Range().encode(torch.from_numpy(codes.astype(np.uint8)), 256) for codes in cases]
    assert [frame[0] for frame in frames] == [2, 1, 0, 2]
    assert [hashlib.sha256(frame).hexdigest()[:8] for frame in frames] == [
        "9e856318",
        "0695eae9",
        "95a0cdc8",
        "bb71f2f6",
    ]


SPARSE, DENSE = drawn(steps(0.3), 2000), drawn(steps(3.0), 2000)


@pytest.mark.parametrize("codes", [SPARSE, DENSE, drawn(np.ones(256), 50)])
def test_damaged_bytes_are_refused(codes: Tensor) -> None:
    data, n = Range().encode(codes, 256), len(codes)
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            Range().decode(data[:end], n, 256)
    for extra in (b"\0", b"\1", bytes(4), b"\1\0\0\0", data):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            Range().decode(data + extra, n, 256)
    for at in range(len(data)) if data[0] else (0,):  # packed codes have no redundancy to check
        for bit in range(8):
            with pytest.raises(ValueError, match=r"^[^\n]+$"):
                Range().decode(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], n, 256)


STATE = WHOLE.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "range-coded codes are missing"),
        (b"\x03", "kind 3 of 40 range-coded codes"),
        (b"\x02", "table"),
        (b"\x02\x39\x01", "table does not contain frequencies of 4 codes"),
        (b"\x02\x03\x00" + STATE, "table does not contain frequencies of 4 codes"),  # none in use
        (b"\x02\x39\x03\x00" + STATE, "table does not contain frequencies of 4 codes"),  # beyond the last code
        (b"\x02\x39\x00\x01\x00" + STATE, "frequencies do not match its codes"),  # skips not in one byte
        (b"\x02\x39\x02", "number of digits is truncated"),
        (b"\x02\x39\x02\x80\x00" + STATE, "not in its shortest form"),
        (b"\x02\x39\x02" + b"\xff" * 9, "number of digits is truncated"),
        (b"\x02\x39\x02\x00", "state is missing"),
        (b"\x02\x39\x02\x00" + STATE + b"\0", "ends with zero bytes"),
        (b"\x02\x39\x02\x01" + STATE, "1 digits of gaps for 40 codes, 1 of them distinct"),
        (b"\x01\x39\x02" + STATE, "0 digits of gaps for 40 codes, 1 of them distinct"),
        (b"\x02\x39\x01\x20\x0e" + STATE, "14 digits of gaps for 40 codes, 2 of them distinct"),
        (b"\x02\x39\x01\x20" + b"\xff" * 8 + b"\x7f" + STATE, "digits of gaps for 40 codes"),  # 2^63 - 1
        (b"\x02\x39\x01\x20\x01" + b"\xff" * 8, "gaps extend beyond the last code"),
        (b"\x02\x3a\x02\x00" + STATE, "frequencies do not match its codes"),
        (b"\x02\x39\x01\x20\x00" + STATE, "frequencies do not match its codes"),
        (b"\x02\x39\x02\x00" + b"\x01" * 5, "does not end with the last code"),
        (bytes(12), "12 bytes|11 bytes"),
    ],
)
def test_bytes_that_no_encoder_writes_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Range().decode(data, 40, 4)


def test_codes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="code 9 is outside a codebook of 8"):
        Range().encode(torch.tensor([1, 9], dtype=torch.uint8), 8)
    with pytest.raises(ValueError, match="kind 2 of 0 range-coded codes"):
        Range().decode(b"\x02\x39\x02\x00" + STATE, 0, 4)


def test_random_bytes_are_refused_or_are_codes() -> None:
    draw = np.random.default_rng(0)
    for _ in range(3000):
        data = bytes([draw.integers(0, 3)]) + draw.bytes(int(draw.integers(0, 40)))
        try:
            codes = Range().decode(data, 60, 8)
        except ValueError:
            continue
        assert len(codes) == 60
        assert int(codes.max()) < 8


def test_decoding_takes_a_small_multiple_of_the_codes_in_memory() -> None:
    n = 600_000
    third = torch.full((n,), 7, dtype=torch.uint8)
    third[2::3] = drawn(np.ones(256), n // 3)
    for codes in (third, drawn(steps(6.0), n), drawn(steps(0.1), n)):
        data = Range().encode(codes, 256)
        tracemalloc.start()
        Range().decode(data, n, 256)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 14 * n
