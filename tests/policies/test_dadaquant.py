"""DAdaQuant: levels that double when the loss stops falling, and levels by the weights of clients."""

import math
import random
from typing import Any

import pytest
import torch

from fedshift.codecs.qsgd import QSGD
from fedshift.policies import DAdaQuant
from fedshift.policies.dadaquant import advanced, exact_levels, levels
from fedshift.rounds.uplink import Uplink
from tests.policies.stats import doubles, known


def s_of(uplink: Uplink) -> int:
    assert isinstance(uplink.codec.quantizer, QSGD)
    return uplink.codec.quantizer.s


def over_time(policy: DAdaQuant, losses: list[float], rounds: int = 100) -> list[int]:
    """Levels of one client in each round, and in the round after the last loss."""
    state, found = policy.init(1, rounds), []
    for number in range(1, len(losses) + 2):
        stats = known(1)
        if number > 1:
            stats = known(1, last=torch.tensor([number - 1]), loss=doubles(losses[number - 2]))
        uplinks, state = policy.choose(state, number, [0], stats)
        found.append(s_of(uplinks[0]))
    return found


def test_levels_double_when_the_average_has_not_fallen_for_phi_rounds() -> None:
    # averages with psi = 1/2: 8, 6, 5, 6, 5, 5, 5
    losses = [8.0, 4.0, 4.0, 7.0, 4.0, 5.0, 5.0]
    # phi = 3: after 3 losses 5 < 8; after 4, 6 >= 6: q = 2; after 7 losses, the next chance, 5 >= 5: q = 4
    assert over_time(DAdaQuant(psi=0.5, phi=3), losses) == [1, 1, 1, 1, 2, 2, 2, 4]


def test_a_falling_loss_keeps_the_levels_and_a_rising_one_doubles_them_up_to_the_limit() -> None:
    assert over_time(DAdaQuant(phi=2), [1 / n for n in range(1, 30)]) == [1] * 30
    rising = over_time(DAdaQuant(q_min=2, q_max=12, phi=2), [float(n) for n in range(1, 10)])
    assert rising == [2, 2, 4, 4, 8, 8, 12, 12, 12, 12]


def test_phi_is_a_tenth_of_the_rounds() -> None:
    assert [len(DAdaQuant().init(1, rounds)["averages"]) for rounds in (5, 30, 500)] == [2, 3, 50]


def test_a_phi_beyond_the_last_round_takes_no_more_memory() -> None:
    state = DAdaQuant(phi=10**9).init(5, 20)
    assert len(state["averages"]) == 20
    for loss in range(19):  # all that the policy knows in round 20
        state = advanced(state, float(loss), psi=0.0, q_max=8)
    assert int(state["q"]) == 1


def test_without_the_time_half_the_level_is_the_largest_and_no_loss_is_needed() -> None:
    policy = DAdaQuant(q_max=6, time=False)
    assert (policy.needs, policy.init(3, 10)) == (frozenset(), {})
    assert DAdaQuant().needs == {"loss"}
    uplinks, _ = policy.choose({}, 1, [0, 1, 2], known(3))
    assert [s_of(uplink) for uplink in uplinks] == [6, 6, 6]  # equal weights: no effect


def test_levels_of_clients_are_those_worked_out_by_hand() -> None:
    # p = (1, 8, 27) / 36, p^(2/3) = (1, 4, 9) / 36^(2/3): a = 14 / 36^(2/3), b = 794 / (36^2 q^2)
    # sqrt(a / b) p^(2/3) = q sqrt(14 / 794) (1, 4, 9) = 8 * 0.13279 * (1, 4, 9) = (1.06, 4.25, 9.56)
    assert levels(8, [1.0, 8.0, 27.0]) == [1, 4, 10]
    weights = doubles(5.0, 1.0, 8.0, 27.0)
    uplinks, _ = DAdaQuant(q_max=8, time=False).choose({}, 1, [1, 2, 3], known(4, weights=weights))
    assert [s_of(uplink) for uplink in uplinks] == [1, 4, 10]
    uplinks, _ = DAdaQuant(q_max=8, time=False, clients=False).choose({}, 1, [1, 2, 3], known(4, weights=weights))
    assert [s_of(uplink) for uplink in uplinks] == [8, 8, 8]


@pytest.mark.parametrize("q", [1, 4, 16])
def test_the_variance_is_that_of_equal_levels_and_the_sum_of_levels_is_smallest(q: int) -> None:
    draw = random.Random(q)
    weights = [draw.uniform(0.1, 5.0) for _ in range(6)]
    p = [weight / sum(weights) for weight in weights]

    def variance(found: list[float]) -> float:
        return sum((x / s) ** 2 for x, s in zip(p, found, strict=True))

    best = exact_levels(q, weights)
    assert variance(best) == pytest.approx(variance([float(q)] * 6))
    assert sum(best) < 6 * q
    for _ in range(200):  # others with the same variance need more levels in all
        other = [s * draw.uniform(0.8, 1.25) for s in best]
        scale = math.sqrt(variance(other) / variance(best))
        assert sum(scale * s for s in other) >= sum(best) - 1e-9


def test_a_tiny_client_has_one_level_and_a_dominant_one_at_most_127() -> None:
    assert levels(100, [1e6, 1.0])[1] == 1
    assert max(levels(127, [50.0, 1.0, 1.0, 1.0])) == 127


def test_wrong_arguments_are_refused() -> None:
    wrong: list[dict[str, Any]] = [{"q_max": 0}, {"q_min": 9}, {"psi": 1.0}, {"phi": -1}, {"q_max": 128}]
    wrong.append({"bucket": -1})
    for arguments in wrong:
        with pytest.raises(ValueError, match=rf"DAdaQuant\(.*{next(iter(arguments))}"):
            DAdaQuant(**arguments)
