"""`fedshift run --engine flower`: the command, and real simulations under it."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.cli import running
from fedshift.experiment.settings import Experiment
from fedshift.flower.app.channel import Channel
from fedshift.flower.app.simulate import write_app
from fedshift.flower.app.superlink import Config
from fedshift.flower.testing import Deployment
from fedshift.rounds.loop import DivergedError
from fedshift.runs.events import Event
from fedshift.runs.run import Run
from tests.runs import COMMAND, fedshift, file_of, record, small

BOTH = {"uplink": {"bits": "32+4", "feedback": True}, "algorithm": {"name": "scaffold"}}


def test_events_are_read_once_and_whole(tmp_path: Path) -> None:
    sender, receiver = Channel(tmp_path), Channel(tmp_path)
    assert list(receiver.receive()) == []
    sender.send(Event("message", "a\nb"))
    sender.send(Event("round", "", 1, None, 0.5, 7))
    assert list(receiver.receive()) == [Event("message", "a\nb"), Event("round", "", 1, None, 0.5, 7)]
    with open(sender.file, "ab") as file:
        file.write(b'["do')
    assert list(receiver.receive()) == []
    with open(sender.file, "ab") as file:
        file.write(b'ne"]\n')
    assert list(receiver.receive()) == [Event("done")]


def test_an_error_of_a_simulation_is_shown_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(*_: Any) -> Iterator[Event]:
        yield Event("message", "client 3 lost its memory")
        yield Event("round", "", 1, 0.5, 1.5, 100)
        raise DivergedError("no usable upload")

    monkeypatch.setattr(running, "on_flower", simulate)
    path = file_of(tmp_path / "a.toml", small())
    done = fedshift("run", path, "--engine", "flower", "--out", tmp_path / "run", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"run": "run", "round": 1, "score": 0.5, "loss": 1.5, "bytes_up": 100}
    assert done.stderr.splitlines() == ["client 3 lost its memory", "fedshift: no usable upload"]


def same_as_here(experiment: Experiment, out: Path, folder: Path) -> bool:
    """True if the record of a run on Flower is that of one in this process, except times and engine."""
    list(Run(experiment, folder))
    on_flower, in_process = record(out), record(folder)
    assert on_flower.pop("settings.toml") == in_process.pop("settings.toml").replace('"sequential"', '"flower"')
    return on_flower == in_process


def test_a_simulation_ends_in_the_bytes_of_one_process(tmp_path: Path) -> None:
    experiment = small(BOTH, {"train": {"rounds": 3}})
    path = file_of(tmp_path / "a.toml", experiment)
    command = [COMMAND, "run", str(path), "--engine", "flower", "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *rounds, end = map(json.loads, done.stdout.splitlines())
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert end["out"] == str(tmp_path / "run")
    assert same_as_here(experiment, tmp_path / "run", tmp_path / "here")


@pytest.mark.slow
def test_a_simulation_that_is_stopped_and_resumed_ends_in_the_bytes_of_one_process(tmp_path: Path) -> None:
    experiment, out = small(BOTH, {"train": {"rounds": 40}}), tmp_path / "run"  # many, so that it cannot end before
    path = file_of(tmp_path / "a.toml", experiment)
    command = [COMMAND, "run", str(path), "--engine", "flower", "--out", str(out), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["round"] == 1
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert errors.splitlines()[0].startswith("Stopping after this round")
    assert "resume after round" in errors.splitlines()[1]
    done = subprocess.run([COMMAND, "resume", out, "--quiet"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert same_as_here(experiment, out, tmp_path / "here")
    assert not (out / "nodes").exists()


@pytest.mark.slow
def test_supernodes_that_connect_end_in_the_bytes_of_one_process(tmp_path: Path) -> None:
    """Two real SuperNodes train twelve clients; each message starts a process, so memory is in Flower's state."""
    experiment = small(BOTH, {"train": {"rounds": 3}})
    nodes: list[Config] = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    with Deployment(tmp_path / "flower", nodes) as deployment:
        config = {"experiment": experiment.toml(), "out": str(tmp_path / "run")}
        status, log = deployment.wait(deployment.run(write_app(tmp_path / "app"), config), timeout=600)
    assert status == "finished:completed", log
    assert same_as_here(experiment, tmp_path / "run", tmp_path / "here")
