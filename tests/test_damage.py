"""A run is resumed exactly, or refused in a sentence that says what is wrong; nothing is lost."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedshift.core.files import RunError
from fedshift.experiment.toml import SettingsError, assign, read
from fedshift.runs.record import finished
from fedshift.runs.run import Run, resume
from tests import damage as harness
from tests.runs import (
    DERIVED,
    FEDAVG,
    FEEDBACK,
    checkpoints,
    damage,
    digits,
    everything,
    fedshift,
    go,
    resume_exactly,
    rewrite,
    small,
    stopped,
)


def test_damaged_folders_are_resumed_exactly_or_refused(tmp_path: Path) -> None:
    seen = harness.run(3, 40, tmp_path, {"train": {"rounds": 4, "cohort": 2}, "data": {"clients": 4}})
    assert seen.total() == 40
    assert seen["resumed"] + seen["warned"] > 10
    assert seen["refused"] > 5


def refused(out: Path, error: type[Exception] = RunError) -> str:
    """Message of a refused resume; the folder must not change."""
    before = everything(out)
    with pytest.raises(error) as caught:
        resume(out, data=digits()).close()
    assert everything(out) == before
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# another run's, or in another's place


@pytest.mark.parametrize("how", ["swapped", "of another run"])
def test_the_memory_of_another_client_or_run_is_detected(how: str, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED, after=2), tmp_path / "run"
    first = {path.name.split(".")[0] for path in (out / "memory").glob("*.1.*")}
    one, two = [path for path in (out / "memory").glob("*.2.*") if path.name.split(".")[0] not in first][:2]
    if how == "swapped":  # each with the checksum of its content
        names = [path.name.split(".") for path in (one, two)]
        for path, (client, *_), (*_, checksum, end) in (one, names[1], names[0]), (two, names[0], names[1]):
            path.rename(path.with_name(f"{client}.2.{checksum}.{end}"))
    else:
        stopped(tmp_path / "other", DERIVED, after=2)  # the same values under another id
        (foreign,) = (tmp_path / "other" / "memory").glob(one.name.rsplit(".", 2)[0] + ".*")
        one.unlink()
        shutil.copy(foreign, one.parent)
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert "cannot be used: " in warning
    assert warning.endswith("; resuming from round 1")


def test_a_checkpoint_of_another_run_is_put_aside(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    stopped(tmp_path / "other", FEDAVG)
    checkpoints(out)[-1].unlink()
    newest = checkpoints(tmp_path / "other")[-1]
    shutil.copy(newest, out)
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert f"{out / newest.name}: belongs to another run (id " in warning
    assert warning.endswith("; resuming from round 4")


def test_a_checkpoint_under_the_name_of_another_round_is_put_aside(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    older, newest = checkpoints(out)
    newest.unlink()
    shutil.copy(older, older.with_name(older.name.replace("000004", "000005")))
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert "is the checkpoint of round 4, which contradicts its file name; resuming from round 4" in warning


def test_the_model_of_another_run_does_not_finish_a_run(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    go(experiment.changed(seed=1), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", out)
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert "model.safetensors: is damaged or not the final model of the run; it will be written again" in warning
    shutil.copy(tmp_path / "other" / "model.safetensors", out)
    assert not finished(out)
    assert "not the final model of the run, and there is no checkpoint; start a new run in" in refused(out)


@pytest.mark.parametrize("content", [b"", bytes(5000)])
def test_an_empty_model_is_not_the_end_of_a_run(content: bytes, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    (out / "model.safetensors").write_bytes(content)
    assert not finished(out)
    assert len(resume_exactly(out, experiment, tmp_path / "whole")) == 1
    assert finished(out)


# what no damage of bits makes


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x.int(), "does not match the model and the algorithm in the settings"),
        (lambda x: x.double(), "does not match the model and the algorithm in the settings"),
        (lambda x: x / 0, "contains NaN or infinity"),
    ],
    ids=["int32", "float64", "NaN"],
)
def test_other_kinds_of_tensors_are_refused(change: Callable[[Tensor], Tensor], why: str, tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    for path in checkpoints(tmp_path / "run"):
        rewrite(path, lambda params: {name: change(x) for name, x in params.items()})
    assert why in refused(tmp_path / "run")


@pytest.mark.parametrize("content", [b"", b"[]", b"\2\0\0\0\0\0\0\0{}", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 99])
def test_a_file_that_is_not_a_checkpoint_is_put_aside(content: bytes, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG, {"train": {"rounds": 6}}), tmp_path / "run"
    for name in f"{zlib.crc32(content):08x}", "00000000":
        (out / f"checkpoint.000005.{name}.safetensors").write_bytes(content)
    checkpoints(out)[-1].write_bytes(content)
    for warning in resume_exactly(out, experiment, tmp_path / "whole"):
        assert "damaged: its content does not match its checksum" in warning


def test_a_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    (tmp_path / "run" / "identity.json").unlink()
    for path in checkpoints(tmp_path / "run"):
        content = save(load_file(path), {"state": json.dumps({"number": 5, "skipped": 0, "remembered": 0})})
        path.unlink()
        path.with_name(f"{path.name[:17]}.{zlib.crc32(content):08x}.safetensors").write_bytes(content)
    assert "or were written by an earlier version of fedshift; start a new run in" in refused(tmp_path / "run")


# settings


def test_changed_settings_are_listed_with_what_to_do(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEEDBACK), tmp_path / "run"
    path, text = out / "settings.toml", (out / "settings.toml").read_text()
    path.write_text(text.replace("rounds = 8", "rounds = 9").replace("lr = 0.05", "lr = 0.5"))
    assert refused(out) == (
        f"{path}: the settings are not those the run was started with (train.rounds: was 8, now 9; "
        "train.lr: was 0.05, now 0.5); restore them to resume it, or start a new run in another folder from the "
        "changed file"
    )
    for each in checkpoints(out):
        each.unlink()  # then identity.json says it
    assert "(train.rounds: was 8, now 9; train.lr: was 0.05, now 0.5)" in refused(out)
    path.write_text(f"# the same values\n{text}")
    (warning,) = resume_with(out, tmp_path / "whole", experiment)
    assert "the checkpoints are missing; resuming from round 0" in warning


def resume_with(out: Path, whole: Path, experiment: object) -> list[str]:
    """Like `resume_exactly`, but only models are compared."""
    warnings: list[str] = []
    list(resume(out, data=digits(), tell=warnings.append))
    go(experiment, whole)  # type: ignore[arg-type]
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    return warnings


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "x = " + "{a=" * 100_000, "x = " + "1" * 5000])
def test_unreadable_settings_are_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"a\.toml: (not TOML|not settings): "):
        read(tmp_path / "a.toml")
    done = fedshift("run", tmp_path / "a.toml")
    assert done.exit_code == 2
    assert "a.toml: not " in done.stderr


def test_a_value_of_the_command_line_that_is_nested_too_deeply_is_reported() -> None:
    with pytest.raises(SettingsError, match=r"--set train\.lr: its value is nested too deeply"):
        assign({}, "train.lr=" + "[" * 100_000)


# the record


def test_a_damaged_histogram_loses_its_line_alone(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    path = out / "histograms.jsonl"
    first, second, *rest = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([first[:20] + b"\xff" + first[21:], second, *rest]))
    list(resume(out, data=digits()))
    go(experiment, tmp_path / "whole")
    assert path.read_bytes().split(b"\n") == (tmp_path / "whole" / path.name).read_bytes().split(b"\n")[1:]


def test_a_field_that_is_too_long_ends_the_record_there(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    path = out / "rounds.csv"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, last + "1" * 200_000, ""]))
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert "is later than the record, which ends at round 4; resuming from round 4" in warning


def test_a_changed_value_of_the_record_is_trained_again_or_reported(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    path = out / "rounds.csv"
    lines = path.read_text().splitlines()
    changed = lines[-1].split(",")
    changed[2] = "0.123"
    path.write_text("\n".join([*lines[:-1], ",".join(changed), ""]))
    shutil.copytree(out, tmp_path / "first")
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert "the record up to round 5 does not match this checkpoint; resuming from round 4" in warning
    path = tmp_path / "first" / "rounds.csv"
    path.write_text("\n".join([lines[0], lines[1].replace(".", ".0", 1), *lines[2:], ""]))
    (warning,) = resume_with(tmp_path / "first", tmp_path / "whole", experiment)
    assert "the record up to round 5 does not match the checkpoint; resuming from round 5" in warning


def test_files_that_follow_from_the_settings_are_repaired(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", FEDAVG), tmp_path / "run"
    damage(out / "clients.csv")
    (out / "identity.json").write_text("{}")
    text = (out / "rounds.csv").read_text()
    (out / "rounds.csv").write_text(text.replace("loss", "lost", 1))
    warnings = resume_exactly(out, experiment, tmp_path / "whole")
    assert [sentence.split(": ")[0] for sentence in warnings] == [
        str(out / name) for name in ("identity.json", "rounds.csv", "clients.csv")
    ]


# what a run is given in Python


class Frozen(nn.Module):
    """A trained layer on frozen random features."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.features.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).relu())  # type: ignore[no-any-return]


