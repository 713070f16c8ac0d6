"""Normal, FixedCode and Hadamard: known levels, errors as published, orthonormal rotations, unbiased scales."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.codecs import Codec, FixedCode, Hadamard, Normal
from fedshift.codecs.normal import fixed_levels, normal_levels
from fedshift.codecs.rotation import LARGEST, block
from fedshift.core import rng
from fedshift.wire.writer import pack, unpack


@pytest.mark.parametrize(
    ("bits", "levels", "error"),
    [
        (1, [0.7979], 0.3634),
        (2, [0.4528, 1.5104], 0.1175),
        (3, [0.2451, 0.7560, 1.3439, 2.1519], 0.03454),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326], 0.009497),
    ],
)
def test_levels_and_errors_are_those_of_max(bits: int, levels: list[float], error: float) -> None:
    """Max, Quantizing for Minimum Distortion, 1960, table I."""
    assert normal_levels(bits)[2 ** (bits - 1) :] == pytest.approx(levels, abs=2e-4)
    x = torch.randn(1, 400_000, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(normal_levels(bits))[Normal(bits).encode(x)[0].int()]
    assert float((y - x).square().mean()) == pytest.approx(error, rel=0.02)


def test_levels_of_fedwsq() -> None:
    assert fixed_levels(1) == pytest.approx([-0.7979, 0.7979], abs=5e-5)
    assert fixed_levels(2) == pytest.approx([-1.224, 0, 0.7646, 1.7242], abs=1e-4)
    assert len(fixed_levels(4)) == 16
    assert fixed_levels(4)[7] == 0.0


@pytest.mark.parametrize("bits", range(1, 9))
def test_each_level_is_the_mean_of_its_values_and_zero_is_fixed(bits: int) -> None:
    for levels in (normal_levels(bits), fixed_levels(bits)):
        assert list(levels) == sorted(set(levels))
        c = np.array(levels)
        borders = [-math.inf, *((c[1:] + c[:-1]) / 2), math.inf]
        density = np.array([math.exp(-b * b / 2) / math.sqrt(2 * math.pi) for b in borders])
        below = np.array([math.erfc(-b / math.sqrt(2)) / 2 for b in borders])
        mean = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
        assert np.where(c == 0, 0, mean) == pytest.approx(c, abs=2e-5)


def test_levels_never_change() -> None:
    """Frames do not contain levels, so that another value would silently decode to another model."""
    levels = [level for bits in range(1, 9) for of in (normal_levels, fixed_levels) for level in of(bits)]
    exact = np.array(levels, np.float32)
    assert (exact * 65536 == np.rint(exact * 65536)).all()
    assert hashlib.sha256(exact.astype("<f4").tobytes()).hexdigest()[:16] == "a4387292bb836060"


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_projection_of_the_decoded_row_is_the_row(bits: int) -> None:
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(bits)) ** 3 * torch.tensor(
        [[1e-20], [1.0], [1e20]]
    )
    y = Normal(bits).decode(*Normal(bits).encode(x)).double()
    assert (x * y).sum(1) == pytest.approx(x.double().square().sum(1), rel=1e-5)


def test_numbers_that_the_outermost_level_would_enlarge_too_much_are_refused() -> None:
    with pytest.raises(ValueError, match="too large for Normal"):
        Normal(8).encode(torch.full((1, 9), 3e38))


def test_a_fixed_code_has_no_side_data() -> None:
    params = {"w": torch.randn(100, 80, generator=torch.Generator().manual_seed(0)) * 100}
    frame = pack(Codec(FixedCode(2)), params)
    assert 2000 <= len(frame) < 2040
    assert sorted(set(unpack(frame, like=params)["w"].flatten().tolist())) == list(fixed_levels(2))


@given(st.integers(1, 10**7))
def test_blocks_are_as_large_as_padding_allows(n: int) -> None:
    size = block(n)
    assert size & (size - 1) == 0
    assert 1 <= size <= LARGEST
    assert Hadamard().length(n) % size == 0
    assert Hadamard().length(n) - n <= n / 16
    assert all(-n % (size << more) > n / 16 for more in range(1, 16) if size << more <= LARGEST)


@pytest.mark.parametrize("n", [1, 2, 7, 48, 64, 1000, 4096, 70_000, 300_001])
def test_a_rotation_preserves_norms_and_products_and_is_inverted(n: int) -> None:
    g = torch.Generator().manual_seed(n)
    x, seeds = torch.randn(3, n, generator=g), torch.tensor([5, 5, (1 << 32) - 1])
    y = Hadamard().encode(x, seeds)
    assert y.shape == (3, Hadamard().length(n))
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    assert torch.allclose((y[0] * y[1]).sum(), (x[0] * x[1]).sum(), atol=1e-5 * n**0.5 * 10)
    assert torch.allclose(Hadamard().decode(y, seeds, n), x, atol=1e-5)


def test_the_matrix_is_that_of_walsh_and_hadamard() -> None:
    """Entry i, j is (-1)^(number of ones of i & j) / sqrt(n), times the sign of column j."""
    n, seeds = 64, torch.full((64,), 9)
    matrix = Hadamard().encode(torch.eye(n), seeds).T
    walsh = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / math.sqrt(n)
    assert torch.equal(matrix * matrix[0].sign(), walsh)


def test_signs_are_random_and_depend_on_the_seed() -> None:
    x = torch.ones(4, 1 << 20)
    y = Hadamard().encode(x, torch.tensor([0, 1, 2, 2]))
    assert torch.equal(y[2], y[3])
    back = [Hadamard().decode(y[:1], torch.tensor([seed]), 1 << 20)[0] for seed in (1, 2)]  # with signs of other seeds
    for z in (*back, y[0], y[1]):
        assert abs(float(z.mean())) < 5 / 1024


@pytest.mark.parametrize(("bits", "error"), [(1, math.pi / 2 - 1), (2, 0.1175 / 0.8825), (4, 0.009497 / 0.9905)])
def test_a_rotated_row_has_the_error_of_a_normal_one(bits: int, error: float) -> None:
    """With D the error of normal values, the unbiased scale has D / (1 - D) for any row: here 3 % are not zero."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 128, 256, generator=g) * (torch.rand(1, 128, 256, generator=g) < 0.03)
    codec = Codec(Normal(bits), transform=Hadamard())
    y = codec.decode(codec.encode(x, rng.key(0, "upload")[None]), 1, (128, 256))
    assert float((y - x).square().sum() / x.square().sum()) == pytest.approx(error, rel=0.03)


def test_the_largest_numbers_that_pass_the_checks_decode_to_finite_numbers() -> None:
    """Sums are scaled first: 2^15 equal values become one value that is 181 times as large."""
    n = LARGEST
    for largest in (3.4e38 / 181.1, 3.4e38 / 181):
        y = torch.full((1, n), largest)
        finite = Hadamard().decode(y, torch.tensor([0]), n).isfinite().all()
        assert finite or Hadamard().reach(largest, n) > torch.finfo(torch.float32).max
