"""Small recorded runs for tests: started, stopped, forked, damaged, resumed."""

import csv
import functools
import gc
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedshift.cli import app
from fedshift.core.files import read_tensors, write_tensors
from fedshift.core.types import Params
from fedshift.data.datasets import Dataset, load
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import merge
from fedshift.runs.record import finished
from fedshift.runs.run import Run, resume

COMMAND = str(Path(sys.executable).with_name("fedshift"))
SMALL: dict[str, Any] = {
    "data": {"clients": 12},
    "model": {"args": {"hidden": 8}},
    "train": {"rounds": 8, "cohort": 4, "epochs": 1, "batch": 32},
    "engine": {"name": "sequential"},
    "record": {"histograms": 2},
}
FEDAVG = {"uplink": {"bits": {32: 0.5, 4: 0.5}}}
DERIVED = FEDAVG | {"algorithm": {"name": "scaffold"}}
SENT = FEDAVG | {"algorithm": {"name": "scaffold", "control": "sent"}}
FEEDBACK = {"uplink": {"bits": 4, "feedback": True}}
BOTH = {"uplink": {"bits": 4, "feedback": True, "send": "updates"}, "algorithm": {"name": "scaffold"}}
DISK, SELDOM = {"record": {"memory": "disk"}}, {"record": {"checkpoint": 3}}
PROCESSES = {"engine": {"name": "processes", "workers": 2}}

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks and limits as Linux has them")


@functools.cache
def digits() -> Dataset:
    return load("digits")


def small(*changes: dict[str, Any]) -> Experiment:
    return Experiment(**functools.reduce(merge, changes, SMALL))


def go(experiment: Experiment, out: Path) -> None:
    """Start the run, resume it, or do nothing if it is finished."""
    if finished(out):
        return
    started = (out / "settings.toml").exists()
    for _ in resume(out, data=digits()) if started else Run(experiment, out, data=digits()):
        pass


def record(out: Path) -> dict[str, Any]:
    """Content of the record of a finished run, except times."""
    assert (out / "model.safetensors").exists()
    rounds = list(csv.DictReader(io.StringIO((out / "rounds.csv").read_text())))
    texts = {name: out / name for name in ("histograms.jsonl", "clients.csv", "settings.toml")}
    return {
        "rounds": [{key: x for key, x in line.items() if not key.startswith("seconds.")} for line in rounds],
        "model": (out / "model.safetensors").read_bytes(),
        **{name: path.read_text() if path.exists() else None for name, path in texts.items()},
    }


def undisturbed(experiment: Experiment, out: Path) -> dict[str, Any]:
    go(experiment, out)
    content = record(out)
    assert len(content["rounds"]) == experiment.train.rounds
    return content


def fork(work: Callable[[], None]) -> int:
    """Fork a process and return its id; it exits with 0 when the work is done, with 1 and a traceback on failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which do no harm here
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a process; return 0, 1 on failure, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def file_of(path: Path, experiment: Experiment, more: str = "") -> Path:
    path.write_text(experiment.toml() + more)
    return path


def stopped(out: Path, *changes: dict[str, Any], after: int = 5) -> Experiment:
    """Train a run and stop it after some rounds."""
    experiment = small(*changes)
    run = Run(experiment, out, data=digits())
    for outcome in run:
        if outcome.number == after:
            break
    run.close()
    del run
    gc.collect()
    return experiment


def checkpoints(out: Path) -> list[Path]:
    return sorted(out.glob("checkpoint.*.safetensors"))


def everything(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 255]) + content[-8:])


def rewrite(path: Path, change: Callable[[Params], Params]) -> Path:
    """Replace the tensors of a file, with valid checksums."""
    tensors, about = read_tensors(path)
    path.unlink()
    return write_tensors(path.parent, path.name.rsplit(".", 2)[0], change(tensors), about)


def resume_exactly(out: Path, experiment: Experiment, whole: Path) -> list[str]:
    """Resume a run, whose record must equal that of an undisturbed run; return the warnings."""
    warnings: list[str] = []
    list(resume(out, data=digits(), tell=warnings.append))
    assert record(out) == undisturbed(experiment, whole)
    return warnings


def fedshift(*arguments: str | Path) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])
