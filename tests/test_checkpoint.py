"""What can go wrong with the folder of a run: each time a sentence, and nothing is lost that was there."""

import csv
import functools
import gc
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedshift.record as record_module
from fedshift.checkpoint import Checkpoints
from fedshift.cli import app
from fedshift.data.datasets import dataset
from fedshift.files import RunError
from fedshift.loop import DivergedError
from fedshift.memory import Stored
from fedshift.running import Run, resume
from fedshift.settings import Experiment
from fedshift.toml import SettingsError
from tests.test_files import disk, fill, linux, mount
from tests.test_kill import (
    BOTH,
    COMMAND,
    DERIVED,
    DISK,
    FEDAVG,
    SELDOM,
    digits,
    ended,
    file_of,
    fork,
    go,
    record,
    small,
    undisturbed,
)

__all__ = ["disk"]  # a fixture


def stopped(out: Path, *changes: dict[str, Any], after: int = 5) -> Experiment:
    """A run that was stopped after some rounds."""
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


def goes_on(out: Path, experiment: Experiment, whole: Path) -> list[str]:
    """What it tells; it must end like a run that nothing happened to."""
    told: list[str] = []
    list(resume(out, data=digits(), tell=told.append))
    assert record(out) == undisturbed(experiment, whole)
    return told


