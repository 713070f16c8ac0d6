"""Files for `wandb sync`, in W&B's format, have the values of the record."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from tests.runs import SELDOM, small
from tests.track.tracking import column, train

BLOCK, LAST = 32768, (1, 4)  # of LevelDB's log, which the file is: a record's parts end with one of these kinds


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def log(data: bytes) -> Iterator[bytes]:
    """Records of a log: each part has a checksum, a length and a kind, and does not cross the end of a block."""
    assert data.startswith(b":W&B")
    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # still being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in LAST:
            yield whole
            whole = b""


def records(out: Path) -> list[Any]:
    """All records of a run, oldest first."""
    found = []
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        found += whole(file)
    return found


def whole(file: Path) -> list[Any]:
    """Records of a complete file; W&B's process may write the last one a moment after the end."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        found = [Record.FromString(data) for data in log(file.read_bytes())]
        if any(one.WhichOneof("record_type") == "exit" for one in found):
            return found
        time.sleep(0.02)
    pytest.fail(f"{file}: has no end")


def history(out: Path, name: str) -> list[tuple[int, float]]:
    entries = [one.history for one in records(out) if one.WhichOneof("record_type") == "history"]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.item} for one in entries
    ]
    return [(row["_step"], row[name]) for row in rows]


def test_wandb_has_the_values_of_the_record(tmp_path: Path) -> None:
    out = tmp_path / "one"
    assert train(small(), out, "wandb", 8) == []
    for name, known in {"test/accuracy": "accuracy", "layers/step/fc1.weight": "step.fc1.weight"}.items():
        assert history(out, name) == list(enumerate(column(out, known), 1))
    (run,) = (one.run for one in records(out) if one.WhichOneof("record_type") == "run")
    config = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in run.config.update}
    assert (run.display_name, run.project, config["train.batch"]) == ("one", "fedshift", 32)
    (ended,) = (one.exit for one in records(out) if one.WhichOneof("record_type") == "exit")
    assert ended.exit_code == 0


def test_rounds_that_are_trained_again_are_logged_once_in_the_same_run(tmp_path: Path) -> None:
    out = tmp_path / "one"
    assert train(small(SELDOM), out, "wandb", 5) == []
    assert train(small(SELDOM), out, "wandb", 8) == []  # from round 3 on
    assert history(out, "test/loss") == list(enumerate(column(out, "loss"), 1))
    runs = [one.run for one in records(out) if one.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {json.loads((out / "tracked.wandb.json").read_text())["id"]}
    kinds = [one.WhichOneof("record_type") for one in records(out)]
    assert kinds.count("preempting") == 1  # it was stopped and resumed


def test_settings_of_wandb_are_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    out = tmp_path / "one"
    assert train(small(), out, "wandb", 8) == []
    assert not (out / "wandb").exists()
    (run,) = (one.run for one in records(tmp_path / "elsewhere") if one.WhichOneof("record_type") == "run")
    assert run.project == "mine"


KILLED = """
import sys, time, psutil
from pathlib import Path
from fedshift.track import threads, tracked
from tests.runs import digits, small, Run

out = Path(sys.argv[1])
threads.SILENT = threads.WAIT = 600.0  # no warnings on a busy machine
for outcome in tracked(Run(small(), out, data=digits()), "wandb", tell=print):
    if outcome.number == 2:
        while not (out / "tracked.wandb.json").exists():
            time.sleep(0.01)
        [core] = [one for one in psutil.Process().children() if "wandb-core" in one.name()]
        core.kill()
        core.wait()
"""


def test_a_killed_wandb_process_does_not_stop_the_run(tmp_path: Path) -> None:
    alone = {key: x for key, x in os.environ.items() if key != "WANDB_SERVICE"}  # not with the process of these tests
    program = [sys.executable, "-c", KILLED, str(tmp_path / "one")]
    done = subprocess.run(program, capture_output=True, text=True, env=alone)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert done.stdout.startswith("--track wandb: Connection")
    assert len(column(tmp_path / "one", "loss")) == 8


def test_rounds_trained_while_wandb_was_disabled_are_logged_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "one"
    assert train(small(), out, "wandb", 2) == []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for rounds in (3, 5):
        assert train(small(), out, "wandb", rounds) == []
    monkeypatch.delenv("WANDB_MODE")
    assert train(small(), out, "wandb", 8) == []
    assert history(out, "test/loss") == list(enumerate(column(out, "loss"), 1))


def test_an_unknown_mode_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sideways")
    (warning,) = train(small(), tmp_path / "one", "wandb", 8)
    assert warning.startswith("--track wandb: ")
    assert len(column(tmp_path / "one", "loss")) == 8
