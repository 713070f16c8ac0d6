"""Lossy broadcasts on Flower's grid: the same bytes as in one process, and nodes that lose what they hold."""

from typing import Any

import pytest
from flwr.app import Message

from fedshift.codecs.exact import EXACT
from fedshift.flower.app.client_runner import HELD
from fedshift.wire.writer import size
from tests.federations import same, settings
from tests.flower.experiments import grid_of, in_process, on_flower, plain
from tests.test_downlink import LINKS, UP


@pytest.mark.parametrize("nodes", [12, 5, 1])
@pytest.mark.parametrize("name", LINKS)
def test_bytes_are_those_of_one_process(name: str, nodes: int) -> None:
    experiment = settings(downlink=LINKS[name], uplink=UP, train={"rounds": 6})
    reference = in_process(experiment)
    expected = plain(list(reference))
    grid = grid_of(experiment, nodes)
    run = on_flower(experiment, grid)
    assert plain(list(run)) == expected
    assert grid.errors == []
    assert same(run.params, reference.params)
    assert same(run.state.down, reference.state.down)


def test_requests_with_updates_are_shorter_than_the_model() -> None:
    experiment = settings(downlink=LINKS["lean"], train={"rounds": 4, "cohort": 12}, model={"args": {"hidden": 64}})
    grid, lengths = grid_of(experiment, nodes=2), list[int]()
    push = grid.push_messages

    def measured(messages: Any) -> Any:
        kept = list(messages)
        for message in kept:
            if message.metadata.message_type == "train":
                lengths.append(sum(len(array.data) for array in message.content["arrays"].values()))
        return push(kept)

    grid.push_messages = measured  # type: ignore[method-assign]
    run = on_flower(experiment, grid)
    list(run)
    full = size(EXACT, run.params)
    assert lengths[:2] == [full, full]
    assert all(length < 0.4 * full for length in lengths[2:])


def test_a_node_that_lost_the_broadcast_fails_once_and_then_gets_the_model() -> None:
    experiment = settings(downlink=LINKS["lean"], train={"rounds": 4, "cohort": 12})
    grid = grid_of(experiment, nodes=3)
    rounds = list[int]()

    def forget(reply: Message) -> Message:
        rounds.extend([1] * (reply.metadata.message_type == "train"))
        if len(rounds) == 3 and HELD in grid.contexts[grid.node_of(1)].state:  # after the first round
            grid.contexts[grid.node_of(1)].state.pop(HELD)
        return reply

    grid.tamper = forget
    outcomes = list(on_flower(experiment, grid))
    assert [len(outcome.failed) for outcome in outcomes] == [0, 4, 0, 0]
    assert all("does not have the broadcast of round 1" in why for why in outcomes[1].failed.values())