def test_another_model_in_python_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    out, model, other = tmp_path / "run", Frozen(), Frozen()
    run = Run(small(FEDAVG), out, model=model, data=digits())
    next(run)
    run.close()
    done = fedshift("resume", out)
    assert done.exit_code == 2
    assert f"with its own model; resume it there with fedshift.resume('{out}', model=...)\n" in done.stderr
    before = everything(out)
    with pytest.raises(RunError, match="the model's frozen weights or buffers are not those the run was started with"):
        resume(out, model=other, data=digits())
    with pytest.raises(RunError, match=r"\(model.name: was '.*:Frozen', now '.*:Linear'\); restore them"):
        resume(out, model=nn.Linear(64, 10), data=digits())
    assert everything(out) == before
    other.features.load_state_dict(model.features.state_dict())  # what is learnt comes from the checkpoint
    list(resume(out, model=other, data=digits()))
    done = fedshift("resume", out)
    assert (done.exit_code, done.stderr) == (0, f"{out}: this run is already finished.\n")


def test_without_a_checkpoint_the_initial_weights_must_be_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    out, model = tmp_path / "run", nn.Linear(64, 10)
    Run(small(FEDAVG), out, model=model, data=digits()).close()
    before = everything(out)
    with pytest.raises(RunError, match="there is no checkpoint, and the model's initial weights are not those"):
        resume(out, model=nn.Linear(64, 10), data=digits())
    assert everything(out) == before
    list(resume(out, model=model, data=digits()))


def test_memory_files_name_their_run_client_and_round(tmp_path: Path) -> None:
    stopped(tmp_path / "run", DERIVED, after=1)
    run = json.loads((tmp_path / "run" / "identity.json").read_text())["run"]
    files = list((tmp_path / "run" / "memory").iterdir())
    assert len(files) == 4
    for path in files:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["fedshift"])
        client, number, checksum, _ = path.name.split(".")
        assert (about["run"], about["client"], about["round"]) == (run, int(client), int(number))
        assert about["digest"].startswith(checksum)
