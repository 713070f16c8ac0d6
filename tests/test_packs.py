"""Packs: each run gives the result it would give alone, can be stopped and resumed, and fails alone."""

import csv
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from fedshift import Experiment, dataset
from fedshift.cli.interrupts import StopRequest
from fedshift.engines import Task
from fedshift.experiment.grid import expand
from fedshift.experiment.toml import SettingsError, merge
from fedshift.runs.events import Event
from fedshift.runs.packs import activations, memory_needed
from fedshift.runs.record import finished
from fedshift.runs.run import Run
from fedshift.runs.sweep import Sweep, training_time
from tests.runs import SMALL, fedshift, small

BATCHED: dict[str, Any] = merge(SMALL, {"engine": {"name": "batched"}, "train": {"rounds": 6, "batch": 32}})
GRID: dict[str, Any] = BATCHED | {
    "sweep": {
        "runs": [
            {"uplink": {"bits": "32+32"}, "shift": {"on": False}},
            {"uplink": {"bits": "32+4"}, "shift": {"per": "layer"}},
            {"uplink": {"bits": "32+4"}, "algorithm": {"name": "scaffold"}, "shift": {"per": "filter"}},
            {"uplink": {"bits": "32+4", "feedback": True}, "algorithm": {"name": "fedprox"}},
        ],
        "seed": [0, 1],
    }
}


def trained(raw: dict[str, Any], out: Path, stop: Callable[[], bool] = lambda: False) -> list[Event]:
    return list(Sweep(raw, out).train(1, stop))


def after(rounds: int) -> Callable[[], bool]:
    """Function that returns True from the given call on."""
    asked = itertools.count(1)
    return lambda: next(asked) > rounds


def lines(folder: Path) -> list[dict[str, str]]:
    with open(folder / "rounds.csv", newline="") as file:
        return list(csv.DictReader(file))


def models(raw: dict[str, Any], out: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(one.folder / "model.safetensors") for one in Sweep(raw, out).runs]


def test_a_packed_run_is_the_run_alone_within_rounding(tmp_path: Path) -> None:
    events = trained(GRID, tmp_path / "grid")
    assert [event for event in events if event.kind == "failed"] == []
    assert sum(event.kind == "round" for event in events) == 8 * 6
    assert sum(event.kind == "done" for event in events) == 8
    for one in Sweep(GRID, tmp_path / "grid").runs[::3]:
        alone = Run(one.experiment)
        for line, outcome in zip(lines(one.folder), alone, strict=True):
            assert float(line["accuracy"]) == pytest.approx(outcome.accuracy, abs=0.02)
            assert int(line["bytes.codes"]) == outcome.bytes_up[0]


def test_as_many_runs_are_trained_at_once_as_requested(tmp_path: Path) -> None:
    raw = merge(GRID, {"engine": {"pack": 3}})
    seen = [event.place for event in trained(raw, tmp_path / "grid") if event.kind == "round"]
    assert seen[:6] == [0, 1, 2, 0, 1, 2]
    assert set(seen[18:24]) == {3, 4, 5}
    assert set(seen[36:]) == {6, 7}


@pytest.mark.parametrize("stops", [1, 2, 5])
def test_a_stopped_pack_is_resumed_to_the_same_bits(stops: int, tmp_path: Path) -> None:
    raw = merge(GRID, {"engine": {"pack": 8, "deterministic": True}, "record": {"checkpoint": 4}})
    trained(raw, tmp_path / "whole")
    trained(raw, tmp_path / "parts", after(stops + 1))
    assert not any(finished(one.folder) for one in Sweep(raw, tmp_path / "parts").runs)
    trained(raw, tmp_path / "parts")
    for whole, parts in zip(models(raw, tmp_path / "whole"), models(raw, tmp_path / "parts"), strict=True):
        assert all(torch.equal(x, parts[name]) for name, x in whole.items())


def test_runs_killed_at_different_rounds_are_resumed_together(tmp_path: Path) -> None:
    """One has a later checkpoint: with `deterministic`, all resume from the last common one."""
    raw = merge(GRID, {"engine": {"pack": 8, "deterministic": True}, "record": {"checkpoint": 2}})
    trained(raw, tmp_path / "whole")
    trained(raw, tmp_path / "parts", after(5))
    for path in (Sweep(raw, tmp_path / "parts").runs[0].folder).glob("checkpoint.000004.*"):
        path.unlink()
    trained(raw, tmp_path / "parts")
    for whole, parts in zip(models(raw, tmp_path / "whole"), models(raw, tmp_path / "parts"), strict=True):
        assert all(torch.equal(x, parts[name]) for name, x in whole.items())


def test_a_run_that_diverges_does_not_affect_others(tmp_path: Path) -> None:
    raw = BATCHED | {"sweep": {"train.lr": [0.05, 1e20]}}
    events = trained(raw, tmp_path / "grid")
    failed = [event for event in events if event.kind == "failed"]
    assert [event.place for event in failed] == [1]
    assert "no usable upload in 5 rounds" in failed[0].text
    assert [event.place for event in events if event.kind == "done"] == [0]


