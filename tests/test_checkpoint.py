"""Checkpoints: which are kept, and which is used after damage."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.core.files import RunError
from fedshift.core.tree import take
from fedshift.runs.checkpoint import Checkpoints
from fedshift.runs.identity import RunIdentity
from fedshift.runs.memory import StoredMemory
from fedshift.runs.run import Run, resume
from tests.runs import (
    BOTH,
    DERIVED,
    DISK,
    FEDAVG,
    SELDOM,
    checkpoints,
    damage,
    digits,
    everything,
    fedshift,
    record,
    resume_exactly,
    rewrite,
    small,
    stopped,
    undisturbed,
)
from tests.test_files import disk

__all__ = ["disk"]  # a fixture

LAYER, FILTER = ({"shift": {"per": per}} for per in ("layer", "filter"))


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
    names = {"about.json", "identity.json", "clients.csv", "rounds.csv", "histograms.jsonl", "settings.toml"}
    assert names | {"model.safetensors"} == {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}


@pytest.mark.parametrize(
    "changes",
    [[BOTH, LAYER], [BOTH, DISK, SELDOM, LAYER], [BOTH, FILTER], [FEDAVG, SELDOM, FILTER]],
    ids=["ram", "disk", "per filter", "per filter, without memory"],
)
def test_a_stopped_run_is_resumed_to_the_bit(changes: list[dict[str, Any]], tmp_path: Path) -> None:
    experiment = stopped(tmp_path / "run", *changes)
    assert resume_exactly(tmp_path / "run", experiment, tmp_path / "whole") == []


def test_two_files_of_one_round_count_once(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    run = resume(out, data=digits())
    _, newest = checkpoints(out)
    shutil.copy(newest, newest.with_name("checkpoint.000006.00000000.safetensors"))
    next(run)
    run.close()
    assert [path.name[:17] for path in checkpoints(out)] == ["checkpoint.000005", *2 * ["checkpoint.000006"]]
    resume_exactly(out, experiment, tmp_path / "whole")


# damage


def test_the_previous_checkpoint_replaces_a_damaged_one(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", BOTH), tmp_path / "run"
    newest = checkpoints(out)[-1]
    damage(newest)
    done = fedshift("resume", out, "--quiet")
    assert done.exit_code == 0, done.output
    warnings = " ".join(done.stderr.split())
    assert f"{newest}: damaged: its content does not match its checksum; resuming from round 4" in warnings
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
def test_if_everything_is_damaged_it_is_reported_each_time_and_nothing_is_changed(what: str, tmp_path: Path) -> None:
    stopped(tmp_path / "run", DERIVED)
    for path in (tmp_path / "run").glob(what):
        damage(path)
    before = everything(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(RunError, match=r"damaged: .*damaged: .*; no usable checkpoint is left"):
            resume(tmp_path / "run", data=digits())
        assert everything(tmp_path / "run") == before


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_the_previous_checkpoint_is_used_if_newest_memory_is_missing(how: str, tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED, after=2), tmp_path / "run"
    first = {path.name.split(".")[0] for path in (out / "memory").glob("*.1.*")}
    new = next(path for path in (out / "memory").glob("*.2.*") if path.name.split(".")[0] not in first)
    damage(new) if how == "damaged" else new.unlink()
    (warning,) = resume_exactly(out, experiment, tmp_path / "whole")
    assert (f"{new}: damaged" if how == "damaged" else f"{new}: cannot be read: No such file") in warning
    assert warning.endswith("; resuming from round 1")


def test_files_of_an_interrupted_write_are_removed(tmp_path: Path) -> None:
    experiment, out = stopped(tmp_path / "run", DERIVED), tmp_path / "run"
    for name in "checkpoint.000006.01234567.safetensors", "rounds.csv", "memory/0.6.01234567.safetensors":
        (out / f"{name}.unfinished").write_bytes(b"half")
    assert resume_exactly(out, experiment, tmp_path / "whole") == []
    assert not list(out.rglob("*.unfinished"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run", FEDAVG)
    for path in checkpoints(tmp_path / "run"):
        rewrite(path, lambda tensors: {name: x for name, x in tensors.items() if "bias" not in name})
    before = everything(tmp_path / "run")
    with pytest.raises(RunError, match="does not match the model and the algorithm in the settings"):
        resume(tmp_path / "run", data=digits())
    assert everything(tmp_path / "run") == before


def test_a_checkpoint_restores_the_state_in_the_order_of_the_model(tmp_path: Path) -> None:
    run = Run(small(BOTH), data=digits())
    next(run)
    saved, identity, records = (
        Checkpoints(tmp_path),
        RunIdentity.of(run.experiment, run.fed, []),
        ["00000000", "12345678"],
    )
    like = run.fed.algorithm.client.init(take(run.params, run.fed.task.trained))
    assert saved.restore(run.state, like, identity, records, True) is None
    saved.save(run.state, StoredMemory(tmp_path / "memory", identity.run), identity, records[1])
    found = saved.restore(run.fed.start(), like, identity, records, True)
    run.close()
    assert found
    assert (found.state.number, found.state.skipped, found.warnings) == (1, 0, [])
    for ours, theirs in zip(run.state.out, found.state.out, strict=True):
        assert list(ours) == list(theirs)
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