def fedshift(*arguments: str | Path) -> Result:
    """The command, in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])


# what is kept


def test_two_checkpoints_are_kept_and_only_the_cohort_is_written(tmp_path: Path) -> None:
    run = Run(small(DERIVED), tmp_path / "run", data=digits())
    before: dict[str, int] = {}
    for outcome in run:
        if run.finished:
            break
        kept = [int(path.name.split(".")[1]) for path in checkpoints(tmp_path / "run")]
        assert kept == [number for number in (outcome.number - 1, outcome.number) if number]
        files = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "memory").iterdir()}
        new = files.keys() - before.keys()
        assert len(new) == outcome.arrived
        assert all(name.split(".")[1] == str(outcome.number) for name in new)
        assert all(files[name] == before[name] for name in files.keys() & before.keys())
        before = files
    list(run)
    names = {"about.json", "clients.csv", "rounds.csv", "histograms.jsonl", "settings.toml", "model.safetensors"}
    assert names == {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}


@pytest.mark.parametrize("changes", [[BOTH], [BOTH, DISK, SELDOM]], ids=["ram", "disk"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(changes: list[dict[str, Any]], tmp_path: Path) -> None:
    experiment = stopped(tmp_path / "run", *changes)
    assert goes_on(tmp_path / "run", experiment, tmp_path / "whole") == []


def test_two_files_of_one_round_count_once(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    run = resume(out, data=digits())
    _, newest = checkpoints(out)
    shutil.copy(newest, newest.with_name("checkpoint.000006.00000000.safetensors"))
    next(run)
    run.close()
    assert [path.name[:17] for path in checkpoints(out)] == ["checkpoint.000005", *2 * ["checkpoint.000006"]]
    goes_on(out, experiment, tmp_path / "whole")


# damage


def test_of_a_damaged_checkpoint_the_one_before_is_used(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", BOTH), tmp_path / "run"
    newest = checkpoints(out)[-1]
    damage(newest)
    done = fedshift("resume", out, "--quiet")
    assert done.exit_code == 0, done.output
    told = " ".join(done.stderr.split())
    assert f"{newest}: damaged: its content does not match its checksum; going on from round 4" in told
    assert record(out) == undisturbed(experiment, tmp_path / "whole")


def test_a_damaged_checkpoint_is_put_aside_not_removed(tmp_path: Path) -> None:
    stopped(tmp_path / "run", BOTH)
    newest = checkpoints(tmp_path / "run")[-1]
    damage(newest)
    content = newest.read_bytes()
    resume(tmp_path / "run", data=digits()).close()
    assert newest.with_name(newest.name + ".unusable").read_bytes() == content
    assert not newest.exists()


@pytest.mark.parametrize("what", ["checkpoint.*.safetensors", "memory/*.safetensors"])
def test_when_all_is_damaged_it_says_so_each_time_and_changes_nothing(what: str, tmp_path: Path) -> None:
    stopped(tmp_path / "run", DERIVED)
    for path in (tmp_path / "run").glob(what):
        damage(path)
    before = everything(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(RunError, match=r"damaged: .*damaged: .*; no checkpoint is left to go on from"):
            resume(tmp_path / "run", data=digits())
        assert everything(tmp_path / "run") == before


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_with_a_clients_newest_memory_gone_the_round_before_is_used(how: str, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED, after=2), tmp_path / "run"
    first = {path.name.split(".")[0] for path in (out / "memory").glob("*.1.*")}
    new = next(path for path in (out / "memory").glob("*.2.*") if path.name.split(".")[0] not in first)
    damage(new) if how == "damaged" else new.unlink()
    (told,) = goes_on(out, experiment, tmp_path / "whole")
    assert (str(new) if how == "damaged" else f"{out / 'memory'}: the memory of") in told
    assert told.endswith("; going on from round 1")


def test_leftovers_of_a_write_that_was_cut_short_are_removed(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    for name in "checkpoint.000006.01234567.safetensors", "rounds.csv", "memory/0.6.01234567.safetensors":
        (out / f"{name}.unfinished").write_bytes(b"half")
    assert goes_on(out, experiment, tmp_path / "whole") == []
    assert not list(out.rglob("*.unfinished"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    settings = tmp_path / "run" / "settings.toml"
    settings.write_text(settings.read_text().replace("hidden = 8", "hidden = 9"))
    before = everything(tmp_path / "run")
    with pytest.raises(RunError, match="is of another model or algorithm than the settings say"):
        resume(tmp_path / "run", data=digits())
    assert everything(tmp_path / "run") == before


# the record


@pytest.mark.parametrize("end", ["6,0.5", "6,0.5\n", "nonsense", "\0\0\0\0", "5,5\n7,7\n"])
def test_what_stands_after_the_last_whole_line_is_forgotten(end: str, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    for name in "rounds.csv", "histograms.jsonl":
        with open(out / name, "a") as file:
            file.write(end)
    assert goes_on(out, experiment, tmp_path / "whole") == []


def test_where_the_record_lacks_the_last_round_it_is_trained_again(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", BOTH), tmp_path / "run"
    text = (out / "rounds.csv").read_text()
    (out / "rounds.csv").write_text(text[:-40])
    (told,) = goes_on(out, experiment, tmp_path / "whole")
    assert "the record ends before it, at round 4; going on from round 4" in told


def test_where_the_record_is_lost_it_says_so_and_changes_nothing(tmp_path: Path) -> None:
    stopped(tmp_path / "run", BOTH)
    (tmp_path / "run" / "rounds.csv").write_text((tmp_path / "run" / "rounds.csv").read_text().partition("\n")[0])
    before = everything(tmp_path / "run")
    with pytest.raises(RunError, match="the record ends before it, at round 0; no checkpoint is left"):
        resume(tmp_path / "run", data=digits())
    assert everything(tmp_path / "run") == before


# the folder


def test_a_folder_that_holds_a_run_is_not_run_into(tmp_path: Path) -> None:
    experiment = stopped(tmp_path / "run", FEDAVG)
    before = everything(tmp_path / "run")
    done = fedshift("run", file_of(tmp_path / "a.toml", experiment), "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert f"holds a run already; `fedshift resume {tmp_path / 'run'}` goes on with it" in done.stderr
    assert everything(tmp_path / "run") == before


def test_a_folder_without_a_run_is_not_gone_on_with(tmp_path: Path) -> None:
    for folder in tmp_path, tmp_path / "nowhere":
        done = fedshift("resume", folder)
        assert done.exit_code == 2
        assert f"{folder}: holds no run to go on with (there is no settings.toml)" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    go(small(FEDAVG), tmp_path / "run")
    before = everything(tmp_path / "run")
    done = fedshift("resume", tmp_path / "run")
    assert (done.exit_code, done.stderr.strip()) == (0, f"{tmp_path / 'run'}: this run is finished.")
    assert everything(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("content", "said"), [(b"\xff\xfe", "UTF-8"), (b"a = ", "not TOML"), (b"rouns = 3\n", "unknown setting 'rouns'")]
)
def test_settings_that_cannot_be_read_are_named(content: bytes, said: str, tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    (tmp_path / "run" / "settings.toml").write_bytes(content)
    before = everything(tmp_path / "run")
    with pytest.raises(SettingsError, match=r"run/settings\.toml: .*" + said):
        resume(tmp_path / "run", data=digits())
    assert everything(tmp_path / "run") == before


@linux
def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    run = resume(out, data=digits())
    next(run)
    before = everything(out)
    done = subprocess.run([COMMAND, "resume", str(out)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (2, f"fedshift: {out}: another run is writing to this folder")
    with pytest.raises(RunError, match="another run is writing to this folder"):
        resume(out, data=digits())
    assert everything(out) == before
    list(run)
    assert record(out) == undisturbed(experiment, tmp_path / "whole")


def test_files_of_other_names_are_nobodys_business(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    (out / "checkpoint.best.safetensors").write_bytes(b"mine")
    (out / "checkpoint.my.best.safetensors").write_bytes(b"mine")
    (out / "memory" / "a.b.c.safetensors").write_bytes(b"mine")
    assert goes_on(out, experiment, tmp_path / "whole") == []


# what is not as it should be yet


def test_a_finished_run_is_left_alone_by_the_library_too(tmp_path: Path) -> None:
    go(small(FEDAVG), tmp_path / "run")
    before = everything(tmp_path / "run")
    with suppress(RunError):  # a sentence would do
        resume(tmp_path / "run", data=digits()).close()
    assert everything(tmp_path / "run") == before


@linux
def test_a_run_that_was_refused_in_this_process_does_not_open_the_door(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    run = resume(tmp_path / "run", data=digits())
    with pytest.raises(RunError, match="another run is writing to this folder"):
        resume(tmp_path / "run", data=digits())
    refused = ended(fork(functools.partial(_refused, tmp_path / "run"))) == 0
    run.close()
    assert refused


def test_a_run_that_is_closed_twice_does_not_open_the_door(tmp_path: Path) -> None:
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
    record_module._open.discard(out.absolute())  # a fork's copy: another process would not have it
    with pytest.raises(RunError, match="another run is writing to this folder"):
        resume(out, data=digits()).close()


def test_bytes_that_are_no_text_after_the_last_line_are_forgotten(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    with open(out / "rounds.csv", "ab") as file:
        file.write(b"6,0.\xff\xfe")
    assert goes_on(out, experiment, tmp_path / "whole") == []


def test_a_record_that_is_missing_is_named(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    (tmp_path / "run" / "rounds.csv").unlink()
    with pytest.raises(RunError, match=r"rounds\.csv"):
        resume(tmp_path / "run", data=digits())


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


@linux
def test_killed_while_it_tidies_up_nothing_is_left_lying_about(tmp_path: Path) -> None:
    go(small(DERIVED), tmp_path / "whole")
    stopped(tmp_path / "run", DERIVED)
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path / "run")
    fedshift("resume", tmp_path / "run")
    assert not [*(tmp_path / "run").glob("checkpoint.*"), *(tmp_path / "run").glob("memory")]


# the disk


@linux
@pytest.mark.parametrize("leave", range(0, 40_000, 8192))
def test_a_full_disk_costs_nothing_but_time(leave: int, disk: Path, tmp_path: Path) -> None:
    """Whatever write is the one that fails."""
    experiment = stopped(disk / "run", BOTH, {"train": {"rounds": 12}})
    ballast = fill(disk, leave)
    done = fedshift("resume", disk / "run")
    assert done.exit_code == 2, done.output
    assert "cannot be" in done.stderr
    assert "No space left on device" in done.stderr
    ballast.unlink()
    assert goes_on(disk / "run", experiment, tmp_path / "whole") == []
    assert not list(disk.rglob("*.unfinished"))


@linux
def test_a_read_only_folder_is_named(disk: Path, tmp_path: Path) -> None:
    experiment = stopped(disk / "run", FEDAVG)
    assert not mount("-o", "remount,ro", str(disk))
    before = everything(disk)
    file = file_of(tmp_path / "a.toml", experiment)
    for done, folder in (
        (fedshift("resume", disk / "run"), disk / "run"),
        (fedshift("run", file, "--out", disk / "new"), disk / "new"),
        (fedshift("run", file, "--out", disk / "run"), disk / "run"),
    ):
        assert done.exit_code == 2
        assert f"{folder}: cannot be written to: Read-only file system" in done.stderr
    assert everything(disk) == before
    assert not mount("-o", "remount,rw", str(disk))
    assert goes_on(disk / "run", experiment, tmp_path / "whole") == []


# training that diverges


def test_where_every_client_diverges_the_run_stops_and_says_why(tmp_path: Path) -> None:
    experiment = small(DERIVED, {"train": {"lr": 1e30, "patience": 3, "rounds": 50}})
    done = fedshift("run", file_of(tmp_path / "a.toml", experiment), "--out", tmp_path / "run")
    assert done.exit_code == 1, done.output
    assert "no usable upload in 3 rounds in a row; the last: " in done.stderr
    with open(tmp_path / "run" / "rounds.csv", newline="") as file:
        rounds = list(csv.DictReader(file))
    skipped = [line for line in rounds if line["arrived"] == "0"]
    assert skipped == rounds[-2:]
    assert all(len(line["failed"].split()) == 4 for line in skipped)
    for path in checkpoints(tmp_path / "run"):
        assert all(bool(x.isfinite().all()) for x in load_file(path).values())
    again = fedshift("resume", tmp_path / "run")
    assert again.exit_code == 1
    assert again.stderr.splitlines()[-1] == done.stderr.splitlines()[-1]


@pytest.mark.parametrize("changes", [FEDAVG, DERIVED, BOTH], ids=["fedavg", "scaffold", "error feedback"])
def test_a_client_that_diverges_is_left_out_and_the_others_go_on(changes: dict[str, Any], tmp_path: Path) -> None:
    """Label 0 belongs to huge inputs, and clients hold one label each."""
    draw = np.random.default_rng(0)
    y = np.arange(200) % 5
    x = draw.normal(size=(200, 6)).astype(np.float32) + y[:, None]
    x[y == 0] = 1e30
    data = dataset(x, y, x[y != 0], y[y != 0], name="own", classes=5)
    more = {"data": {"clients": 5, "partition": "labels", "labels": 1}, "train": {"rounds": 6, "cohort": 5}}
    run = Run(small(changes, more), tmp_path / "run", data=data)
    (bad,) = (client for client in range(5) if int(data.y[run.fed.partition.order][40 * client]) == 0)
    for outcome in run:
        assert list(outcome.failed) == [bad]
        assert outcome.arrived == 4
        assert outcome.loss is not None
        assert torch.isfinite(torch.tensor(outcome.loss))
        assert not run.memory.get(bad)
    assert all(bool(x.isfinite().all()) for x in load_file(tmp_path / "run" / "model.safetensors").values())
    with open(tmp_path / "run" / "rounds.csv", newline="") as file:
        assert [line["failed"] for line in csv.DictReader(file)] == 6 * [str(bad)]


def test_rounds_without_a_usable_upload_leave_the_state_as_it_was(tmp_path: Path) -> None:
    run = Run(small(DERIVED, {"train": {"lr": 1e30, "patience": 4}}), tmp_path / "run", data=digits())
    states = [run.state]
    with pytest.raises(DivergedError, match="no usable upload in 4 rounds in a row"):
        states.extend(run.state for _ in run)
    number, out, server, skipped = states[-1]
    assert skipped == 3
    assert states[-4] == (number - 3, out, server, 0)  # the very same tensors
    again = resume(tmp_path / "run", data=digits())
    assert (again.state.number, again.state.skipped) == (number, 3)
    again.close()


def test_a_checkpoint_gives_back_the_state_in_the_order_of_the_model(tmp_path: Path) -> None:
    run = Run(small(BOTH), data=digits())
    next(run)
    saved = Checkpoints(tmp_path)
    assert saved.restore(run.state, 1, True) is None
    saved.save(run.state, Stored(tmp_path / "memory"))
    found = saved.restore(run.fed.start(), 1, True)
    run.close()
    assert found
    assert (found.state.number, found.state.skipped, found.warnings) == (1, 0, [])
    for ours, theirs in zip(run.state.out, found.state.out, strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
