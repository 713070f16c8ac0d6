"""The option `--track`: sweeps, resumed runs, and errors."""

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.plugins.hparams.api_pb2 import Status

from fedshift.core.extras import needs
from fedshift.runs.record import finished
from tests.runs import fedshift, file_of, small
from tests.track.test_tensorboard import scalars, sessions
from tests.track.test_wandb import history, records
from tests.track.tracking import column

HIDDEN = """
import sys
import fedshift.cli

class Hidden(str):  # a library, as if it were not installed
    def find_spec(self, name, path, target=None):
        if name == self:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
"""


def test_each_run_of_a_sweep_is_tracked_and_grouped(tmp_path: Path) -> None:
    grid = file_of(tmp_path / "grid.toml", small({"train": {"rounds": 6}}), '[sweep]\n"train.lr" = [0.1, 1e30]\n')
    done = fedshift("sweep", grid, "--quiet", "--out", tmp_path / "out", "--track", "tensorboard", "--track", "wandb")
    assert "1 of 2 runs failed" in done.stderr
    good, bad = tmp_path / "out" / "lr-0.1_seed-0", tmp_path / "out" / "lr-1e+30_seed-0"
    for out, rounds, status, code in (good, 6, "STATUS_SUCCESS", 0), (bad, 4, "STATUS_FAILURE", 1):
        assert [step for step, _ in scalars(out, "test/loss")] == [*range(1, rounds + 1)]
        assert history(out, "test/loss") == [*enumerate(column(out, "loss"), 1)]
        assert sessions(out)["_hparams_/session_end_info"].session_end_info.status == Status.Value(status)
        (run,) = (one.run for one in records(out) if one.WhichOneof("record_type") == "run")
        assert (run.display_name, run.run_group) == (out.name, "out")
        (ended,) = (one.exit for one in records(out) if one.WhichOneof("record_type") == "exit")
        assert ended.exit_code == code


def test_packed_runs_are_tracked(tmp_path: Path) -> None:
    batched = small({"train": {"rounds": 2}, "engine": {"name": "batched"}})
    grid = file_of(tmp_path / "grid.toml", batched, "[sweep]\nseed = [0, 1]\n")
    done = fedshift("sweep", grid, "--quiet", "--out", tmp_path / "out", "--track", "tensorboard")
    assert done.exit_code == 0, done.stderr
    for out in (tmp_path / "out" / "seed-0", tmp_path / "out" / "seed-1"):
        assert [step for step, _ in scalars(out, "test/loss")] == [1, 2]


def test_a_stopped_run_is_resumed_in_the_trackers(tmp_path: Path) -> None:
    out = tmp_path / "one"
    done = fedshift(
        "run", file_of(tmp_path / "one.toml", small()), "--out", out, "--minutes", "0", "--track", "tensorboard", "-q"
    )
    assert done.exit_code == 0, done.stderr
    assert [step for step, _ in scalars(out, "test/loss")] == [1]
    assert sessions(out)["_hparams_/session_end_info"].session_end_info.status == Status.Value("STATUS_UNKNOWN")
    assert fedshift("resume", out, "--track", "tensorboard", "-q").exit_code == 0
    assert [step for step, _ in scalars(out, "test/loss")] == [*range(1, 9)]


def test_a_tracker_that_fails_is_reported_once_and_the_run_finishes(tmp_path: Path) -> None:
    out = tmp_path / "one"
    fedshift("run", file_of(tmp_path / "one.toml", small()), "--out", out, "--minutes", "0", "-q")
    (out / "tensorboard").write_text("not a folder")
    done = fedshift("resume", out, "--track", "tensorboard", "-q")
    assert done.exit_code == 0
    assert done.stderr.count("--track tensorboard: ") == 1
    assert "training continues without it" in done.stderr
    assert finished(out)
    assert (out / "tensorboard").read_text() == "not a folder"


def test_an_unknown_tracker_is_reported_before_the_run_starts(tmp_path: Path) -> None:
    for name, hint in ("tensorbord", "did you mean 'tensorboard'?"), ("x", "known are tensorboard, mlflow, wandb"):
        done = fedshift("run", "--preset", "smoke", "--out", tmp_path / "one", "--track", name)
        assert (done.exit_code, done.stderr) == (2, f"fedshift: --track {name}: no such tracker; {hint}\n")
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_reported_before_the_run_starts(name: str, tmp_path: Path) -> None:
    arguments = ["fedshift", "run", "--preset", "smoke", "--out", str(tmp_path / "one"), "--track", name]
    program = f"{HIDDEN}\nsys.meta_path.insert(0, Hidden({name!r}))\nsys.argv = {arguments}\nfedshift.cli.app()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"fedshift: --track {name}: {needs(name)}\n"
    assert not (tmp_path / "one").exists()


def test_a_tracker_that_cannot_be_loaded_is_reported_before_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise TypeError('Descriptors cannot\\nbe created')")  # as for a wrong protobuf
    arguments = ["fedshift", "run", "--preset", "smoke", "--out", str(tmp_path / "one"), "--track", "wandb"]
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nsys.argv = {arguments}\nimport fedshift.cli\n"
    done = subprocess.run([sys.executable, "-c", f"{program}fedshift.cli.app()"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == ("fedshift: --track wandb: cannot be loaded: TypeError: Descriptors cannot be created\n")
    assert not (tmp_path / "one").exists()
