"""Deployments with processes that are killed, or nodes that lie: the result is bit-identical to that of the others."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift.flower.app.processes import descendants
from fedshift.flower.app.superlink import Config
from fedshift.flower.testing import Deployment
from tests.flower.deployed import Result, Trial, reference, write_app
from tests.flower.left import alive

pytestmark = pytest.mark.slow

LIES = {  # in rounds 1, 2, ...: expected reasons
    "truncated": "the frame was damaged in transit or is incomplete",
    "nan": "one.bias: contains NaN or infinity",
    "wrong-shape": r"one.weight: shape \(30, 40\) instead of \(40, 30\)",
    "oversized": "the checksum does not match",
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
    """One deployment for all tests, with TLS and authenticated SuperNodes."""
    before = descendants(os.getpid())
    with Deployment(tmp_path_factory.mktemp("deployed") / "test", NODES) as deployment:
        yield deployment
        running = descendants(os.getpid())
    assert set(alive(running)) <= set(before)


@pytest.fixture
def deployment(whole: Deployment) -> Deployment:
    """The deployment, after a restart of the SuperNodes that a test has killed."""
    for node in whole.nodes:
        if not node.accepted():
            node.start()
    return whole


def name(deployment: Deployment, number: int) -> str:
    """Node id at the SuperLink."""
    process = deployment.node(number).process
    assert process is not None
    return str(re.findall(r"SuperNode ID: (\d+)", process.text())[0])


def used(result: Result) -> list[int]:
    return [stats["used"] for stats in result.rounds]


def test_lies_are_left_out_and_a_node_reports_that_it_lost_its_memory(
    app: Path, deployment: Deployment, tmp_path: Path
) -> None:
    """One node lies in every round; another, with its memory in Flower's state, is restarted after the fourth."""
    config = {"hostile": True, "num-server-rounds": len(LIES), "error-feedback": True, "pause-after": 4}
    trial = Trial(deployment, app, tmp_path / "out", config)
    trial.until("paused")
    deployment.node(1).stop()
    deployment.node(1).start()
    trial.go()
    result, log = trial.end()
    assert used(result) == [2] * len(LIES)
    liar, forgetful = name(deployment, 2), name(deployment, 1)
    for stats, why in zip(result.rounds, LIES.values(), strict=True):
        assert list(stats["failed"]) == [liar]
        assert re.search(why, stats["failed"][liar])
        assert f"round {stats['number']}: the upload of node {liar} is left out: {stats['failed'][liar]}" in log
    assert [stats["reset"] for stats in result.rounds] == [[], [], [], [], [int(forgetful)], []]
    assert f"round 5: node {forgetful} lost its memory, which was reset" in log
    same = reference(tmp_path / "same", NODES, config, lost=lambda part, number: part == 2, forgets=(1, 4))
    assert result.model == same.model


def test_a_training_resumes_to_the_same_bytes_after_the_superlink_was_killed(
    app: Path, deployment: Deployment, tmp_path: Path
) -> None:
    """The server has its checkpoint, and the nodes have their memories on disk; one of the nodes is killed as well.

    Two nodes use the app's uplink, with error feedback, and one that of its node config. The model is sent packed, and
    the reference is trained on plain arrays.
    """
    config = {"checkpoint": True, "pack": True, "steps": True, "state-dir": str(tmp_path / "states"), "wait-in": 2}
    trial = Trial(deployment, app, tmp_path / "out", config)
    trial.until("training-2")
    deployment.node(1).kill()
    deployment.superlink.kill()
    deployment.superlink.restart()
    deployment.node(1).start()
    trial.go()
    trial.start()
    result, log = trial.end()
    assert "Resuming after round 1" in log
    assert [stats["number"] for stats in result.rounds] == [2, 3]
    assert used(result) == [3, 3]
    assert [stats["lossy"] for stats in result.rounds] == [2, 2]
    assert [stats["reset"] for stats in result.rounds] == [[], []]
    assert result.model == reference(tmp_path / "same", NODES, config).model


def test_a_round_ends_without_a_supernode_that_was_killed_in_it(
    app: Path, deployment: Deployment, tmp_path: Path
) -> None:
    """The SuperLink reports it when the node's lease of 60 s has expired, long before the timeout of the round."""
    config = {"nodes": 2, "wait-in": 2}
    trial = Trial(deployment, app, tmp_path / "out", config)
    trial.until("training-2")
    deployment.node(2).kill()
    killed = name(deployment, 2)
    result, log = trial.end()
    assert used(result) == [3, 2, 2]
    assert list(result.rounds[1]["failed"]) == [killed]
    assert "failed to report a heartbeat" in result.rounds[1]["failed"][killed]
    assert f"round 2: the upload of node {killed} is left out" in log
    assert result.rounds[2]["failed"] == {}  # it gets no message any more
    same = reference(tmp_path / "same", NODES, config, lost=lambda part, number: part == 2 and number > 1)
    assert result.model == same.model
