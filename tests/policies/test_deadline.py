"""Deadline planner: rates within the links, and a budget divided with the smallest error."""

import itertools
import math
import random

import pytest
import torch

from fedshift import Uplink
from fedshift.codecs import Step
from fedshift.experiment.build import build
from fedshift.policies import Deadline
from fedshift.policies.deadline import plan
from fedshift.runs.run import Run
from tests.federations import points, settings, train
from tests.policies.stats import doubles, known


def rate_of(uplink: Uplink) -> float:
    assert isinstance(uplink.codec.quantizer, Step)
    assert uplink.codec.quantizer.rate is not None
    return uplink.codec.quantizer.rate


def loss(energy: list[float], rates: list[float]) -> float:
    return sum(e * 2 ** (-2 * r) for e, r in zip(energy, rates, strict=True))


def test_a_budget_is_divided_as_worked_out_by_hand() -> None:
    # without limits: R_k = log2(energy_k) / 2 + level; energies 64, 4, 1 have offsets 3, 1, 0
    assert plan([64.0, 4.0, 1.0], [0.0] * 3, [9.0] * 3, 10.0) == pytest.approx([5.0, 3.0, 2.0])
    # level 0 would be negative for the last: 3 bits are 2.5 and 0.5 of the first two
    assert plan([64.0, 4.0, 1.0], [0.0] * 3, [9.0] * 3, 3.0) == pytest.approx([2.5, 0.5, 0.0])
    # the first is limited by its link, and leaves its bits to the others
    assert plan([64.0, 4.0, 1.0], [0.0] * 3, [2.0, 9.0, 9.0], 6.0) == pytest.approx([2.0, 2.5, 1.5])
    assert plan([5.0, 1.0], [0.5, 0.5], [2.0, 3.0], 100.0) == [2.0, 3.0]
    assert plan([5.0, 1.0], [0.5, 0.5], [2.0, 3.0], 0.3) == [0.5, 0.5]
    assert plan([0.0, 1.0], [0.0, 0.0], [4.0, 4.0], 3.0) == [0.0, 3.0]


@pytest.mark.parametrize("seed", range(8))
def test_no_division_on_a_grid_is_better(seed: int) -> None:
    draw = random.Random(seed)
    energy = [10 ** draw.uniform(-3, 3) for _ in range(3)]
    low, high = [draw.uniform(0.1, 0.6) for _ in range(3)], [draw.uniform(1.0, 4.0) for _ in range(3)]
    total = draw.uniform(sum(low), sum(high))
    best = plan(energy, low, high, total)
    assert sum(best) == pytest.approx(total)
    assert all(a <= r <= b for a, r, b in zip(low, best, high, strict=True))
    grids = [[a + (b - a) * i / 24 for i in range(25)] for a, b in zip(low, high, strict=True)]
    others = [rates for rates in itertools.product(*grids) if sum(rates) <= total]
    assert others
    assert min(loss(energy, list(rates)) for rates in others) >= loss(energy, best) * (1 - 1e-12)


def test_each_client_has_the_largest_rate_that_its_link_affords() -> None:
    # d = 1000 values, overhead 25 bytes: 8 (2 s * bandwidth - 25) / 1000 bits per value
    policy, bandwidth = Deadline(deadline=2.0), doubles(75.0, 25.0, 1e6, 13.0, 1.0)
    stats = known(5, bandwidth=bandwidth, overhead=lambda uplink: 25)
    uplinks, state = policy.choose(policy.init(5, 10), 1, [0, 1, 2, 3, 4], stats)
    assert [rate_of(uplink) for uplink in uplinks] == pytest.approx([1.0, 0.2, 4.0, 0.1, 0.1])
    assert (int(state["late"]), int(state["beyond"])) == (2, 0)  # 13 B/s affords 0.008 bits
    assert state["planned"].tolist() == pytest.approx([150.0, 50.0, 525.0, 37.5, 37.5])
    assert all(uplink.update and uplink.feedback for uplink in uplinks)


