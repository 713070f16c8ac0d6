"""The command has the same result if it is killed or interrupted."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.gate import METRIC, Gate
from tests.processes import assert_gone, children, wait_until
from tests.runs import (
    BOTH,
    COMMAND,
    DERIVED,
    PROCESSES,
    file_of,
    linux,
    record,
    small,
    undisturbed,
)

LONG = {"train": {"rounds": 60}, "model": {"args": {"hidden": 32}}}


def command(*arguments: str | Path, gate: Gate | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (gate.environment if gate else {}),
        preexec_fn=heeding,
    )


def heeding() -> None:
    """Enable Ctrl-C, which a shell disables for background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_round(process: "subprocess.Popen[str]", number: int) -> None:
    """Wait until a process has printed this round, with --json."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("{") and json.loads(line).get("round") == number:
            return
    pytest.fail(f"it ended before round {number}: {process.stderr.read() if process.stderr else ''}")


@linux
def test_the_command_killed_and_interrupted_has_the_same_result(tmp_path: Path) -> None:
    experiment, out = small(BOTH, PROCESSES, METRIC, LONG), tmp_path / "run"
    gate = Gate(tmp_path / "killed", out, 10)
    process = command("run", file_of(tmp_path / "a.toml", experiment), "--out", out, "--json", gate=gate)
    wait_for_round(process, 10)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    gate.open()
    process.communicate()
    assert_gone(workers)

    gate = Gate(tmp_path / "interrupted", out, 25)
    process = command("resume", out, "--json", gate=gate)
    wait_for_round(process, 25)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches every process of the terminal
    gate.open()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert f"with `fedshift resume {out}`" in errors
    assert "Traceback" not in errors

    process = command("resume", out, "--quiet")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert record(out) == undisturbed(experiment, tmp_path / "whole")


@linux
def test_a_sweep_interrupted_and_killed_has_the_same_result(tmp_path: Path) -> None:
    experiment, out = small(DERIVED, METRIC, LONG), tmp_path / "sweep"
    grid = file_of(tmp_path / "a.toml", experiment, "\n[sweep]\nseed = [1, 2]\n")
    gate = Gate(tmp_path / "interrupted", out, 1)
    process = command("sweep", grid, "--out", out, gate=gate)
    wait_until(lambda: len(list(out.glob("*/checkpoint.*"))) >= 1)
    os.killpg(process.pid, signal.SIGINT)
    gate.open()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert f"Stopped; resume with `fedshift resume {out}`" in errors
    assert "Traceback" not in errors

    gate = Gate(tmp_path / "killed", out, 20)
    process = command("resume", out, gate=gate)
    wait_until(lambda: any(len(path.read_text().splitlines()) > 20 for path in out.glob("*/rounds.csv")))
    workers = children(process.pid)
    process.kill()
    gate.open()
    process.communicate()
    assert_gone(workers)

    process = command("resume", out)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    runs = sorted(path.parent for path in out.glob("*/settings.toml"))
    assert len(runs) == 2
    for seed, folder in enumerate(runs, 1):
        whole = undisturbed(experiment.changed(seed=seed), tmp_path / f"whole {seed}")
        content = record(folder)
        assert (content["model"], content["rounds"]) == (whole["model"], whole["rounds"])
