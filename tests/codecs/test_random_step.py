"""RandomStep: hand-worked codes, the requested rate, no bias, the same codes alone and in a stack."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift import Codec, RandomStep, Range, WireError, pack, unpack
from fedshift.core import rng
from tests.codecs.test_step import LOST, ROWS, entropy, sample
from tests.fuzz import mend


def test_hand_worked_codes() -> None:
    """A step of 2 and draws u: k = l + 1 if u < |x| / 2 - l."""
    x, key = torch.tensor([[1.0, -1.0, 3.0, -5.0, 4.0, 0.0, 0.2, -0.2]]), torch.tensor([3])
    quantizer, rates = RandomStep(), torch.linspace(0.5, 3.0, 400, dtype=torch.float64)
    steps = [float(quantizer.encode(x, key, rate[None])[1]) for rate in rates]
    at = min(range(len(steps)), key=lambda i: abs(steps[i] - 2))
    codes, side = quantizer.encode(x, key, rates[at : at + 1])
    step = float(side)
    assert step == pytest.approx(2, rel=0.05)
    up = (rng.uniform(key, 8)[0] < torch.tensor([1.0, 1, 3, 5, 4, 0, 0.2, 0.2]) / step % 1).tolist()
    k = [int(size // step) + bump for size, bump in zip([1.0, 1, 3, 5, 4, 0, 0.2, 0.2], up, strict=True)]
    signs = [1, -1, 1, -1, 1, 1, 1, -1]
    assert codes.tolist() == [[0 if n == 0 else 2 * n - (s > 0) for n, s in zip(k, signs, strict=True)]]
    decoded = quantizer.decode(codes, side)[0].tolist()
    assert decoded == pytest.approx([s * n * step for n, s in zip(k, signs, strict=True)])


@pytest.mark.parametrize("kind", ["gauss", "laplace", "heavy"])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 1.0, 2.0, 4.0])
def test_a_rate_is_the_entropy_of_the_codes(kind: str, rate: float) -> None:
    x = sample(kind, 200_000, seed=int(100 * rate))
    codes, _ = RandomStep(rate=rate).encode(x, torch.tensor([1]))
    drawn = 4 / math.sqrt(int((codes > 0).sum()))  # four standard deviations of the number of codes that are not zero
    assert entropy(codes) == pytest.approx(rate, rel=0.01 + drawn)


def test_a_rate_holds_for_values_of_one_sign() -> None:
    x = sample("laplace", 100_000, seed=1).abs()
    assert entropy(RandomStep(rate=1.0).encode(x, torch.tensor([1]))[0]) == pytest.approx(1.0, rel=0.015)


@given(ROWS, st.sampled_from([0.05, 0.5, 3.0]), st.integers(4, 8))
def test_no_value_is_further_from_its_level_than_a_step(row: np.ndarray, rate: float, bits: int) -> None:
    x = torch.from_numpy(row)
    if rate > bits - 1:
        return
    quantizer = RandomStep(bits, rate)
    codes, side = quantizer.encode(x, torch.arange(len(x)))
    lost = (quantizer.decode(codes, side).double() - x.double()).abs()
    assert (lost <= side.double() * (1 + 2**-9) + LOST).all()
    assert int(codes.max()) < quantizer.levels(x.shape[1])


def test_the_mean_of_many_draws_is_the_value() -> None:
    """Within five standard deviations of the mean of 4,000 draws, for all values of a row, also the largest."""
    row = sample("heavy", 50, seed=2)
    x = row.expand(4000, -1)
    codes, side = RandomStep(rate=0.6).encode(x, torch.arange(4000))
    step = float(side[0])
    part = row[0].abs() / step % 1
    spread = step * (part * (1 - part) / 4000).sqrt()
    off = (RandomStep().decode(codes, side).double().mean(0) - row[0]).abs()
    assert (off <= 5 * spread + 1e-6 * step).all()


def test_a_row_is_coded_alike_alone_and_in_a_stack() -> None:
    stack = torch.cat([sample(kind, 20_011, seed) for seed, kind in enumerate(("gauss", "laplace", "heavy"))])
    key = torch.tensor([4, 5, 6])
    codes, side = RandomStep(rate=0.4).encode(stack, key)
    for r in range(3):
        row_codes, alone = RandomStep(rate=0.4).encode(stack[r : r + 1], key[r : r + 1])
        assert torch.equal(row_codes[0], codes[r])
        assert torch.equal(alone[0], side[r])


@pytest.mark.parametrize("how", [{"rate": 0.05}, {"rate": 0.8}, {"rate": 3.0}, {"bits": 4, "rate": 1.0}])
def test_many_short_rows_are_coded_like_each_alone(how: dict[str, Any]) -> None:
    """The steps of many rows are found together with torch, those of a few one by one with NumPy."""
    normal = torch.randn(60, 50, generator=torch.Generator().manual_seed(7))
    x = torch.cat([normal, normal**5, normal + 3, normal * (normal > 1), (normal * 2).round(), 0 * normal])
    quantizer, key = RandomStep(**how), torch.arange(len(x))
    codes, side = quantizer.encode(x, key)
    for r in range(len(x)):
        row_codes, alone = quantizer.encode(x[r : r + 1], key[r : r + 1])
        assert torch.equal(row_codes[0], codes[r])
        assert torch.equal(alone[0], side[r])


def test_clients_with_different_rates_are_one_stack() -> None:
    x = torch.cat([sample("laplace", 30_000, seed) for seed in (1, 2)])
    assert RandomStep(rate=0.3).stack == RandomStep(rate=1.2).stack
    codes, _ = RandomStep(rate=0.3).encode(x, torch.tensor([1, 2]), torch.tensor([0.3, 1.2], dtype=torch.float64))
    assert [entropy(codes[r]) for r in (0, 1)] == pytest.approx([0.3, 1.2], rel=0.03)


def test_zeros_and_constants() -> None:
    x = torch.tensor([[0.0] * 6, [3.0] * 6])
    for rate in (0.05, 0.5, 2.0):
        codes, side = RandomStep(rate=rate).encode(x, torch.tensor([1, 2]))
        decoded = RandomStep().decode(codes, side)
        assert torch.equal(decoded[0], x[0])
        assert ((decoded[1] == 0) | (decoded[1] >= 3 * (1 - 2**-9))).all()


def test_an_outlier_increases_the_step_and_is_not_clipped() -> None:
    x = torch.zeros(1, 1_000_000)
    x[0, 7], x[0, 8] = 1.0, 0.01
    codes, side = RandomStep(4, rate=3.0).encode(x, torch.tensor([1]))
    assert float(side) >= 1 / 7
    assert abs(float(RandomStep(4, rate=3.0).decode(codes, side)[0, 7]) - 1) <= float(side)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"bits": 1}, r"RandomStep\(bits=1\): bits must be between 2 and 8"),
        ({"bits": 9}, r"RandomStep\(bits=9\): bits must be between 1 and 8"),
        ({"rate": 0.0}, r"RandomStep\(rate=0.0\): rate must be between 0.001 and 7 bits per value"),
        ({"rate": math.nan}, r"RandomStep\(rate=nan\)"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RandomStep(**given)


@pytest.mark.parametrize("rate", [0.001, 0.3, 6.0])
def test_a_row_of_one_value_is_coded_without_error(rate: float) -> None:
    x = torch.tensor([[1.0], [-0.3], [0.0], [2.0**100]])
    codes, side = RandomStep(rate=rate).encode(x, torch.arange(4))
    assert codes.tolist() == [[1], [2], [0], [1]]
    assert torch.equal(RandomStep(rate=rate).decode(codes, side), x)
    many = torch.randn(8, 1)  # more rows than are encoded one by one
    assert torch.equal(RandomStep(rate=rate).decode(*RandomStep(rate=rate).encode(many, torch.arange(8))), many)
    assert RandomStep(rate=rate).encode(torch.tensor([[1e-44]]), torch.tensor([1]))[1].item() == 0.0


@pytest.mark.parametrize("rate", [0.001, 0.8])
def test_the_largest_values_have_finite_steps(rate: float) -> None:
    x = torch.cat([torch.full((1, 5000), 1.5 * 2.0**103), torch.zeros(1, 5000)]).repeat(4, 1)
    for rows in (x[:1], x):
        codes, side = RandomStep(rate=rate).encode(rows, torch.arange(len(rows)))
        assert side.isfinite().all()
        assert RandomStep(rate=rate).decode(codes, side).isfinite().all()


def test_nan_infinity_huge_numbers_and_a_missing_key_are_refused() -> None:
    for bad, problem in ((math.nan, "NaN or infinity"), (math.inf, "NaN or infinity"), (1e32, "beyond 2\\^104")):
        with pytest.raises(ValueError, match=problem):
            RandomStep().encode(torch.tensor([[1.0, bad]]), torch.tensor([1]))
    with pytest.raises(ValueError, match="RandomStep rounds at random and needs a key"):
        RandomStep().encode(torch.ones(1, 2))


def test_a_frame_with_a_nan_or_infinite_step_is_refused() -> None:
    params, key = {"w": sample("laplace", 4000, seed=5).view(40, 100)}, rng.key(0, "upload")
    frame = pack(Codec(RandomStep(), Range()), params, key=key)
    sizes = unpack(frame, like=params)["w"].abs()
    step = sizes[sizes > 0].min().numpy().tobytes()
    for bad in (math.nan, math.inf, 3e38):
        hostile = bytearray(frame)
        at = hostile.index(step)
        hostile[at : at + 4] = np.float32(bad).tobytes()
        with pytest.raises(WireError, match="w: contains NaN, infinity or a number too large"):
            unpack(mend(bytes(hostile)), like=params)


@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37, 1e-34, 1e-30])
def test_tiny_values_are_coded_or_become_zero(size: float) -> None:
    params = {"w": torch.randn(5, 4, generator=torch.Generator().manual_seed(8)) * size, "c": torch.full((2, 3), size)}
    frame = pack(Codec(RandomStep(rate=0.6), Range()), params, key=rng.key(0, "upload"))
    decoded = unpack(frame, like=params)
    assert all(x.isfinite().all() for x in decoded.values())
