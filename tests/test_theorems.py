"""The paper's theorems on real rounds: Theorem 1 on least squares, Theorem 2 (corrected) on digits."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.least_squares import D, gap, slope
from examples.theorem2 import watched
from fedshift import Experiment
from fedshift.algorithms import shorter

ROUNDS = 200


@cache
def gaps(c: float, quantized: float = 0.5, shift: bool = True) -> Tensor:
    return gap(c, ROUNDS, quantized, shift)


def floor(c: float, quantized: float = 0.5) -> float:
    """Final gap caused by the shift, without the noise that remains in both runs."""
    return float((gaps(c, quantized) - gaps(0.0, quantized))[-20:].mean())


def test_the_gap_falls_as_1_over_t_if_the_optimum_has_mean_zero() -> None:
    assert slope(gaps(0.0)) == pytest.approx(-1, abs=0.2)


def test_without_the_shift_the_gap_falls_as_1_over_t_for_any_mean() -> None:
    assert slope(gaps(0.2, shift=False)) == pytest.approx(-1, abs=0.2)


def test_with_the_shift_the_gap_stops_falling_if_the_optimum_has_a_mean() -> None:
    assert abs(slope(gaps(0.2))) < 0.1


def test_the_floor_grows_with_the_square_of_the_mean() -> None:
    assert floor(0.2) / floor(0.1) == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("quantized", [0.25, 0.5, 0.75])
def test_the_floor_is_the_gap_of_the_best_weights_with_mean_zero_for_any_share(quantized: float) -> None:
    assert floor(0.1, quantized) == pytest.approx(D * 0.1**2, rel=0.1)


UNIFORM = {"quantizer": "uniform"}  # K-means keeps the mean, and that of the output layer would decay into rounding
SHARES: list[tuple[float, int, dict[str, Any]]] = [  # effective I/K, rounds of warmup, settings
    (0.5, 0, {"uplink": {"bits": {32: 0.5, 5: 0.5}} | UNIFORM, "shift": {"per": "layer"}}),
    (0.2, 0, {"uplink": {"bits": {32: 0.8, 4: 0.2}} | UNIFORM, "shift": {"per": "layer"}}),
    (0.8, 0, {"uplink": {"bits": {32: 0.2, 6: 0.8}} | UNIFORM, "shift": {"max_share": 1.0}}),
    (0.5, 0, {"uplink": {"bits": 6} | UNIFORM, "shift": {"per": "layer"}}),  # all of them, capped
    (1.0, 15, {"uplink": {"bits": 8} | UNIFORM, "shift": {"max_share": 1.0, "warmup": 15}}),
]


@pytest.mark.parametrize(("full", "warmup", "settings"), SHARES)
def test_the_difference_in_step_length_and_its_sign_are_those_of_theorem_2(
    full: float, warmup: int, settings: dict[str, Any]
) -> None:
    train = {"rounds": 15, "selection": "stratified", "epochs": 5, "batch": 15, "lr": 0.1}
    training, watch = watched(Experiment(train=train, engine={"name": "sequential"}, **settings))
    outcomes, sides = list(training), set()
    for outcome, (start, mean, shifted) in zip(outcomes, watch.seen, strict=True):
        share = full * min(1.0, outcome.number / warmup) if warmup else full  # I/K; S/K is the rest
        assert list(outcome.layers) == ["0.weight", "2.weight", "4.weight"]
        for name, layer in outcome.layers.items():
            m, new, p = float(start[name].mean()), float(mean[name].mean()), mean[name].numel()
            gain = float((mean[name] - start[name]).square().sum() - (shifted[name] - start[name]).square().sum())
            assert gain == pytest.approx(share * p * ((1 + (1 - share)) * new**2 - 2 * m * new), rel=1e-9)
            fence = (1 + (1 - share)) / 2 > m / new  # (K + S) / 2K
            assert fence == (gain > 0) == layer.shorter == shorter(share, m, new)
            sides.add(layer.shorter)
    assert sides == {True, False}


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_theorem_2_holds_filter_by_filter_and_a_layer_has_the_sum(share: float) -> None:
    train = {"rounds": 8, "epochs": 5, "batch": 15, "lr": 0.1}
    shift = {"per": "filter", "share": share}
    training, watch = watched(Experiment(train=train, shift=shift, engine={"name": "sequential"}))
    for outcome, (start, mean, shifted) in zip(list(training), watch.seen, strict=True):
        for name, layer in outcome.layers.items():
            m, new = start[name].mean(1), mean[name].mean(1)  # (filters,)
            gains = (mean[name] - start[name]).square().sum(1) - (shifted[name] - start[name]).square().sum(1)
            expected = share * mean[name].shape[1] * new * ((2 - share) * new - 2 * m)
            assert torch.allclose(gains, expected, rtol=1e-9, atol=1e-12)
            assert layer.shorter == bool(gains.sum() > 0) == shorter(share, m, new)
            assert layer.filters_before == pytest.approx(float(new.square().mean().sqrt()))
            assert layer.filters_after == pytest.approx((1 - share) * layer.filters_before, abs=1e-12)
