"""AdaQuantFL: levels from the loss of the broadcast, one round late."""

import math
import re

import pytest
import torch

from fedshift.codecs.qsgd import QSGD
from fedshift.engines import Sequential
from fedshift.policies import AdaQuantFL
from fedshift.rounds.loop import Training
from tests.federations import federation
from tests.policies.stats import doubles, known


def s_of(uplink: object) -> int:
    quantizer = uplink.codec.quantizer  # type: ignore[attr-defined]
    assert isinstance(quantizer, QSGD)
    return quantizer.s


def test_levels_grow_with_the_root_of_the_loss_ratio() -> None:
    policy, state, found = AdaQuantFL(s0=2), AdaQuantFL().init(2, 100), []
    for number, loss in enumerate((None, 2.3, 1.0, 0.5, 0.1, 9.2, 1e-9), 1):
        stats = known(2) if loss is None else known(2, last=torch.tensor([number - 1, 0]), loss=doubles(loss, 77.0))
        uplinks, state = policy.choose(state, number, [0, 1], stats)
        found.append(s_of(uplinks[0]))
        assert uplinks[0] == uplinks[1]
    # 2; ceil(2 sqrt(1)); ceil(2 * 1.5166); ceil(2 * 2.1448); ceil(2 * 4.7958); ceil(2 * 0.5); limit
    assert found == [2, 2, 4, 5, 10, 1, 127]


def test_a_round_without_uploads_keeps_the_levels() -> None:
    policy, state = AdaQuantFL(), {"first": torch.tensor(1.0).double(), "loss": torch.tensor(0.25).double()}
    uplinks, after = policy.choose(state, 9, [0], known(1, last=torch.tensor([7]), loss=doubles(0.01)))
    assert s_of(uplinks[0]) == 4
    assert after == state


def test_levels_of_a_run_are_those_of_the_losses_at_the_broadcast() -> None:
    """F(w_t) is computed here from the model before each round and the examples of its clients."""
    fed = federation(uplink={"policy": "adaquantfl"})
    engine = Sequential(fed.task)
    training, losses, levels = Training(fed, engine, 5), [], []
    while not training.finished:
        params, opened = training.state.out.params, training.begin()
        assert opened.job is not None
        fed.task.model.load_state_dict(params)
        fed.task.model.eval()
        each, data = [], fed.task.data
        for client in opened.job.clients:
            at = fed.partition.of(client)
            each.append(fed.task.loss(fed.task.model(data.inputs(data.x[at])), data.y[at]).item())
        losses.append(sum(each) / len(each))
        (uploads,) = engine.train([opened.job])
        opened.take(uploads)
        outcome = training.end(opened)
        (label,) = {used.codec for used in outcome.uplinks}
        levels.append(int(re.search(r"s=(\d+)", label)[1]))  # type: ignore[index]
    assert losses[-2] < 0.8 * losses[0]
    assert levels == [2] + [math.ceil(2 * math.sqrt(losses[0] / loss)) for loss in losses[:-1]]
    assert levels[-1] > 2


@pytest.mark.parametrize("s0", [0, 128, 2.5, True])
def test_levels_that_qsgd_does_not_have_are_refused(s0: int) -> None:
    with pytest.raises(ValueError, match=rf"AdaQuantFL\(s0={s0}\): s0, levels per sign, must be an integer from 1 to"):
        AdaQuantFL(s0)


def test_a_size_of_buckets_that_qsgd_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AdaQuantFL\(bucket=-1\): bucket must be a number of values, or 0"):
        AdaQuantFL(bucket=-1)
