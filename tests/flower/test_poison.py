"""Well-formed uploads that would damage the model."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedshift.flower import FedShift, NoUploadsError, QuantizeMod
from fedshift.flower.addon.arrays import to_record
from fedshift.flower.testing import LocalGrid
from tests.federations import forged
from tests.flower.apps import client_app, model, run, same
from tests.flower.attacks import BAD, Hostile, InOrder, edited, frame, survivors


@pytest.mark.filterwarnings("ignore:overflow")
def test_finite_uploads_whose_mean_is_not_finite_leave_the_model_and_the_strategy_as_they_were() -> None:
    def huge(start: Any, client: int, context: Any) -> Any:
        big = 3e38 if strategy.rounds == [] else 1.0
        return {name: torch.full_like(w, big) for name, w in start.items()}, {"num-examples": 1}

    inner = flower.FedAvgM(fraction_evaluate=0.0, min_train_nodes=6, server_momentum=0.9, server_learning_rate=5.0)
    strategy = FedShift(inner)
    result = run(strategy, [QuantizeMod(32)], train=huge, rounds=2)
    assert [x.used for x in strategy.rounds] == [0, 6]
    assert np.isfinite(result.arrays["one.weight"].numpy()).all()
    assert inner.momentum_vector is not None
    assert np.isfinite(inner.momentum_vector[0]).all()


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_finite_upload_that_would_poison_the_strategys_state_for_good_costs_one_round_without_the_bound() -> None:
    """1e30 is finite, its square is not: v_t of FedAdam would stay infinite, and the model would never move again."""

    def once(start: Any, client: int, context: Any) -> Any:
        w = {name: x + (1e30 if client == 0 and not strategy.rounds else 0.1) for name, x in start.items()}
        return w, {"num-examples": 1}

    for bound, used in ((0, 0), (20, 5)):
        strategy = FedShift(flower.FedAdam(fraction_evaluate=0.0, min_train_nodes=6), bound=bound)
        result = run(strategy, [QuantizeMod(32)], train=once, rounds=3)
        assert [x.used for x in strategy.rounds] == [used, 6, 6]
        assert not same(result.arrays, model())


@pytest.mark.filterwarnings("ignore:overflow")
def test_state_that_is_changed_in_place_is_restored_too() -> None:
    class Summing(InOrder):
        def __init__(self) -> None:
            super().__init__(fraction_evaluate=0.0)
            self.total: dict[str, Any] = {}

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            for name, array in arrays.items():
                self.total[name] = self.total.get(name, 0) + array.numpy() * (
                    np.float32(1e30) if server_round == 1 else 1
                )
            return ArrayRecord({name: Array(np.asarray(x)) for name, x in self.total.items()}), metrics

    def large(start: Any, client: int, context: Any) -> Any:
        return {name: x * 0 + (1e10 if not strategy.rounds else 1) for name, x in start.items()}, {"num-examples": 1}

    strategy = FedShift(Summing())
    result = run(strategy, [QuantizeMod(32)], train=large, rounds=2)
    assert [x.used for x in strategy.rounds] == [0, 6]
    assert np.allclose(result.arrays["one.bias"].numpy(), 1)


def test_an_update_that_becomes_infinite_on_its_base_is_left_out_alone() -> None:
    start = to_record({"w": torch.full((2, 2), 100.0, dtype=torch.float16)})

    def beyond(start: Any, client: int, context: Any) -> Any:
        return {"w": start["w"] + 1}, {"num-examples": 1}

    largest = {"w": torch.full((2, 2), 65504.0, dtype=torch.float16)}
    huge = frame(lambda data: forged(data, largest, described=True, update=True))
    strategy, hostile = FedShift(InOrder(fraction_evaluate=0.0)), Hostile(edited(huge))
    grid = LocalGrid(client_app([QuantizeMod(32, updates=True)], beyond), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    strategy.start(grid, start, num_rounds=1)
    assert strategy.rounds[0].used == 5
    assert "is infinite after adding the update" in strategy.rounds[0].failed[hostile.node]


def test_a_reply_to_no_message_is_not_passed_on() -> None:
    def elsewhere(reply: Message) -> Message:
        reply.metadata.__dict__.update(_src_node_id=12345, _dst_node_id=12345, _reply_to_message_id="")
        return reply

    strategy = FedShift(InOrder(fraction_evaluate=0.0))
    survivors(strategy, Hostile(elsewhere), rounds=1)
    assert strategy.rounds[0].failed[12345] == "the reply does not answer a message of this round"
    assert strategy.rounds[0].used == 5


def test_a_long_reason_is_cut() -> None:
    def wordy(start: Any, client: int, context: Any) -> Any:
        raise ValueError("x" * 100_000)

    with pytest.raises(NoUploadsError) as problem:
        run(FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=6), patience=1), [QuantizeMod(4)], train=wordy)
    assert len(str(problem.value)) < 700
