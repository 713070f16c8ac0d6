"""Server rules against Flower's strategies of the same name, round by round."""

from math import sqrt
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi, Strategy

from fedshift import Broadcast, Params, Round, ServerRule
from fedshift.algorithms.fedavgm import Momentum
from fedshift.algorithms.fedopt import Adaptive
from fedshift.core.tree import part, prefixed, zeros
from fedshift.flower.addon.arrays import to_params, to_record
from fedshift.flower.testing import LocalGrid

ROUNDS = 6
OPTIONS: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}


def adam(number: int) -> Adaptive:
    """Flower's FedAdam has a bias correction, by rounds from 1 on and with one round too many; ours has none."""
    return Adaptive("adam", 0.1 * sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1)), 0.9, 0.99, 1e-3)


KINDS: dict[str, tuple[Strategy, Any]] = {
    "adagrad": (FedAdagrad(eta=0.1, tau=1e-3, **OPTIONS), lambda number: Adaptive("adagrad", 0.1, 0.0, 0.0, 1e-3)),
    "adam": (FedAdam(eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3, **OPTIONS), adam),
    "yogi": (
        FedYogi(eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3, **OPTIONS),
        lambda number: Adaptive("yogi", 0.1, 0.9, 0.99, 1e-3),
    ),
    "momentum": (
        FedAvgM(server_learning_rate=0.7, server_momentum=0.9, **OPTIONS),
        lambda number: Momentum(0.9, 0.7),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_flower(kind: str) -> None:
    """Both start with a second moment of zero, as Flower does; ours otherwise starts with tau^2, as in the paper."""
    strategy, rule_of = KINDS[kind]
    g, w = torch.Generator().manual_seed(0), {"w": torch.zeros(50, dtype=torch.float64)}
    rule: ServerRule = rule_of(1)
    _, state = rule.init(w, ["w"])
    if kind != "momentum":
        state = prefixed("m/", part("m/", state)) | prefixed("v/", zeros(part("v/", state)))
    theirs, grid = to_record(w), LocalGrid(ClientApp(), 1)
    for number in range(1, ROUNDS + 1):
        mean = {"w": w["w"] + 0.1 * torch.randn(50, generator=g, dtype=torch.float64)}
        theirs = aggregated(strategy, number, theirs, mean, grid)
        rnd = Round(number, 1, 1, Broadcast(w, {}), mean, 0.0, model=w)
        out, state = rule_of(number).apply(Broadcast(mean, {}), state, rnd)
        torch.testing.assert_close(out.params["w"], to_params(theirs)["w"], rtol=1e-9, atol=1e-12)
        w = out.params


def aggregated(strategy: Strategy, number: int, arrays: ArrayRecord, mean: Params, grid: LocalGrid) -> ArrayRecord:
    """Model of a strategy after a round in which one node replies with `mean`."""
    (message,) = strategy.configure_train(number, arrays, ConfigRecord(), grid)
    content = RecordDict({"arrays": to_record(mean), "metrics": MetricRecord({"num-examples": 1})})
    result, _ = strategy.aggregate_train(number, [Message(content, reply_to=message)])
    assert result is not None
    return result
