"""Uniform and Stochastic: hand-worked grids, exact ends, errors of at most half a step, unbiased rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedshift import Stochastic, Uniform
from fedshift.core import rng

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=FLOATS)
BITS = st.integers(1, 8)


def test_hand_worked_grid() -> None:
    """Range -1 .. 2, 2 bits: steps of 1; -0.4 is nearest to 0, 0.6 to 1."""
    codes, side = Uniform(2).encode(torch.tensor([[-1.0, -0.4, 0.6, 2.0]]))
    assert codes.tolist() == [[0, 1, 2, 3]]
    assert side.tolist() == [[-1.0, 2.0]]
    assert Uniform(2).decode(codes, side).tolist() == [[-1.0, 0.0, 1.0, 2.0]]


def test_rows_have_their_own_ranges() -> None:
    codes, side = Uniform(1).encode(torch.tensor([[0.0, 1.0], [10.0, 30.0]]))
    assert side.tolist() == [[0.0, 1.0], [10.0, 30.0]]
    assert Uniform(1).decode(codes, side).tolist() == [[0.0, 1.0], [10.0, 30.0]]


@given(ROWS, BITS)
def test_both_ends_are_exact_and_other_values_are_within_half_a_step(row: np.ndarray, bits: int) -> None:
    x = torch.from_numpy(row)
    y = Uniform(bits).decode(*Uniform(bits).encode(x))
    assert torch.equal(y.amin(1), x.amin(1))
    assert torch.equal(y.amax(1), x.amax(1))
    step = (x.double().amax(1) - x.double().amin(1)) / (2**bits - 1)
    rounding = 2.0**-22 * x.double().abs().amax(1) + 2.0**-149  # of float32 levels
    assert ((y.double() - x.double()).abs().amax(1) <= step / 2 * (1 + 1e-3) + rounding).all()


def test_the_maximum_is_exact_for_random_ranges() -> None:
    """q * scale + min in float32 differs from it for 15 to 20 % of these ranges."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 2, generator=g)
    for bits in (4, 8):
        y = Uniform(bits).decode(*Uniform(bits).encode(x))
        assert torch.equal(y.sort()[0], x.sort()[0])


@given(ROWS, BITS)
def test_quantizing_twice_changes_nothing(row: np.ndarray, bits: int) -> None:
    once = Uniform(bits).decode(*Uniform(bits).encode(torch.from_numpy(row)))
    assert torch.equal(Uniform(bits).decode(*Uniform(bits).encode(once)), once)


@pytest.mark.parametrize("values", [[-3.0e38, 0.0, 3.0e38], [0.0, 1e-45, 3e-45], [1.0, 1.0 + 2**-23, 1.0 + 2**-22]])
def test_ranges_that_float32_cannot_span(values: list[float]) -> None:
    x = torch.tensor([values])
    y = Uniform(8).decode(*Uniform(8).encode(x))
    assert y.isfinite().all()
    assert torch.equal(y[:, [0, -1]], x[:, [0, -1]])
    assert (y - x).abs().max() <= (x.double()[0, -1] - x.double()[0, 0]) / 255


@pytest.mark.parametrize("quantizer", [Uniform(4), Stochastic(4)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(quantizer: Uniform | Stochastic, bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantizer.encode(torch.tensor([[0.0, bad, 1.0]]), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"Uniform\(bits={bits}\): bits must be between 1 and 8"):
        Uniform(bits)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """The mean of many draws lies within five standard errors of the value."""
    draws = 20_000
    x = torch.tensor([-1.0, -0.73, -0.2, 0.0, 0.31, 0.77, 1.5]).expand(draws, 7)
    y = Stochastic(bits).decode(*Stochastic(bits).encode(x, rng.key(0, "test", torch.arange(draws)))).double()
    standard_error = y.std(0) / draws**0.5
    assert ((y.mean(0) - x[0].double()).abs() <= 5 * standard_error + 1e-6).all()
    assert torch.equal(y[:, [0, -1]].float(), x[:, [0, -1]])


@given(ROWS, BITS)
def test_stochastic_rounding_goes_to_a_neighbour(row: np.ndarray, bits: int) -> None:
    x, keys = torch.from_numpy(row), torch.arange(len(row))
    nearest, _ = Uniform(bits).encode(x)
    random, _ = Stochastic(bits).encode(x, keys)
    assert (nearest.int() - random.int()).abs().max() <= 1


def test_stochastic_draws_do_not_depend_on_the_stack() -> None:
    x, keys = torch.randn(5, 300_000, generator=torch.Generator().manual_seed(0)), torch.arange(5)
    stacked, _ = Stochastic(3).encode(x, keys)
    assert all(torch.equal(stacked[i], Stochastic(3).encode(x[i : i + 1], keys[i : i + 1])[0][0]) for i in range(5))


def test_stochastic_needs_a_key() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        Stochastic(4).encode(torch.zeros(1, 2))


def test_uniform_agrees_with_torch_up_to_its_integer_zero_point() -> None:
    x = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    low, high = float(x.min()), float(x.max())
    scale = (high - low) / 255
    ours = Uniform(8).decode(*Uniform(8).encode(x))
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255)
    assert (ours - theirs).abs().max() <= scale
