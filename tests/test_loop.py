"""Rounds: bytes, shares, layers, lost and broken clients."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Codec, Dataset, KMeans, dataset, shift, size
from fedshift.codecs.exact import EXACT
from fedshift.data.partition import Partition
from fedshift.rounds.loop import DivergedError
from tests.federations import federation, points, same, settings, train


def test_bytes_are_those_of_the_frames() -> None:
    fed = federation(uplink={"bits": "32+4"}, train={"selection": "stratified", "cohort": 4})
    params = fed.start().out.params
    _, (outcome,), _ = train(fed, rounds=1)
    exact, coded = size(EXACT, params), size(Codec(KMeans(4)), params)
    assert sum(outcome.bytes_up) == 2 * exact + 2 * coded
    assert outcome.bytes_up[1] == 2 * 2 * 16 * 4  # two clients, two weights, sixteen numbers
    assert outcome.bytes_down == 4 * exact


class WithoutSizes(Partition):
    """Partition that refuses to compute the sizes of all clients, of which there may be millions."""

    @property
    def sizes(self) -> Tensor:
        raise AssertionError("a round needs only the clients of its cohort")


def test_a_round_computes_the_sizes_of_its_cohort_only() -> None:
    fed = federation(algorithm={"weights": "examples"})
    state, (outcome,), _ = train(fed, rounds=1)
    parts = WithoutSizes(fed.partition.order, fed.partition.start)
    again, (same_outcome,), _ = train(replace(fed, partition=parts), rounds=1)
    assert same(state.out.params, again.out.params)
    assert outcome.bytes_up == same_outcome.bytes_up


def test_the_bytes_of_a_sent_control_are_counted_and_a_derived_one_has_none() -> None:
    up = {}
    for control in ("derived", "sent"):
        fed = federation(algorithm={"name": "scaffold", "control": control})
        _, (outcome,), _ = train(fed, rounds=1)
        up[control] = sum(outcome.bytes_up)
        assert outcome.bytes_down == 2 * up["derived"]
    params = fed.start().out.params
    assert up == {"derived": 5 * size(EXACT, params), "sent": 2 * 5 * size(EXACT, params)}


def test_the_share_follows_the_weights() -> None:
    fed = federation(
        uplink={"bits": "32+4"}, algorithm={"weights": "examples"}, data={"partition": "dirichlet", "least": 2}
    )
    _, (outcome,), _ = train(fed, rounds=1)
    clients, _ = fed.cohorts.draw(1)
    sizes = fed.partition.sizes
    lossy = sum(int(sizes[k]) for k in clients if k % 2)
    assert outcome.share == pytest.approx(lossy / sum(int(sizes[k]) for k in clients))
    equal = train(federation(uplink={"bits": "32+4"}), rounds=1)[1][0]
    assert equal.share == pytest.approx(sum(k % 2 for k in clients) / len(clients))


def test_the_record_has_the_mean_before_and_after_the_shift() -> None:
    plain = train(federation(uplink={"bits": 4}), rounds=1)[0].out.params
    fed = federation(uplink={"bits": 4}, shift={"on": True, "max_share": 0.25})
    state, (outcome,), _ = train(fed, rounds=1)
    assert same(state.out.params, shift(plain, 0.25))
    for name, layer in outcome.layers.items():
        assert layer.mean_before == pytest.approx(float(plain[name].double().mean()))
        assert layer.mean_after == pytest.approx(0.75 * layer.mean_before, rel=1e-4)
        start = fed.start().out.params[name]
        assert layer.step == pytest.approx(float((state.out.params[name] - start).norm()), rel=1e-5)
        assert layer.drift > 0
        assert layer.drift_coded not in (0, layer.drift)
    assert list(outcome.layers) == ["fc1.weight", "fc2.weight"]
    assert 0 < outcome.error < 0.5


def test_exact_uploads_lose_nothing() -> None:
    _, (outcome,), _ = train(federation(), rounds=1)
    assert outcome.error == 0
    assert outcome.share == 0
    assert all(layer.drift == layer.drift_coded for layer in outcome.layers.values())


def test_scores_are_those_of_the_test_set() -> None:
    fed = federation()
    state, outcomes, _ = train(fed)
    data, model = fed.task.data, fed.task.model
    model.load_state_dict(state.out.params)
    outputs = model.eval()(data.test_x).detach()
    score = outcomes[-1].score
    assert score is not None
    assert score.predicted == tuple(torch.bincount(outputs.argmax(1), minlength=4).tolist())
    assert outcomes[-1].accuracy == pytest.approx(float((outputs.argmax(1) == data.test_y).double().mean()))
    assert outcomes[-1].loss == pytest.approx(float(F.cross_entropy(outputs, data.test_y)), rel=1e-5)


def poisoned(huge: float = 1e30) -> Dataset:
    """Points of which only those of client 0 make training overflow."""
    data = points()
    x = data.x.clone()
    x[federation().partition.of(0)] = huge
    return dataset(x, data.y, data.test_x, data.test_y)


def test_a_client_that_diverges_is_left_out_and_counted() -> None:
    fed = federation(dataset=poisoned(), train={"cohort": 12}, algorithm={"name": "scaffold"})
    state, outcomes, memory = train(fed)
    assert [outcome.arrived for outcome in outcomes] == [11, 11, 11]
    assert all(list(outcome.failed) == [0] and "NaN or infinity" in outcome.failed[0] for outcome in outcomes)
    assert 0 not in memory.held
    assert all(x.isfinite().all() for x in state.out.params.values())
    assert outcomes[-1].accuracy is not None
    assert outcomes[-1].accuracy > 0.5


def test_rounds_without_a_usable_upload_are_skipped_until_patience_ends() -> None:
    fed = federation(train={"lr": 1e30, "patience": 3})
    start = fed.start().out.params
    state, (first, second), _ = train(fed, rounds=2)
    assert (first.arrived, second.arrived, len(first.failed)) == (0, 0, 5)
    assert first.layers == {}
    assert same(state.out.params, start)
    with pytest.raises(DivergedError, match=r"round 3: no usable upload in 3 rounds in a row; last reason: .*NaN"):
        train(fed, rounds=3)


def test_lost_clients_are_counted_and_the_round_continues() -> None:
    _, outcomes, _ = train(federation(train={"dropout": 0.5}), rounds=8)
    assert all(outcome.arrived + outcome.dropped == 5 for outcome in outcomes)
    assert sum(outcome.dropped for outcome in outcomes) > 5


def test_a_hundred_rounds_with_every_client_quantized_stay_finite_and_accurate() -> None:
    """Without the cap, the rule subtracts the whole mean of every layer, and the model collapses."""
    fed = federation(
        uplink={"bits": 4},
        shift={"on": True},
        train={"rounds": 100, "cohort": 6, "selection": "stratified", "lr": 0.1},
    )
    state, outcomes, _ = train(fed, rounds=100)
    assert outcomes[-1].share == 1
    assert all(x.isfinite().all() for x in state.out.params.values())
    accuracy = [outcome.accuracy or 0.0 for outcome in outcomes[-10:]]
    plain = train(federation(train={"cohort": 6}), rounds=30)[1][-1].accuracy or 0.0
    assert sum(accuracy) / 10 > plain - 0.1
    assert plain > 0.8


def test_uploads_take_as_long_as_the_slowest_link() -> None:
    fed = federation(uplink={"bits": "32+4", "bandwidth": {32: 1e6, 4: 1e3}}, train={"cohort": 12})
    _, (outcome,), _ = train(fed, rounds=1)
    slow = size(Codec(KMeans(4)), fed.start().out.params) / 1e3
    assert outcome.uplink_seconds is not None
    assert slow < outcome.uplink_seconds < slow + 0.5
    rates = tuple(1e3 if client == 3 else 1e9 for client in range(12))
    fed = federation(uplink={"bits": "32+4", "bandwidth": rates}, train={"cohort": 12})
    _, (outcome,), _ = train(fed, rounds=1)
    assert outcome.uplink_seconds is not None
    assert slow < outcome.uplink_seconds < slow + 0.5
    assert train(federation(), rounds=1)[1][0].uplink_seconds is None


def test_targets_need_not_be_classes() -> None:
    x = torch.linspace(-1, 1, 120)[:, None]
    data = dataset(x, 3 * x + 1, x, 3 * x + 1, classes=0)

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def close(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets).abs() < 0.2)[:, 0]

    from fedshift.experiment.build import build

    fed = build(settings(train={"rounds": 30}), nn.Linear(1, 1), data, squared, close)
    _, outcomes, _ = train(fed, rounds=30)
    assert outcomes[-1].accuracy == 1
    assert outcomes[-1].score is not None
    assert outcomes[-1].score.predicted == ()
    assert outcomes[-1].loss is not None
    assert math.isfinite(outcomes[-1].loss)