def test_an_upload_that_exceeded_its_plan_leaves_fewer_bits_to_the_next() -> None:
    policy, bandwidth, cohort = Deadline(deadline=1.0), doubles(100.0, 100.0), [0, 1]
    uplinks, state = policy.choose(policy.init(2, 10), 1, cohort, known(2, bandwidth=bandwidth))
    assert [rate_of(uplink) for uplink in uplinks] == [0.8, 0.8]
    later = known(2, bandwidth=bandwidth, last=torch.tensor([1, 1]), bytes=doubles(110.0, 105.0))
    uplinks, state = policy.choose(state, 2, cohort, later)
    assert [rate_of(uplink) for uplink in uplinks] == [0.72, 0.72]  # 10 bytes less
    uplinks, state = policy.choose(state, 3, cohort, later)  # no upload of round 2 was used
    assert [rate_of(uplink) for uplink in uplinks] == [0.72, 0.72]


def test_bits_go_to_clients_with_large_weights_and_long_updates() -> None:
    policy = Deadline(budget=750.0, least=0.1, most=7.0)  # 6 bits per value for 4 clients
    stats = known(
        5,
        weights=doubles(1.0, 2.0, 1.0, 1.0, 9.0),
        last=torch.tensor([3, 3, 2, 0, 0]),
        norm=doubles(1.0, 1.0, 4.0, 0.0, 0.0),
    )
    uplinks, state = policy.choose(policy.init(5, 10), 4, [0, 1, 2, 3], stats)
    rates = [rate_of(uplink) for uplink in uplinks]
    usual = (1 + 1 + 16) / 3  # of the client that has not uploaded yet
    offsets = [math.log2(x) / 2 for x in (1.0, 4.0, 16.0, usual)]
    level = (6.0 - sum(offsets)) / 4
    assert rates == pytest.approx([offset + level for offset in offsets], abs=1e-3)
    assert sum(rates) <= 6.0
    _, state = Deadline(budget=10.0).choose(state, 5, [0, 1, 2, 3], stats)
    assert int(state["beyond"]) == 1


def test_uploads_of_a_run_arrive_in_time_and_within_the_budget() -> None:
    """Real frames: the range coder needs more than the entropy of the codes, which is known after the first round."""
    rates = [1000.0, 1500.0, 2000.0, 4000.0] * 3
    case = {"policy": {"name": "deadline", "deadline": 1.0, "budget": 7000.0}, "bandwidth": rates}
    fed = build(settings(uplink=case, model={"args": {"hidden": 800}}), None, points())
    first, *others = train(fed, 5)[1]
    assert sum(used.bytes for used in first.uplinks) > 7000
    for outcome in others:
        assert len(outcome.uplinks) == 5
        assert all(used.bytes <= 1.01 * rates[used.client] for used in outcome.uplinks)
        assert 0.9 * 7000 <= sum(used.bytes for used in outcome.uplinks) <= 1.01 * 7000
    assert len({used.bits for used in outcome.uplinks}) > 2


def test_wrong_arguments_are_refused() -> None:
    for arguments, why in (
        ({}, "needs a deadline in seconds, a budget"),
        ({"deadline": 0.0}, "deadline must be a positive number"),
        ({"budget": math.inf}, "budget must be a positive number"),
        ({"budget": 1e3, "least": 2.0, "most": 1.0}, "rates must be between 0.001 and 7 bits per value"),
    ):
        with pytest.raises(ValueError, match=rf"^Deadline\(.*{why}"):
            Deadline(**arguments)


def test_limits_that_cannot_be_met_are_reported_once() -> None:
    # 10 bytes per second and 25 bytes per round are less than the header of any upload
    for limits, expected in (
        ({"deadline": 1.0}, ["uplink.policy: some uploads take longer than the deadline of 1.0 s"]),
        ({"budget": 25.0}, ["uplink.policy: the uploads of a round exceed the budget of 25.0 bytes"]),
        ({"deadline": 1e6, "budget": 1e9}, []),
    ):
        found: list[str] = []
        uplink = {"bits": 8, "bandwidth": 10.0, "policy": {"name": "deadline"} | limits}
        list(Run(settings(uplink=uplink), data=points(), tell=found.append))
        assert [text.partition(" even with least = 0.1 bits per value")[0] for text in found] == expected
