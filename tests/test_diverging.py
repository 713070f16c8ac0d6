"""Training that diverges: left out, counted, and stopped with the reason; never a model of NaN."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedshift.data.datasets import dataset
from fedshift.rounds.loop import DivergedError
from fedshift.runs.run import Run, resume
from tests.runs import BOTH, DERIVED, FEDAVG, checkpoints, digits, fedshift, file_of, small


def test_where_every_client_diverges_the_run_stops_and_says_why(tmp_path: Path) -> None:
    experiment = small(DERIVED, {"train": {"lr": 1e30, "patience": 3, "rounds": 50}})
    done = fedshift("run", file_of(tmp_path / "a.toml", experiment), "--out", tmp_path / "run")
    assert done.exit_code == 1, done.output
    assert "no usable upload in 3 rounds in a row; last reason: " in done.stderr
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
    number, skipped = states[-1].number, states[-1].skipped
    assert skipped == 3
    assert states[-4] == states[-1]._replace(number=number - 3, skipped=0)  # the very same tensors
    again = resume(tmp_path / "run", data=digits())
    assert (again.state.number, again.state.skipped) == (number, 3)
    again.close()
