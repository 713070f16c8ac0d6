"""Deployments whose parts are killed, or lie: what is learnt is what the others make of it, to the bit."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift.flower.app.processes import descendants
from fedshift.flower.app.superlink import Config
from fedshift.flower.testing import Deployment
from tests.flower.deployed import Learnt, Trial, reference, write_app
from tests.flower.left import alive

pytestmark = pytest.mark.slow

LIES = {  # in rounds 1, 2, ...: what is said of them
    "truncated": "the frame says it has",
    "nan": "one.bias: holds NaN or infinity",
    "wrong-shape": r"one.weight: shape \(30, 40\) where \(40, 30\) is expected",
    "oversized": "but 50001232 are here",
    "unversioned": "the frame begins with b'GARB'",
    "huge": r"update norm \S+e\+\d+ is \S+ times the round's typical norm",
}
NODES: list[Config] = [
    {"partition-id": 0, "uplink": "exact"},
    {"partition-id": 1},
    {"partition-id": 2, "waits": True, "lies": " ".join(LIES)},
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_app(tmp_path_factory.mktemp("app"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One for all tests, with TLS and SuperNodes that prove who they are."""
    before = descendants(os.getpid())
    with Deployment(tmp_path_factory.mktemp("deployed") / "test", NODES) as deployment:
        yield deployment
        running = descendants(os.getpid())
    assert set(alive(running)) <= set(before)


@pytest.fixture
def deployment(whole: Deployment) -> Deployment:
    """What a test has killed is there again."""
    for node in whole.nodes:
        if not node.accepted():
            node.start()
    return whole


def name(deployment: Deployment, number: int) -> str:
    """The id by which the SuperLink knows a node."""
    process = deployment.node(number).process
    assert process is not None
    return str(re.findall(r"SuperNode ID: (\d+)", process.text())[0])


def used(learnt: Learnt) -> list[int]:
    return [told["used"] for told in learnt.rounds]


def test_lies_are_left_out_and_a_node_that_lost_its_memory_says_so(
    app: Path, deployment: Deployment, tmp_path: Path
) -> None:
    """One node lies in every round; another is restarted after the fourth, and its memory was Flower's."""
    config = {"hostile": True, "num-server-rounds": len(LIES), "error-feedback": True, "pause-after": 4}
    trial = Trial(deployment, app, tmp_path / "out", config)
    trial.until("paused")
    deployment.node(1).stop()
    deployment.node(1).start()
    trial.go()
    learnt, log = trial.end()
    assert used(learnt) == [2] * len(LIES)
    liar, forgetful = name(deployment, 2), name(deployment, 1)
    for told, why in zip(learnt.rounds, LIES.values(), strict=True):
        assert list(told["failed"]) == [liar]
        assert re.search(why, told["failed"][liar])
        assert f"round {told['number']}: the upload of node {liar} is left out: {told['failed'][liar]}" in log
    assert [told["reset"] for told in learnt.rounds] == [[], [], [], [], [int(forgetful)], []]
    assert f"round 5: node {forgetful} had lost its memory and started anew" in log
    same = reference(tmp_path / "same", NODES, config, lost=lambda part, number: part == 2, forgets=(1, 4))
    assert learnt.model == same.model


def test_a_training_goes_on_after_the_superlink_was_killed_as_if_nothing_had_been(
    app: Path, deployment: Deployment, tmp_path: Path
) -> None:
    """The server has its checkpoint, and the nodes have their memories on disk, one of them through a crash of its own.

    Two nodes upload by the app's own uplink, lean, and one by that of its own config. The model is sent packed, and
    the reference is trained on plain arrays.
    """
    config = {"checkpoint": True, "pack": True, "lean": True, "state-dir": str(tmp_path / "states"), "wait-in": 2}
    trial = Trial(deployment, app, tmp_path / "out", config)
    trial.until("training-2")
    deployment.node(1).kill()
    deployment.superlink.kill()
    deployment.superlink.restart()
    deployment.node(1).start()
    trial.go()
    trial.start()
    learnt, log = trial.end()
    assert "Going on after round 1" in log
    assert [told["number"] for told in learnt.rounds] == [2, 3]
    assert used(learnt) == [3, 3]
    assert [told["lossy"] for told in learnt.rounds] == [2, 2]
    assert [told["reset"] for told in learnt.rounds] == [[], []]
    assert learnt.model == reference(tmp_path / "same", NODES, config).model


def test_a_round_ends_without_a_supernode_that_was_killed_in_it(
    app: Path, deployment: Deployment, tmp_path: Path
) -> None:
    """The SuperLink tells once the node's lease of 60 s has lapsed, long before the timeout of the round."""
    config = {"nodes": 2, "wait-in": 2}
    trial = Trial(deployment, app, tmp_path / "out", config)
    trial.until("training-2")
    deployment.node(2).kill()
    gone = name(deployment, 2)
    learnt, log = trial.end()
    assert used(learnt) == [3, 2, 2]
    assert list(learnt.rounds[1]["failed"]) == [gone]
    assert "failed to report a heartbeat" in learnt.rounds[1]["failed"][gone]
    assert f"round 2: the upload of node {gone} is left out" in log
    assert learnt.rounds[2]["failed"] == {}  # it is not asked any more
    same = reference(tmp_path / "same", NODES, config, lost=lambda part, number: part == 2 and number > 1)
    assert learnt.model == same.model
