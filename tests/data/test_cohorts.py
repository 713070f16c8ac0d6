"""Cohorts and plans: draws depend only on the seed, the round and the client."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedshift.core import rng
from fedshift.data.cohorts import (
    LOCAL,
    Plan,
    Rate,
    annealed,
    apportion,
    constant,
    cosine,
    decayed,
    draw_plan,
    sample,
    stepped,
    stratified,
    strongly_convex,
    travel,
    uniform,
    warmed_up,
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


def rates(rate: Rate, number: int, steps: int = 1, counts: tuple[int, ...] = (1,)) -> list[list[float]]:
    found: list[list[float]] = rate(number, torch.arange(steps), torch.tensor(counts)[:, None]).tolist()
    return found


def test_a_cosine_falls_from_the_rate_to_its_final_part() -> None:
    """Four rounds, 0.1 (0.2 + 0.8 (1 + cos(pi (t - 1) / 4)) / 2): half of the fall after two rounds."""
    found = [rates(cosine(0.1, 0.2, 4), number)[0][0] for number in (1, 2, 3, 4)]
    middle = 0.8 * (1 + 0.5**0.5) / 2
    assert found == pytest.approx([0.1, 0.1 * (0.2 + middle), 0.06, 0.1 * (1 - middle)], rel=1e-6)


def test_a_milestone_is_the_end_of_its_round() -> None:
    found = [rates(stepped(0.8, 0.5, (2, 3)), number)[0][0] for number in (1, 2, 3, 4, 5)]
    assert found == pytest.approx([0.8, 0.8, 0.4, 0.2, 0.2])


def test_a_warm_up_rises_evenly_to_any_schedule() -> None:
    found = [rates(warmed_up(decayed(0.4, 0.5), 3), number)[0][0] for number in (1, 2, 3, 4, 5)]
    assert found == pytest.approx([0.1, 0.1, 0.075, 0.05, 0.025])


def test_a_local_schedule_falls_over_the_steps_of_each_client() -> None:
    """Two clients with four and two steps; what a client does not use may be anything from 0 on."""
    linear = rates(annealed(constant(0.4), LOCAL["linear"]), 7, 4, (4, 2))
    assert linear[0] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert linear[1][:2] == pytest.approx([0.4, 0.2])
    assert min(linear[1]) >= 0
    bent = rates(annealed(constant(0.4), LOCAL["cosine"]), 1, 4, (4, 2))
    assert bent[0] == pytest.approx([0.4, 0.2 * (1 + 0.5**0.5), 0.2, 0.2 * (1 - 0.5**0.5)])
    assert bent[1][:2] == pytest.approx([0.4, 0.2])


def stepwise(partition: Partition, clients: list[int], steps: int, batch: int = 4, number: int = 1) -> Plan:
    rate = constant(0.1)
    return draw_plan(partition, clients, seed=0, number=number, epochs=2, steps=steps, batch=batch, rate=rate)


def test_every_client_makes_the_given_steps_with_full_batches() -> None:
    """A client with fewer examples than a batch has all of them in every step."""
    held = sizes(10, 3, 1, 40)
    drawn = stepwise(held, [0, 1, 2, 3], steps=5)
    assert drawn.batches.shape == (4, 5, 4)
    assert drawn.keep.sum(-1).tolist() == [[4] * 5, [3] * 5, [1] * 5, [4] * 5]
    for k in range(4):
        for batch, keep in zip(drawn.batches[k], drawn.keep[k], strict=True):
            assert len(set(batch[keep].tolist())) == int(keep.sum())
            assert set(batch[keep].tolist()) <= set(held.of(k).tolist())


def test_a_pass_has_no_example_twice_and_the_next_one_is_shuffled_again() -> None:
    drawn = stepwise(sizes(10), [0], steps=100)
    passes = [set(drawn.batches[0, 2 * i : 2 * i + 2].flatten().tolist()) for i in range(50)]
    assert all(len(seen) == 8 for seen in passes)  # two of the ten are left out
    assert set.union(*passes) == set(range(10))
    assert len({tuple(sorted(seen)) for seen in passes}) > 10


def test_steps_of_a_client_do_not_depend_on_other_clients() -> None:
    held = sizes(6, 11, 3, 800)
    together = stepwise(held, [0, 1, 3], steps=9)
    for place, client in enumerate([0, 1, 3]):
        alone = stepwise(held, [client], steps=9)
        keep = together.keep[place]
        assert torch.equal(together.batches[place][keep], alone.batches[0][alone.keep[0]])
        assert torch.equal(together.key[place], alone.key[0])


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Number of elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return made


def test_a_large_client_does_not_make_the_draws_of_small_ones_large() -> None:
    """200 clients with one example and one with 20,000: its shuffle has 20,000 numbers, each of the others three."""
    held = sizes(*[1] * 200, 20_000)
    with Largest() as steps:
        stepwise(held, list(range(201)), steps=3)
    assert steps.elements <= 20_000 + 3 * 200
    with Largest() as epochs:
        plan(sizes(1, 3, 9, 20, 70, 200, 900, 2000, 7000, 20_000), list(range(10)), epochs=20, batch=10)
    assert epochs.elements == 10 * 20 * 20_000  # the plan itself


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
