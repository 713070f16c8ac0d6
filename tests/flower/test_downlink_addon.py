"""`FedShift(downlink=...)` around strategies of Flower: nodes start from decoded models, the server keeps its own."""

from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.serverapp.strategy import FedAdam, FedAvg

from fedshift import Codec, Uniform
from fedshift.codecs.exact import EXACT
from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold, ScaffoldMod
from fedshift.flower.addon.arrays import KEY, to_params
from fedshift.flower.addon.outcome import NO_MOD
from fedshift.flower.testing import LocalGrid
from fedshift.wire.writer import size
from tests.flower.apps import client_app, model, run
from tests.flower.test_scaffold import controls, quadratic

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 6}
COARSE = Codec(Uniform(2))


def idle(message: Message, context: Context, call_next: Any) -> Message:
    """A mod that undoes the training: the reply has the arrays that the client received."""
    seen.append(to_params(message.content.array_records["arrays"]))
    reply: Message = call_next(message, context)
    reply.content["arrays"] = message.content.array_records["arrays"]
    return reply


seen: list[dict[str, torch.Tensor]] = []


@pytest.mark.parametrize("mod", [QuantizeMod(32), QuantizeMod(32, updates=True)])
def test_clients_that_change_nothing_leave_the_exact_model(mod: QuantizeMod) -> None:
    """However coarse the broadcast is."""
    seen.clear()
    start = model()
    result = run(FedShift(FedAvg(**ALL), downlink=COARSE), [mod, idle], start=start, rounds=3)
    for name, x in to_params(result.arrays).items():
        torch.testing.assert_close(x, to_params(start)[name], rtol=0, atol=1e-6)
    weights = [name for name, x in seen[0].items() if x.ndim >= 2]
    assert all(len(set(seen[0][name].flatten().tolist())) <= 4 for name in weights)  # two bits


@pytest.mark.parametrize("strategy", [FedAvg, FedAdam])
def test_eight_bits_train_nearly_as_the_exact_model(strategy: Any) -> None:
    exact, coded = (
        to_params(run(FedShift(strategy(**ALL), downlink=bits), [QuantizeMod(32)], rounds=4).arrays)
        for bits in (None, 8)
    )
    assert any(not torch.equal(x, coded[name]) for name, x in exact.items())
    for name, x in exact.items():
        torch.testing.assert_close(coded[name], x, rtol=0, atol=0.1 * float(x.abs().max()) + 1e-3)


def test_both_directions_are_compressed() -> None:
    start, down, grid = model(), list[int](), LocalGrid(client_app([QuantizeMod("lean")]), 6)
    push = grid.push_messages

    def measured(messages: Any) -> Any:
        kept = list(messages)
        down.extend(sum(len(x.data) for x in message.content["arrays"].values()) for message in kept)
        return push(kept)

    grid.push_messages = measured  # type: ignore[method-assign]
    strategy = FedShift(FedAvg(**ALL), downlink=4)
    strategy.start(grid, start, num_rounds=2)
    assert [stats.used for stats in strategy.rounds] == [6, 6]
    assert len(down) == 12
    assert all(length < size(EXACT, to_params(start)) for length in down)


def test_messages_share_the_encoded_model() -> None:
    grid, strategy = LocalGrid(client_app([QuantizeMod(4)]), 6), FedShift(FedAvg(**ALL), downlink=8)
    messages = list(strategy.configure_train(1, model(), ConfigRecord(), grid))
    records = [message.content.array_records["arrays"] for message in messages]
    assert {id(record) for record in records} == {id(records[0])}
    assert list(records[0]) == [KEY]


def test_scaffold_keeps_the_mean_of_controls() -> None:
    """Clients and server compute controls from the decoded model, so c stays the mean of all c_i."""
    inner = Scaffold(FedAvg(**ALL))
    grid = LocalGrid(client_app([ScaffoldMod(4, error_feedback=True)], quadratic), 6, seed=1)
    FedShift(inner, downlink=COARSE).start(grid, model(), num_rounds=3)
    assert inner.control is not None
    for name, c in inner.control.items():
        mean = torch.stack([own[name] for own in controls(grid)]).mean(0)
        torch.testing.assert_close(c, mean, rtol=1e-4, atol=1e-5)


def test_without_the_mod_a_sentence_says_so() -> None:
    with pytest.raises(NoUploadsError) as refused:
        run(FedShift(FedAvg(**ALL), downlink=8), [], rounds=1)
    assert NO_MOD in str(refused.value)


def test_32_bits_are_the_exact_model() -> None:
    assert FedShift(FedAvg(), downlink=32).downlink is None


@pytest.mark.parametrize("bad", ["lean", 9, 0, True])
def test_bad_arguments_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="FedShift\\(downlink="):
        FedShift(FedAvg(), downlink=bad)