def frozen() -> nn.Module:
    """A random projection that is not trained: each seed has its own."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Parameter(torch.randn(64, 16), requires_grad=False)
            self.last = nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.last(torch.relu(x @ self.projection))
            return outputs

    return Projected()


def test_runs_with_other_frozen_weights_are_not_packed_together(tmp_path: Path) -> None:
    raw = merge(BATCHED, {"model": {"name": "tests.test_packs:frozen"}, "sweep": {"seed": [0, 1]}})
    raw["model"] = {"name": "tests.test_packs:frozen"}
    seen = [event.place for event in trained(raw, tmp_path / "grid") if event.kind == "round"]
    assert seen == [0] * 6 + [1] * 6
    for one in Sweep(raw, tmp_path / "grid").runs:
        alone = [outcome.loss for outcome in Run(one.experiment)]
        assert [float(line["loss"]) for line in lines(one.folder)] == pytest.approx(alone, rel=1e-3)


def test_damaged_memory_ends_only_its_run(tmp_path: Path) -> None:
    raw = merge(BATCHED, {"algorithm": {"name": "scaffold"}, "train": {"cohort": 12}, "record": {"memory": "disk"}})
    raw["sweep"] = {"seed": [0, 1]}
    rounds = Sweep(raw, tmp_path / "grid").train(1)
    for event in rounds:
        if event.kind == "round" and (event.number, event.place) == (3, 1):
            break
    for path in (Sweep(raw, tmp_path / "grid").runs[0].folder / "memory").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    events = list(rounds)
    assert [event.place for event in events if event.kind == "failed"] == [0]
    assert "damaged" in next(event.text for event in events if event.kind == "failed")
    assert [event.place for event in events if event.kind == "done"] == [1]


def test_a_failed_run_does_not_reset_others(tmp_path: Path) -> None:
    raw = BATCHED | {
        "train": BATCHED["train"] | {"patience": 1},
        "engine": {"name": "batched", "pack": 2, "deterministic": True},
        "sweep": {"train.lr": [0.05, 1e29]},
    }
    trained(raw, tmp_path / "grid", after(5))
    healthy = Sweep(raw, tmp_path / "grid").runs[0]
    reached = len(lines(healthy.folder))
    again = [event.number for event in trained(raw, tmp_path / "grid") if event.kind == "round" and event.place == 0]
    assert again[0] == reached + 1


def test_deterministic_in_a_sweep_requires_the_pack_size(tmp_path: Path) -> None:
    raw = merge(GRID, {"engine": {"deterministic": True}})
    with pytest.raises(SettingsError, match=r"requires engine.pack, the number of runs per pack, in a sweep"):
        trained(raw, tmp_path / "grid")


def test_a_run_stops_after_some_minutes_and_is_resumed(tmp_path: Path) -> None:
    for arguments in (["run", "--preset", "smoke"], ["run"]):
        out = str(tmp_path / "-".join(arguments))
        done = fedshift(*arguments, "--out", out, "--minutes", "0", "--set", "engine.workers=1")
        assert done.exit_code == 0, done.stderr
        assert "Stopped; resume" in done.stderr
        assert f"with `fedshift resume {out}`." in done.stderr
        assert not list(Path(out).rglob("model.safetensors"))
    again = fedshift("resume", str(tmp_path / "run---preset-smoke"), "--minutes", "0")
    assert "resume after round 2 with" in again.stderr


def test_a_failure_counts_even_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up when the healthy run, which is the second, has finished a round."""
    monkeypatch.setattr(StopRequest, "now", lambda request: bool(list(tmp_path.glob("runs/lr-0.05*/rounds.csv"))))
    grid = tmp_path / "grid.toml"
    grid.write_text(
        "[train]\nrounds = 100000\nepochs = 1\npatience = 1\n[engine]\nname = 'batched'\npack = 1\n"
        "[sweep]\n'train.lr' = [1e29, 0.05]\n"
    )
    done = fedshift("sweep", grid, "--out", tmp_path / "runs", "--minutes", "1", "-q")
    assert done.exit_code == 1
    assert "1 of 2 runs failed" in done.stderr
    assert not list(tmp_path.glob("runs/*/model.safetensors"))


def test_minutes_must_be_a_number(tmp_path: Path) -> None:
    done = fedshift("run", "--preset", "smoke", "--out", tmp_path / "run", "--minutes", "nan")
    assert done.exit_code == 2
    assert "nan is not a number of minutes" in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_estimate_is_a_time_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for raw in (GRID, merge(GRID, {"engine": {"name": "sequential"}})):
        assert 0 < training_time(expand(raw), 1) < math.inf


def test_activations_include_the_largest_matrix_of_patches() -> None:
    """conv 3x3 2->4 of 6x6 pixels has 4x4 positions: 18 * 16 inputs of patches, and 36 * 36 gradients."""
    x, y = torch.zeros(40, 2, 6, 6), torch.arange(40) % 4
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    task = Task(model, dataset(x, y, x, y), F.cross_entropy, None)
    assert activations(task) == 12 * (64 + 4 + 4 + 4) + 4 * 36 * 36


def test_memory_needed_follows_the_formula() -> None:
    """MLP 64-8-10 with biases: P = 610, and 18 outputs of its layers, 10 of the whole; K = 4 of N = 12 clients."""
    experiment = small({"algorithm": {"name": "scaffold"}, "uplink": {"feedback": True, "bits": 4}})
    task = Run(experiment).fed.task
    assert activations(task) == 12 * (8 + 10 + 10)
    whole, p = 4 * (24 * 610 + 336 * 32), 4 * 610  # bytes of a run of FedAvg, and K P
    kept = 4 * 12 * 610
    assert memory_needed(experiment, task, 336) == whole + 4 * p + 2 * (8 * p + kept)  # the control and the error
    sent = small({"algorithm": {"name": "scaffold", "control": "sent"}})
    assert memory_needed(sent, task, 336) == whole + 4 * p + (8 * p + kept) + 4 * p
    other = small({"algorithm": {"name": "scafcom"}})  # whose `adjust` scales the gradient, and whose memory is twice P
    assert memory_needed(other, task, 336) == whole + 12 * p + 2 * (8 * p + kept)
    about = small({"algorithm": {"name": "fedvarp"}})  # the server remembers an update of each client
    assert memory_needed(about, task, 336) == whole + kept
    plain: Experiment = small()
    assert memory_needed(plain, task, 336) == whole
