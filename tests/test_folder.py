"""Problems with the folder of a run: each is reported in a sentence, and nothing is lost."""

import re
import shutil
import signal
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedshift.core.files import RunError
from fedshift.experiment.toml import SettingsError, plain
from fedshift.runs.run import resume
from tests.runs import (
    BOTH,
    DERIVED,
    FEDAVG,
    digits,
    everything,
    fedshift,
    file_of,
    go,
    linux,
    resume_exactly,
    small,
    stopped,
)
from tests.test_files import disk, fill, mount
from tests.test_kill import killed_at

__all__ = ["disk"]  # a fixture


# the record


@pytest.mark.parametrize("end", ["6,0.5", "6,0.5\n", "nonsense", "\0\0\0\0", "5,5\n7,7\n"])
def test_bytes_after_the_last_complete_line_are_removed(end: str, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    for name in "rounds.csv", "histograms.jsonl":
        with open(out / name, "a") as file:
            file.write(end)
    assert resume_exactly(out, experiment, tmp_path / "whole") == []


def test_a_round_missing_from_the_record_is_trained_again(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", BOTH), tmp_path / "run"
    text = (out / "rounds.csv").read_text()
    (out / "rounds.csv").write_text(text[:-40])
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert "is later than the record, which ends at round 4; resuming from round 4" in warning


def test_a_lost_record_is_reported_and_nothing_is_changed(tmp_path: Path) -> None:
    stopped(tmp_path / "run", BOTH)
    (tmp_path / "run" / "rounds.csv").write_text((tmp_path / "run" / "rounds.csv").read_text().partition("\n")[0])
    before = everything(tmp_path / "run")
    with pytest.raises(RunError, match="is later than the record, which ends at round 0; no usable checkpoint is left"):
        resume(tmp_path / "run", data=digits())
    assert everything(tmp_path / "run") == before


# the folder


def test_a_new_run_does_not_use_the_folder_of_another(tmp_path: Path) -> None:
    experiment = stopped(tmp_path / "run", FEDAVG)
    before = everything(tmp_path / "run")
    done = fedshift("run", file_of(tmp_path / "a.toml", experiment), "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert f"already contains a run; resume it with `fedshift resume {tmp_path / 'run'}`" in done.stderr
    assert everything(tmp_path / "run") == before


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, why in (
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path / "empty", "contains no run to resume (there is no settings.toml)"),
    ):
        done = fedshift("resume", folder)
        assert (done.exit_code, done.stderr) == (2, f"fedshift: {folder}: {why}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


@linux
def test_a_command_killed_before_it_wrote_settings_can_be_repeated(tmp_path: Path) -> None:
    experiment, out = small(FEDAVG), tmp_path / "run"
    for point in 3, 8:  # changes to the folder, of which the first makes it and the second its lock
        assert killed_at(experiment, out, point) == -signal.SIGKILL
        done = fedshift("resume", out)
        assert done.exit_code == 2
        assert f"{out}: the command was stopped before the run started; repeat the" in done.stderr
    again = fedshift("run", file_of(tmp_path / "a.toml", experiment), "--out", out)
    assert again.exit_code == 0, again.output
    assert f"Results are in {out}" in " ".join(again.stdout.split())


def test_no_new_run_is_started_if_the_settings_are_missing(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    (out / "settings.toml").unlink()
    before = everything(out)
    assert f"{out}: contains no run to resume (there is no settings.toml)" in fedshift("resume", out).stderr
    done = fedshift("run", file_of(tmp_path / "a.toml", experiment), "--out", out)
    assert done.exit_code == 2
    assert "of a run whose settings.toml is missing; choose an empty folder" in done.stderr
    assert everything(out) == before


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    go(small(FEDAVG), tmp_path / "run")
    before = everything(tmp_path / "run")
    done = fedshift("resume", tmp_path / "run")
    assert (done.exit_code, done.stderr.strip()) == (0, f"{tmp_path / 'run'}: this run is already finished.")
    (tmp_path / "run" / "report.html").unlink()  # which it has got
    assert everything(tmp_path / "run") == before


def test_a_finished_run_with_edited_settings_is_refused_like_an_unfinished_one(tmp_path: Path) -> None:
    out, sentences = tmp_path / "run", []
    for after in (5, 8):  # of 8 rounds
        shutil.rmtree(out, ignore_errors=True)
        stopped(out, FEDAVG, after=after)
        assert (out / "model.safetensors").exists() == (after == 8)
        path = out / "settings.toml"
        path.write_text(path.read_text().replace("lr = 0.05", "lr = 0.5"))
        before = everything(out)
        done = fedshift("resume", out)
        assert (done.exit_code, done.stdout) == (2, "")
        assert everything(out) == before
        sentences.append(done.stderr)
    assert sentences[0] == sentences[1]
    assert "the settings are not those the run was started with (train.lr: was 0.05, now 0.5)" in sentences[0]


def test_a_finished_sweep_whose_settings_were_edited_everywhere_is_refused(tmp_path: Path) -> None:
    out, file = tmp_path / "runs", tmp_path / "a.toml"
    file.write_text("train = {rounds = 1, epochs = 1}\nmodel.args.hidden = 8\n[sweep]\nseed = [0]\n")
    assert fedshift("sweep", file, "--out", out, "-q").exit_code == 0
    for path in (file, out / "sweep.toml", out / "seed-0" / "settings.toml"):
        path.write_text(path.read_text().replace("epochs = 1", "epochs = 2"))
    before = everything(out)
    for arguments in (("resume", out), ("sweep", file, "--out", out)):
        done = fedshift(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "not those the run was started with (train.epochs: was 1, now 2)" in done.stderr
    assert everything(out) == before


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe", "UTF-8"), (b"a = ", "not TOML"), (b"rouns = 3\n", "unknown setting 'rouns'")]
)
def test_settings_that_cannot_be_read_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    (tmp_path / "run" / "settings.toml").write_bytes(content)
    before = everything(tmp_path / "run")
    with pytest.raises(SettingsError, match=r"run/settings\.toml: .*" + message):
        resume(tmp_path / "run", data=digits())
    assert everything(tmp_path / "run") == before


def test_files_of_other_names_are_ignored(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    (out / "checkpoint.best.safetensors").write_bytes(b"mine")
    (out / "checkpoint.my.best.safetensors").write_bytes(b"mine")
    (out / "memory" / "a.b.c.safetensors").write_bytes(b"mine")
    assert resume_exactly(out, experiment, tmp_path / "whole") == []


# what else lies there


def test_a_finished_run_is_left_alone_by_the_library_too(tmp_path: Path) -> None:
    go(small(FEDAVG), tmp_path / "run")
    before = everything(tmp_path / "run")
    with suppress(RunError):  # a sentence would do
        resume(tmp_path / "run", data=digits()).close()
    assert everything(tmp_path / "run") == before


def test_bytes_that_are_not_text_after_the_last_line_are_removed(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    with open(out / "rounds.csv", "ab") as file:
        file.write(b"6,0.\xff\xfe")
    assert resume_exactly(out, experiment, tmp_path / "whole") == []


def test_a_record_that_is_missing_is_named(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    (tmp_path / "run" / "rounds.csv").unlink()
    with pytest.raises(RunError, match=r"rounds\.csv"):
        resume(tmp_path / "run", data=digits())


@linux
def test_a_run_killed_while_removing_checkpoints_leaves_no_files(tmp_path: Path) -> None:
    go(small(DERIVED), tmp_path / "whole")
    stopped(tmp_path / "run", DERIVED)
    shutil.copy(tmp_path / "whole" / "model.safetensors", tmp_path / "run")
    fedshift("resume", tmp_path / "run")
    assert not [*(tmp_path / "run").glob("checkpoint.*"), *(tmp_path / "run").glob("memory")]


# the disk


@linux
@pytest.mark.parametrize("leave", range(0, 40_000, 8192))
def test_a_run_stopped_by_a_full_disk_is_resumed_exactly(leave: int, disk: Path, tmp_path: Path) -> None:
    """For each write that may fail."""
    experiment = stopped(disk / "run", BOTH, {"train": {"rounds": 12}})
    ballast = fill(disk, leave)
    done = fedshift("resume", disk / "run")
    assert done.exit_code == 2, done.output
    assert "cannot be" in done.stderr
    assert "No space left on device" in done.stderr
    ballast.unlink()
    assert resume_exactly(disk / "run", experiment, tmp_path / "whole") == []
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
    assert resume_exactly(disk / "run", experiment, tmp_path / "whole") == []


@pytest.mark.parametrize("keep", [1, 0])
def test_a_finished_run_with_an_empty_record_is_reported(keep: int, tmp_path: Path) -> None:
    go(small(FEDAVG), out := tmp_path / "run")
    lines = (out / "rounds.csv").read_bytes().splitlines(keepends=True)
    (out / "rounds.csv").write_bytes(b"".join(lines[:keep]))
    done = fedshift("resume", out)
    assert done.exit_code == 2
    assert f"{out / 'rounds.csv'}: " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["a.unfinished", "checkpoint.000009.abc.safetensors", "memory/a.unfinished"])
def test_a_folder_with_the_name_of_a_file_of_the_run_is_left_alone(name: str, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    (out / name).mkdir()
    (out / name / "mine").write_text("mine")
    assert resume_exactly(out, experiment, tmp_path / "whole") == []
    assert (out / name / "mine").read_text() == "mine"


GROUPS = {"uplink": {"group": {"a": {"share": 0.5, "bits": 4}, "b": {"share": 0.5, "bits": 8}}}}


@pytest.mark.parametrize(
    ("changes", "edited", "message"),
    [
        (FEDAVG, {"uplink": {"bits": {4: 0.5, 32: 0.5}}}, "uplink.bits: was {'32': 0.5, '4': 0.5}, now"),
        (GROUPS, {"uplink": {"group": dict(reversed(GROUPS["uplink"]["group"].items()))}}, "order of uplink.group: "),
        (
            {"model": {"args": {"hidden": 1}}},
            {"model": {"args": {"hidden": True}}},
            "model.args.hidden: was 1, now True",
        ),
        ({}, {"model": {"args": {"hidden": 8, "more": {}}}}, "model.args.more: was not set, now {}"),
    ],
)
def test_settings_that_only_look_equal_are_refused(
    changes: dict[str, Any], edited: dict[str, Any], message: str, tmp_path: Path
) -> None:
    experiment, out = stopped(tmp_path / "run", changes), tmp_path / "run"
    raw = tomllib.loads(experiment.toml())
    for table, values in edited.items():
        raw[table] |= values
    (out / "settings.toml").write_text(tomli_w.dumps(plain(raw)))
    before = everything(out)
    with pytest.raises(RunError, match=f"the settings are not those the run was started with .*{re.escape(message)}"):
        resume(out, data=digits())
    assert everything(out) == before
