"""Rate and distortion: theory against known numbers, and codecs near their targets."""

import numpy as np
import pytest
import torch

from fedshift.bench.rates import TARGETS, points
from fedshift.bench.theory import fitted, scalar, shannon_bound


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
    rng = np.random.default_rng(0)
    values = rng.gamma(1 / beta, size=300_000) ** (1 / beta) * rng.choice([-1, 1], size=300_000)
    assert fitted(values) == pytest.approx(beta, rel=0.03)


def test_the_step_quantizer_is_near_theory_and_others_are_not_below_it() -> None:
    x = torch.distributions.Laplace(0.0, 1.0).sample((30_000,)).view(150, 200)
    found = list(points(x, scalar(1.0), lambda text: None))
    assert {point.target for point in found} == set(TARGETS)
    for target in TARGETS:
        gaps = {point.codec: point.gap for point in found if point.target == target}
        assert min(gaps, key=lambda name: gaps[name]) in ("step", "common-step")
        assert -0.02 < min(gaps.values()) < 0.05
    one = {point.codec: point.distortion for point in found if point.target == 1.0}
    assert one["eden"] > 1.2 * one["step"]  # a rotation makes the values normal
