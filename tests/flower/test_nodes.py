"""Nodes that leave, return, lose their memory, or never connect, in an experiment."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

from fedshift.flower.addon.partitions import _number
from fedshift.flower.app.apps import client_app
from fedshift.flower.testing import LocalGrid
from fedshift.wire.writer import header
from tests.federations import same, settings
from tests.flower.experiments import DATA, grid_of, in_process, on_flower, plain
from tests.flower.test_faults import BAD, SCAFFOLD, without


def test_a_node_that_leaves_is_left_out_and_keeps_its_memory_when_it_returns() -> None:
    reference, expected = without(SCAFFOLD, BAD, at=3)
    grid = grid_of(SCAFFOLD, 5)
    run, outcomes = on_flower(SCAFFOLD, grid), []
    for outcome in run:
        outcomes.append(outcome)
        if outcome.number == 2:
            grid.leave(grid.node_of(BAD))
        if outcome.number == 3:
            grid.back(grid.node_of(BAD))
    assert outcomes[2].failed == {BAD: f"its node, partition {BAD}, is not connected"}
    assert [outcome._replace(failed={}) for outcome in plain(outcomes)] == expected
    assert same(run.params, reference.params)
    assert same(run.state.out.control, reference.state.out.control)


def test_a_restarted_node_has_no_correction_and_reports_a_lost_memory() -> None:
    reference = in_process(SCAFFOLD)
    for outcome in reference:
        if outcome.number == 3:  # its error starts at zero, its control at the server's
            reference.memory.put(BAD, dict(reference.state.out.control))
    grid, messages, resets = grid_of(SCAFFOLD, 5), list[str](), list[tuple[str, str]]()

    def look(reply: Message) -> Message:
        for name, array in reply.content.array_records.get("frames", ArrayRecord()).items():
            if header(array.data).reset:
                resets.append((reply.metadata.group_id, name))
        return reply

    grid.tamper = look
    run = on_flower(SCAFFOLD, grid, tell=messages.append)
    for outcome in run:
        assert not outcome.failed
        if outcome.number == 3:
            grid.back(grid.node_of(BAD), anew=True)
    assert resets == [("4", str(BAD))]
    assert messages == [f"round 4: client {BAD} lost its memory, which was reset (1 so far)"]
    assert same(run.params, reference.params)
    assert same(run.state.out.control, reference.state.out.control)


def test_all_nodes_restarted_with_files_lose_nothing(tmp_path: Path) -> None:
    reference = in_process(SCAFFOLD)
    list(reference)
    grid, messages = grid_of(SCAFFOLD, 5, state_dir=tmp_path / "state"), list[str]()
    run = on_flower(SCAFFOLD, grid, tell=messages.append)
    for _ in run:
        for node in list(grid.contexts):
            grid.back(node, anew=True)
    assert messages == []
    assert same(run.params, reference.params)


def test_a_run_waits_for_all_nodes() -> None:
    class Late(LocalGrid):
        calls = 0

        def get_node_ids(self) -> list[int]:
            self.calls += 1
            return super().get_node_ids()[: 3 * self.calls]

    experiment = settings(train={"rounds": 1})
    reference = in_process(experiment)
    list(reference)
    run = on_flower(experiment, Late(client_app(experiment, data=DATA), 5), wait=60.0)
    list(run)
    assert same(run.params, reference.params)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([], r"no node has connected after 0.1 s"),
        ([{}], r"no node has connected; node \d+ is ignored: its node config contains no partition-id"),
        (
            [{"partition-id": 1, "num-partitions": 3}],
            r"1 of 3 nodes have connected, partitions 0, 2 are missing after 0.1 s",
        ),
        (
            [{"partition-id": 0, "num-partitions": 2}, {"partition-id": 0, "num-partitions": 3}],
            r"1 of 2 nodes have connected, partitions 1 are missing; node \d+ is ignored: it reports partition 0 of 3",
        ),
    ],
)
def test_a_run_that_waited_too_long_names_the_missing_nodes(nodes: list[dict[str, Any]], why: str) -> None:
    experiment = settings()
    with pytest.raises(ConnectionError, match=why):
        next(on_flower(experiment, LocalGrid(client_app(experiment, data=DATA), nodes), wait=0.1))


def test_control_characters_of_a_node_are_escaped_in_messages() -> None:
    class Rude(ClientApp):
        def __call__(self, message: Message, context: Any) -> Message:
            raise ValueError("\x1b[2J\rgone\u202e")

    with pytest.raises(ConnectionError, match=r"is ignored: .*\\x1b\[2J gone\\u202e"):
        next(on_flower(settings(), LocalGrid(Rude(), 2), wait=0.1))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "x", 10**30])
def test_a_partition_id_that_is_no_number_is_ignored(value: float | str) -> None:
    assert _number(value) in (None, 10**30)
