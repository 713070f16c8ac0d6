"""A folder is used by one run at a time, by whatever process and path."""

import functools
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

import fedshift.core.files as files_module
from fedshift.core.files import RunError
from fedshift.runs.run import resume
from tests.runs import (
    COMMAND,
    DERIVED,
    FEDAVG,
    digits,
    ended,
    everything,
    fedshift,
    file_of,
    fork,
    linux,
    record,
    small,
    stopped,
    undisturbed,
)


@linux
def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    run = resume(out, data=digits())
    next(run)
    before = everything(out)
    done = subprocess.run([COMMAND, "resume", str(out)], capture_output=True, text=True, check=False)
    holder = f"(process {os.getpid()}: {' '.join(Path('/proc/self/cmdline').read_text().split(chr(0)))[:100].rstrip()}"
    assert done.returncode == 2
    assert done.stderr.startswith(f"fedshift: {out}: another run is writing to this folder {holder}")
    with pytest.raises(RunError, match="another run is writing to this folder"):
        resume(out, data=digits())
    assert everything(out) == before
    list(run)
    assert record(out) == undisturbed(experiment, tmp_path / "whole")


@linux
def test_a_refused_run_does_not_release_the_lock(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    run = resume(tmp_path / "run", data=digits())
    with pytest.raises(RunError, match="another run is writing to this folder"):
        resume(tmp_path / "run", data=digits())
    refused = ended(fork(functools.partial(_refused, tmp_path / "run"))) == 0
    run.close()
    assert refused


def test_a_run_that_is_closed_twice_does_not_release_the_lock_of_another(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    first = resume(tmp_path / "run", data=digits())
    first.close()
    second = resume(tmp_path / "run", data=digits())
    first.close()
    third = None
    with suppress(RunError):
        third = resume(tmp_path / "run", data=digits())
        third.close()
    second.close()
    assert third is None


@linux
def test_a_folder_is_the_same_by_another_path(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    run = resume(tmp_path / "run", data=digits())
    try:
        _refused(tmp_path / "link")
    finally:
        run.close()


def _refused(out: Path) -> None:
    files_module._held.discard(out.absolute())  # a fork's copy: another process would not have it
    with pytest.raises(RunError, match="another run is writing to this folder"):
        resume(out, data=digits()).close()


@pytest.mark.parametrize("first", ["run", "sweep"])
def test_a_run_and_a_sweep_do_not_share_a_folder(first: str, tmp_path: Path) -> None:
    experiment, out = small(FEDAVG, {"train": {"rounds": 1}}), tmp_path / "out"
    grid = file_of(tmp_path / "grid.toml", experiment, "\n[sweep]\nseed = [1]\n")
    fedshift(first, file_of(tmp_path / "a.toml", experiment) if first == "run" else grid, "--out", out)
    before = everything(out)
    second = ["sweep", grid] if first == "run" else ["run", tmp_path / "a.toml"]
    file_of(tmp_path / "a.toml", experiment)
    assert fedshift(*map(str, second), "--out", out).exit_code == 2
    assert everything(out) == before
