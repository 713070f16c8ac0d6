"""TensorBoard reads the values of the record from its event files."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from fedshift.runs.record import finished
from fedshift.runs.run import Run
from fedshift.track import tracked
from tests.processes import wait_until
from tests.runs import SELDOM, digits, small
from tests.track.tracking import column, train


def read(out: Path) -> Any:
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    return events.Reload()


def scalars(out: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(out).Scalars(name)]


def sessions(out: Path) -> dict[str, Any]:
    """Data of the HParams page by tag."""
    found = {}
    for tag, content in read(out).PluginTagToContent("hparams").items():
        found[tag] = HParamsPluginData.FromString(content)
    return found


def test_tensorboard_has_the_values_of_the_record(tmp_path: Path) -> None:
    out, experiment = tmp_path / "one", small()
    assert train(experiment, out, "tensorboard", 8) == []
    for name, known in {
        "test/accuracy": "accuracy",
        "test/loss": "loss",
        "layers/step/fc1.weight": "step.fc1.weight",
        "predicted/3": "predicted.3",
        "seconds/round": "seconds.round",
        "clients/arrived": "arrived",
    }.items():
        steps, values = zip(*scalars(out, name), strict=True)
        assert steps == (1, 2, 3, 4, 5, 6, 7, 8)
        assert values == pytest.approx(column(out, known), rel=1e-6)
    up = sum(sum(column(out, f"bytes.{part}")) for part in ("codes", "side", "header"))
    assert scalars(out, "bytes/up_total")[-1] == (8, up)
    content = sessions(out)
    assert content["_hparams_/session_start_info"].session_start_info.hparams["train.batch"].number_value == 32
    assert content["_hparams_/session_end_info"].session_end_info.status == Status.Value("STATUS_SUCCESS")


def test_rounds_that_are_trained_again_are_logged_once(tmp_path: Path) -> None:
    out = tmp_path / "one"
    assert train(small(SELDOM), out, "tensorboard", 5) == []
    assert sessions(out)["_hparams_/session_end_info"].session_end_info.status == Status.Value("STATUS_UNKNOWN")
    assert train(small(SELDOM), out, "tensorboard", 8) == []  # from round 3 on
    steps, values = zip(*scalars(out, "test/loss"), strict=True)
    assert steps == (1, 2, 3, 4, 5, 6, 7, 8)
    assert values == pytest.approx(column(out, "loss"), rel=1e-6)


def test_a_removed_folder_does_not_stop_the_run(tmp_path: Path) -> None:
    out, warnings = tmp_path / "one", list[str]()
    for outcome in tracked(Run(small(), out, data=digits()), "tensorboard", tell=warnings.append):
        if outcome.number == 2:
            wait_until((out / "tracked.tensorboard.json").exists)  # its thread has made the folder
            (out / "tensorboard").rename(tmp_path / "taken")
            (out / "tensorboard").write_text("not a folder")
    assert len(warnings) == 1
    assert warnings[0].startswith("--track tensorboard: ")
    assert warnings[0].endswith("; training continues without it")
    assert finished(out)
    assert len(column(out, "loss")) == 8
