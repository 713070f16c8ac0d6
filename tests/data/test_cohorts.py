"""Cohorts and plans: draws depend only on the seed, the round and the client."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.core import rng
from fedshift.data.cohorts import (
    Plan,
    apportion,
    constant,
    decayed,
    draw_plan,
    sample,
    stratified,
    strongly_convex,
    travel,
    uniform,
)
from fedshift.data.partition import Partition, iid


def sizes(*n: int) -> Partition:
    start = torch.tensor([0, *n]).cumsum(0)
    return Partition(torch.arange(int(start[-1])), start)


def plan(partition: Partition, clients: list[int], epochs: int = 2, batch: int = 4, number: int = 1) -> Plan:
    rate = constant(0.1)
    return draw_plan(partition, clients, seed=0, number=number, epochs=epochs, batch=batch, rate=rate)


def test_every_epoch_visits_each_example_once_and_keeps_the_short_batch() -> None:
    held = sizes(5, 10, 1)
    drawn = plan(held, [0, 1, 2], epochs=3)
    assert drawn.batches.shape == (3, 9, 4)
    for k, (n, steps) in enumerate([(5, [4, 1] * 3), (10, [4, 4, 2] * 3), (1, [1] * 3)]):
        counts = drawn.keep[k].sum(1).tolist()
        assert counts == steps + [0] * (9 - len(steps))
        seen = drawn.batches[k][drawn.keep[k]]
        for epoch in range(3):
            assert sorted(seen[epoch * n : (epoch + 1) * n].tolist()) == held.of(k).tolist()


def test_kept_examples_come_first_in_a_batch() -> None:
    drawn = plan(sizes(7, 9), [0, 1])
    assert (drawn.keep[..., :-1] | ~drawn.keep[..., 1:]).all()


def test_epochs_and_rounds_are_shuffled_differently() -> None:
    held = sizes(40)
    first, second = plan(held, [0], batch=40), plan(held, [0], batch=40, number=2)
    assert not torch.equal(first.batches[0, 0], first.batches[0, 1])
    assert not torch.equal(first.batches, second.batches)


def test_draws_of_a_client_do_not_depend_on_other_clients() -> None:
    held = sizes(6, 11, 3, 8)
    together = plan(held, [0, 1, 3])
    for place, client in enumerate([0, 1, 3]):
        alone = plan(held, [client])
        steps = alone.batches.shape[1]
        keep = together.keep[place, :steps]
        assert torch.equal(keep, alone.keep[0])
        assert torch.equal(together.batches[place, :steps][keep], alone.batches[0][keep])
        assert torch.equal(together.key[place, :steps], alone.key[0])


def test_rates() -> None:
    """lr 0.1 decayed by half: 0.025 in round three; 2 / (0.5 (8 + 4)) = 1/3 at the fourth step."""
    step, count = torch.arange(5), torch.tensor([[5]])
    assert constant(0.1)(3, step, count)[0, 0] == pytest.approx(0.1)
    assert decayed(0.1, 0.5)(3, step, count)[0, 0] == pytest.approx(0.025)
    assert strongly_convex(0.5, 8)(1, step, count)[0, 4] == pytest.approx(1 / 3)


def test_the_steps_of_a_schedule_are_counted_over_rounds() -> None:
    """2 / (gamma + tau) for two clients with two steps and one step per round: tau continues in the second round."""
    rate = strongly_convex(1.0, 1.0)
    seen = [draw_plan(sizes(8, 3), [0, 1], seed=0, number=number, epochs=1, batch=4, rate=rate).lr for number in (1, 2)]
    assert seen[0].tolist() == [pytest.approx([2, 1]), pytest.approx([2, 1])]  # the second step of client 1 is unused
    assert seen[1].tolist() == [pytest.approx([2 / 3, 2 / 4]), pytest.approx([2 / 2, 2 / 3])]


def test_travel_is_the_distance_under_a_unit_gradient() -> None:
    held = sizes(7, 3)
    drawn = plan(held, [0, 1])
    for momentum in (0.0, 0.9):
        for k in range(2):
            w, v = 0.0, 0.0
            for step in range(drawn.lr.shape[1]):
                if drawn.keep[k, step, 0]:
                    v = momentum * v + 1.0
                    w -= float(drawn.lr[k, step]) * v
            assert travel(drawn, momentum)[k].item() == pytest.approx(-w, rel=1e-6)
            assert travel(Plan(*(part[k] for part in drawn)), momentum) == travel(drawn, momentum)[k]


@given(st.integers(1, 60), st.data())
def test_a_sample_has_no_client_twice(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    drawn = sample(rng.key(n, "cohort", k), n, k)
    assert len(drawn) == len(set(drawn)) == k
    assert all(0 <= client < n for client in drawn)


def test_every_client_is_drawn_equally_often() -> None:
    counts = torch.zeros(10)
    for number in range(3000):
        counts[sample(rng.key(0, "cohort", number), 10, 3)] += 1
    assert (counts / 3000 - 0.3).abs().max() < 0.03


def test_a_client_without_data_is_never_drawn() -> None:
    held = sizes(3, 0, 2, 0, 1)
    assert {k for number in range(50) for k in uniform(held, 2, 0).draw(number)[0]} == {0, 2, 4}
    with pytest.raises(ValueError, match="cohort=4: only 3 clients have data"):
        uniform(held, 4, 0)


def test_strata_have_the_same_share_in_every_round() -> None:
    held = iid(torch.zeros(200), 100, rng.key(0, "partition"))
    cohorts = stratified(held, torch.arange(100) % 2, 10, 0)
    for number in range(20):
        drawn, dropped = cohorts.draw(number)
        assert drawn == sorted(drawn)
        assert sum(k % 2 for k in drawn) == 5
        assert dropped == []


def test_clients_drop_out_with_the_given_probability_and_nothing_else_changes() -> None:
    held = sizes(*[1] * 50)
    lost = 0
    for number in range(200):
        trained, dropped = uniform(held, 10, 0, dropout=0.3).draw(number)
        assert sorted(trained + dropped) == uniform(held, 10, 0).draw(number)[0]
        lost += len(dropped)
    assert lost / 2000 == pytest.approx(0.3, abs=0.03)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 100))
def test_an_apportionment_adds_up_and_is_off_by_less_than_one(parts: list[int], total: int) -> None:
    counts = apportion(parts, total)
    assert sum(counts) == total
    assert all(abs(count - total * part / sum(parts)) < 1 for count, part in zip(counts, parts, strict=True))
