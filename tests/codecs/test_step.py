"""Step: hand-worked levels, the requested rate, bounded errors, the same codes alone and in a stack."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedshift import Codec, Range, Step, WireError, pack, unpack
from fedshift.codecs.magnitudes import LEAST
from fedshift.codecs.step import DEAD
from tests.fuzz import mend

LOST = 128 * LEAST  # a step below LEAST becomes zero, and so do at most 128 steps
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
ROWS = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=FLOATS)


def entropy(codes: Tensor) -> float:
    counts = torch.bincount(codes.flatten().long()).double()
    return float(torch.special.entr(counts / counts.sum()).sum() / math.log(2))


def sample(kind: str, n: int, seed: int) -> Tensor:
    g = np.random.default_rng(seed)
    size = {"gauss": np.abs(g.normal(size=n)), "laplace": g.exponential(size=n), "heavy": g.gamma(1.7, size=n) ** 1.7}
    return torch.from_numpy((size[kind] * g.choice([-1.0, 1.0], n)).astype(np.float32))[None] * 1e-3


def test_hand_worked_levels() -> None:
    """A step of 2: up to 1.3 is the dead zone, 1.3 to 3.3 level 1, 3.3 to 5.3 level 2."""
    x = torch.tensor([[1.5, -1.5, 2.5, -2.5, 1.1, 0.5, -4.5, 4.0, 1.2, -1.2]])
    codes, side = Step(step=2 / x.square().mean().sqrt().item()).encode(x)
    assert codes.tolist() == [[1, 2, 1, 2, 0, 0, 4, 3, 0, 0]]
    step, first, further = side[0].tolist()
    assert step == pytest.approx(2, rel=2**-10)
    assert step * (1 - first) == pytest.approx(2.0, rel=2**-10)  # the mean of 1.5, 1.5, 2.5, 2.5
    assert step * (2 - further) == pytest.approx(4.25, rel=2**-10)  # of 4.5 and 4
    decoded = Step().decode(codes, side)
    assert decoded.tolist()[0] == pytest.approx([2, -2, 2, -2, 0, 0, -4.25, 4.25, 0, 0], rel=2**-9)


@pytest.mark.parametrize("kind", ["gauss", "laplace", "heavy"])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 1.0, 2.0, 4.0])
def test_a_rate_is_the_entropy_of_the_codes(kind: str, rate: float) -> None:
    codes, _ = Step(rate=rate).encode(sample(kind, 200_000, seed=int(100 * rate)))
    assert entropy(codes) == pytest.approx(rate, rel=0.01)


def test_signs_count_in_the_rate() -> None:
    """For values of one sign, codes need no bit for the sign."""
    x = sample("laplace", 100_000, seed=1).abs()
    assert entropy(Step(rate=1.0).encode(x)[0]) == pytest.approx(1.0, rel=0.01)


@given(ROWS, st.sampled_from([{"step": 1.0}, {"step": 30.0}, {"rate": 0.5}, {"rate": 3.0}]), st.integers(4, 8))
def test_no_value_is_further_from_its_level_than_the_dead_zone_or_a_step(
    row: np.ndarray, how: dict[str, Any], bits: int
) -> None:
    x = torch.from_numpy(row)
    quantizer = Step(bits, **how)
    if quantizer.rate and quantizer.rate > bits - 1:
        return
    codes, side = quantizer.encode(x)
    lost = (quantizer.decode(codes, side).double() - x.double()).abs()
    step = side[:, :1].double()
    assert (lost <= step * (1 + 2**-9) + LOST).all()
    assert (lost[codes == 0] <= (DEAD * (1 + 2**-9) * step).expand_as(lost)[codes == 0] + LOST).all()
    assert int(codes.max()) < quantizer.levels(x.shape[1])


def test_offsets_are_those_of_least_error() -> None:
    x = sample("heavy", 50_000, seed=3)
    quantizer = Step(rate=0.7)
    codes, side = quantizer.encode(x)
    least = (quantizer.decode(codes, side) - x).square().sum()
    for column in (1, 2):
        for moved in (-0.02, 0.02):
            other = side.clone()
            other[:, column] += moved
            assert (quantizer.decode(codes, other) - x).square().sum() > least


def test_a_row_is_coded_alike_alone_and_in_a_stack() -> None:
    stack = torch.cat([sample(kind, 20_011, seed) for seed, kind in enumerate(("gauss", "laplace", "heavy"))])
    for quantizer in (Step(step=3.0), Step(rate=0.4)):
        codes, side = quantizer.encode(stack)
        for r in range(3):
            row_codes, alone = quantizer.encode(stack[r : r + 1])
            assert torch.equal(row_codes[0], codes[r])
            assert torch.equal(alone[0], side[r])


def test_zeros_and_constants() -> None:
    x = torch.tensor([[0.0] * 6, [3.0] * 6, [0.0, 0.0, 0.0, 0.0, 0.0, -2.0]])
    for quantizer in (Step(), Step(rate=0.5), Step(step=0.5)):
        decoded = quantizer.decode(*quantizer.encode(x))
        assert torch.equal(decoded[0], x[0])
    decoded = Step(step=1.0).decode(*Step(step=1.0).encode(x))
    assert torch.allclose(decoded, x, rtol=2**-9)


def test_an_outlier_increases_the_step_and_is_not_clipped() -> None:
    x = torch.zeros(1, 1_000_000)
    x[0, 7] = 1.0  # a thousand times the root mean square
    decoded = Step(4, step=0.01).decode(*Step(4, step=0.01).encode(x))
    assert decoded[0, 7].item() == pytest.approx(1.0, rel=2**-9)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"bits": 1}, r"Step\(bits=1\): bits must be between 2 and 8"),
        ({"bits": 9}, r"Step\(bits=9\): bits must be between 1 and 8"),
        ({"step": 0.0}, r"Step\(step=0.0\)"),
        ({"rate": 7.5}, r"Step\(rate=7.5\): rate must be between 0.001 and 7 bits per value"),
        ({"rate": math.nan}, r"Step\(rate=nan\)"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Step(**given)  # type: ignore[arg-type]


def test_nan_infinity_and_huge_numbers_are_refused() -> None:
    for bad, problem in ((math.nan, "NaN or infinity"), (math.inf, "NaN or infinity"), (3e38, "beyond 2\\^120")):
        with pytest.raises(ValueError, match=problem):
            Step().encode(torch.tensor([[1.0, bad]]))


def test_a_frame_with_a_nan_or_infinite_step_or_offset_is_refused() -> None:
    params = {"w": sample("laplace", 4000, seed=5).view(40, 100)}
    frame = bytearray(pack(Codec(Step(), Range()), params))
    side = Step().encode(params["w"].reshape(1, -1))[1].numpy().tobytes()
    at = frame.index(side)
    for number, bad in ((0, math.nan), (1, math.nan), (2, math.nan), (0, math.inf), (0, 3e38), (1, math.inf)):
        hostile = bytearray(frame)
        hostile[at + 4 * number : at + 4 * number + 4] = np.float32(bad).tobytes()
        with pytest.raises(WireError, match="w: contains NaN, infinity or a number too large"):
            unpack(mend(bytes(hostile)), like=params)


def test_a_rate_holds_for_values_of_one_sign_far_from_zero() -> None:
    """Between a single code and one bit for the sign, the entropy does not decrease monotonically with the step."""
    g = torch.Generator().manual_seed(6)
    for x, rates in (
        (torch.randn(1, 90_000, generator=g) + 3, (0.3, 1.0)),
        (torch.rand(1, 90_000, generator=g), (1.0, 3.0)),
    ):
        for rate in rates:
            assert entropy(Step(rate=rate).encode(x)[0]) <= rate * 1.01


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("how", [{"rate": 0.05}, {"rate": 0.8}, {"rate": 3.0}, {"bits": 4, "rate": 1.0}, {"step": 2.0}])
def test_many_short_rows_are_coded_like_each_alone(how: dict[str, Any], common: bool) -> None:
    """Many rows are coded together with torch, and a few one by one with NumPy."""
    normal = torch.randn(60, 50, generator=torch.Generator().manual_seed(7))
    x = torch.cat([normal, normal**5, normal + 3, normal * (normal > 1), (normal * 2).round(), 0 * normal])
    quantizer = Step(common=common, **how)
    scale = quantizer.prepare([x[:, :20], x[:, 20:]]) if quantizer.prepares else None
    codes, side = quantizer.encode(x, None, scale)
    for r in range(len(x)):
        row = x[r : r + 1]
        scale = quantizer.prepare([row[:, :20], row[:, 20:]]) if quantizer.prepares else None
        row_codes, alone = quantizer.encode(row, None, scale)
        assert torch.equal(row_codes[0], codes[r])
        assert torch.equal(alone[0], side[r])


@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37, 1e-34, 1e-30])
def test_tiny_values_are_coded_or_become_zero(size: float) -> None:
    params = {"w": torch.randn(5, 4, generator=torch.Generator().manual_seed(8)) * size, "c": torch.full((2, 3), size)}
    for quantizer in (Step(), Step(rate=0.6)):
        decoded = unpack(pack(Codec(quantizer, Range()), params), like=params)
        assert all(decoded[name].abs().max() <= 1.2 * x.abs().max() for name, x in params.items())


def test_in_half_precision_only_the_codes_in_use_must_fit() -> None:
    params = {"w": (torch.randn(100, 100, generator=torch.Generator().manual_seed(9)) * 300).half()}
    decoded = unpack(pack(Codec(Step(rate=0.6), Range()), params), like=params)
    assert decoded["w"].dtype == torch.float16
    assert (decoded["w"].float() - params["w"].float()).norm() < params["w"].float().norm()


def test_a_common_step_is_that_of_the_values_of_all_tensors() -> None:
    tensors = [sample("laplace", 60_000, 11), 10 * sample("gauss", 20_000, 12)]
    together = torch.cat(tensors, dim=1)
    for own, common in ((Step(step=1.5), Step(step=1.5, common=True)), (Step(rate=0.8), Step(rate=0.8, common=True))):
        step = common.prepare(tensors)
        sides = [common.encode(x, None, step)[1] for x in tensors]
        assert sides[0][0, 0] == sides[1][0, 0] == own.encode(together)[1][0, 0]
        codes = torch.cat([common.encode(x, None, step)[0] for x in tensors], dim=1)
        assert torch.equal(codes, own.encode(together)[0])


def test_a_common_step_has_a_smaller_error_than_one_rate_for_tensors_of_different_size() -> None:
    params = {"small": sample("laplace", 50_000, 13).view(100, -1), "large": 30 * sample("laplace", 50_000, 14)}
    errors, sizes = [], []
    for quantizer in (Step(rate=1.0), Step(rate=1.0, common=True)):
        frame = pack(Codec(quantizer, Range()), params)
        decoded = unpack(frame, like=params)
        errors.append(sum(float((decoded[name] - x).square().sum()) for name, x in params.items()))
        sizes.append(len(frame))
    assert errors[1] < 0.7 * errors[0]
    assert sizes[1] < sizes[0] * 1.01


def test_an_outlier_of_one_tensor_increases_the_common_step() -> None:
    tensors = [torch.ones(1, 10), torch.tensor([[1000.0] + [0.0] * 999_999])]
    quantizer = Step(4, step=0.01, common=True)
    step = quantizer.prepare(tensors)
    decoded = [quantizer.decode(*quantizer.encode(x, None, step)) for x in tensors]
    assert decoded[1][0, 0].item() == pytest.approx(1000, rel=2**-9)
    assert not decoded[0].any()
