"""Rate and distortion: theory against known numbers, and codecs near their targets."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from fedshift import Step
from fedshift.bench import rates
from fedshift.bench.rates import TARGETS, measure
from fedshift.bench.theory import Floats, best_scalar, fitted, scalar, segmented, shannon_bound


def generalised_normal(beta: float, n: int) -> Floats:
    rng = np.random.default_rng(0)
    values: Floats = rng.gamma(1 / beta, size=n) ** (1 / beta) * rng.choice([-1, 1], size=n)
    return values


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(2.0, (0.618, 0.348, 0.178, 0.089)), (1.0, (0.486, 0.262, 0.140, 0.073)), (0.6, (0.346, 0.169, 0.086, 0.045))],
)
def test_scalar_quantization_has_the_known_distortion(beta: float, expected: tuple[float, ...]) -> None:
    """Entropy-coded scalar quantization of normal, Laplace and heavy-tailed values at 0.5, 1, 1.5 and 2 bits."""
    assert [scalar(beta).distortion(rate) for rate in (0.5, 1.0, 1.5, 2.0)] == pytest.approx(expected, abs=0.0015)


@pytest.mark.parametrize("beta", [0.4, 0.7, 1.0, 2.0])
def test_no_scalar_quantizer_is_below_shannons_bound(beta: float) -> None:
    for rate in (0.5, 1.0, 2.0, 3.0):
        assert shannon_bound(beta, rate) < scalar(beta).distortion(rate)
    high = scalar(beta)
    assert high.rate(shannon_bound(beta, 4.0)) - 4.0 == pytest.approx(0.2546, abs=0.02)  # 0.5 log2(pi e / 6)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_a_fit_recovers_the_distribution(beta: float) -> None:
    assert fitted(generalised_normal(beta, 300_000)) == pytest.approx(beta, rel=0.03)


@pytest.mark.parametrize("beta", [0.6, 1.0, 2.0])
def test_the_best_quantizer_of_values_is_that_of_their_distribution(beta: float) -> None:
    curve = best_scalar(generalised_normal(beta, 300_000))
    for rate in (0.3, 0.5, 1.0, 2.0):
        assert curve.distortion(rate) == pytest.approx(scalar(beta).distortion(rate), rel=0.02)
    assert (np.diff(curve.rates) > 0).all()
    assert (np.diff(curve.distortions) < 0).all()


@pytest.mark.parametrize("price", [0.001, 0.05, 0.2, 0.5, 1.0, 3.0])
def test_no_other_division_into_intervals_costs_less(price: float) -> None:
    x = np.array([-2.1, -0.4, -0.3, 0.0, 0.1, 0.2, 0.9, 1.1, 3.0])
    x /= math.sqrt((x * x).mean())
    rate, distortion = segmented(np.arange(10) / 9, np.append(0.0, x.cumsum() / 9), price)
    costs = []
    for cuts in (cuts for n in range(9) for cuts in combinations(range(1, 9), n)):
        cells = [x[start:end] for start, end in pairwise((0, *cuts, 9))]
        entropy = sum(len(cell) / 9 * math.log2(9 / len(cell)) for cell in cells)
        costs.append(sum(((cell - cell.mean()) ** 2).sum() for cell in cells) / 9 + price * entropy)
    assert distortion + price * rate == pytest.approx(min(costs), abs=1e-9)


def test_evenly_spaced_levels_are_not_below_the_best_quantizer_of_values_that_fit_no_distribution() -> None:
    rng = np.random.default_rng(1)
    idle = rng.normal(size=100_000) * np.where(rng.random(100_000) < 0.9, 1e-3, 1.0)
    for values in (idle, rng.normal(size=100_000) + 3, np.round(rng.laplace(size=100_000))):
        curve, x = best_scalar(values), torch.from_numpy(values.astype(np.float32))[None]
        for rate in (0.3, 0.8, 2.0):
            codes, side = Step(rate=rate).encode(x)
            share = torch.bincount(codes[0]).double() / codes.numel()
            distortion = float((Step().decode(codes, side) - x).double().square().sum() / x.double().square().sum())
            assert float(torch.special.entr(share).sum()) / math.log(2) > curve.rate(distortion) - 0.005


def test_the_step_quantizer_is_near_the_best_and_others_are_not_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.from_numpy(generalised_normal(1.0, 30_000).astype(np.float32)).view(150, 200)
    monkeypatch.setattr(rates, "update_of", lambda folder: ({"fc": x, "bias": x[0]}, 7))
    about, targets, table = measure(None, lambda text: None)
    assert about["update"] == "fc, 30,000 values, round 7"
    assert float(about["fitted beta"]) == pytest.approx(1, abs=0.05)
    assert len(targets) == 2 * len(TARGETS)
    assert all(target.met and -0.02 < target.measured < 0.05 for target in targets)
    assert list(table.as_dicts()[0])[-2:] == ["bits beyond the fit", "bits beyond the values"]
    for about_bits in ("0.5", "1", "2"):
        lines = [line for line in table.rows if line[0] == about_bits]
        assert [line[1] for line in lines[:3]] == [
            "best scalar quantizer of the fit",
            "best scalar quantizer of the values",
            "Shannon's bound of the fit",
        ]
        assert lines[3][1] in ("step", "common-step")
        assert all(abs(float(line[-1]) - float(line[-2])) < 0.05 for line in lines[3:])
    one = {line[1]: float(line[3]) for line in table.rows if line[0] == "1"}
    assert one["eden"] > 1.2 * one["step"]  # a rotation makes the values normal
