"""The run directory: its files, their size, and that they agree with the run."""

import csv
import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from fedshift import Experiment, Run, resume, run
from fedshift.core.files import RunError
from fedshift.engines import ForkError
from fedshift.experiment.build import build
from fedshift.models import PaperCNN
from fedshift.rounds.federation import Layer, Outcome
from fedshift.runs.columns import client_rows, header, row, six
from tests.federations import points, same, settings


def lines(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def trained(out: Path, **changed: Any) -> tuple[Run, list[Outcome]]:
    training = run(settings(**changed), out, data=points())
    return training, list(training)


def test_a_run_leaves_its_settings_versions_record_and_model(tmp_path: Path) -> None:
    training, outcomes = trained(tmp_path / "run", uplink={"bits": "32+4"}, record={"histograms": 2})
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found == {
        *("settings.toml", "about.json", "identity.json", "clients.csv", "rounds.csv", "histograms.jsonl"),
        *("model.safetensors", ".lock"),
    }
    assert same(load_file(tmp_path / "run" / "model.safetensors"), training.params)
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about.keys() >= {"torch", "numpy", "python", "fedshift", "commit", "cpu", "command", "seed"}
    for line, outcome in zip(lines(tmp_path / "run" / "rounds.csv"), outcomes, strict=True):
        assert int(line["round"]) == outcome.number
        assert float(line["accuracy"]) == pytest.approx(outcome.accuracy, rel=1e-5)
        assert float(line["loss"]) == pytest.approx(outcome.loss, rel=1e-5)
        assert sum(float(line[f"predicted.{label}"]) for label in range(4)) == pytest.approx(1, abs=1e-5)
        assert [int(line[f"bytes.{part}"]) for part in ("codes", "side", "header")] == list(outcome.bytes_up)
        for name, layer in outcome.layers.items():
            for figure, value in layer._asdict().items():
                assert float(line[f"{figure}.{name}"]) == pytest.approx(float(value), rel=1e-5, abs=1e-12)


def test_settings_of_a_run_repeat_it(tmp_path: Path) -> None:
    first = Run(Experiment(train={"rounds": 2}, uplink={"bits": {32: 0.5, 8: 0.25, 4: 0.25}}), tmp_path / "a")
    list(first)
    import tomllib

    again = Experiment(**tomllib.loads((tmp_path / "a" / "settings.toml").read_text()))
    assert again == first.experiment
    list(Run(again, tmp_path / "b"))
    for name in ("model.safetensors", "settings.toml", "clients.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_clients_and_their_labels_are_recorded() -> None:
    fed = build(settings(uplink={"bits": "32+4"}), data=points())
    rows = list(client_rows(fed))
    assert len(rows) == 12
    assert [one[1] for one in rows] == ["32 bit", "4 bit"] * 6
    for client, (_, _, examples, *labels) in enumerate(rows):
        held = fed.task.data.y[fed.partition.of(client)]
        assert int(examples) == len(held)
        assert list(map(int, labels)) == torch.bincount(held, minlength=4).tolist()


def test_histograms_count_weights_before_and_after_the_quantizer(tmp_path: Path) -> None:
    trained(tmp_path / "run", uplink={"bits": 2}, record={"histograms": 2}, train={"rounds": 4})
    histograms = [json.loads(line) for line in (tmp_path / "run" / "histograms.jsonl").read_text().splitlines()]
    assert [(one["round"], one["layer"]) for one in histograms] == [
        (number, layer) for number in (1, 2, 4) for layer in ("fc1.weight", "fc2.weight")
    ]
    for one in histograms:
        assert sum(one["before"]) == sum(one["after"]) == (48 if one["layer"] == "fc1.weight" else 32)
        assert sum(n > 0 for n in one["after"]) <= 4 < sum(n > 0 for n in one["before"])


def test_a_record_of_the_paper_stays_below_380_kb() -> None:
    """800 rounds of the paper's CNN, with numbers of the greatest length."""
    experiment = Experiment(data={"partition": "iid"}, model={"name": "paper-cnn"}, uplink={"bits": "32+4"})
    fed = build(experiment, PaperCNN(), images())
    layer = Layer(-0.00123456, -0.000612345, True, 12.3456, 12.3457, 12.3458, 0.00123456, 0.000612345)
    score = build_score()
    seconds = dict.fromkeys(("train", "encode", "aggregate", "evaluate", "round", "save"), 0.0123456)
    outcome = Outcome(
        number=800,
        score=score,
        share=0.5,
        layers=dict.fromkeys(fed.layers, layer),
        error=0.123456,
        bytes_up=(48_510_400, 1_280, 2_080),
        bytes_down=86_236_960,
        arrived=10,
        dropped=0,
        failed={},
        seconds=seconds,
        uplink_seconds=None,
    )
    line, head = ",".join(row(experiment, fed, outcome)) + "\n", ",".join(header(experiment, fed)) + "\n"
    assert line.count(",") == head.count(",")
    assert len(head) + 800 * len(line) <= 380_000


def images() -> Any:
    from fedshift import dataset

    x = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    return dataset(x, torch.arange(200) % 10, x[:10], torch.arange(10))


def build_score() -> Any:
    from fedshift.rounds.evaluate import Score

    return Score(10_000, 6543.0, 12345.6, (987, 1013, 1101, 899, 1000, 1002, 998, 1234, 766, 1000))


@pytest.mark.parametrize(
    ("x", "text"), [(1 / 3, "0.333333"), (1e-9 / 3, "3.33333e-10"), (123456.7, "123457"), (0.0, "0")]
)
def test_six_digits(x: float, text: str) -> None:
    assert six(x) == text
    assert float(six(x)) == pytest.approx(x, rel=1e-5)


def test_a_model_need_not_be_evaluated_every_round(tmp_path: Path) -> None:
    trained(tmp_path / "run", record={"evaluate": 2}, train={"rounds": 5})
    assert [bool(line["accuracy"]) for line in lines(tmp_path / "run" / "rounds.csv")] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_a_skipped_round_has_a_line(tmp_path: Path) -> None:
    training = run(settings(train={"lr": 1e30, "patience": 3}), tmp_path / "run", data=points())
    for _ in range(2):
        next(training)
    training.close()
    first, _ = lines(tmp_path / "run" / "rounds.csv")
    assert first["failed"] == " ".join(map(str, training.fed.cohorts.draw(1)[0]))
    assert first["step.fc1.weight"] == ""


def test_a_failed_client_is_reported(tmp_path: Path) -> None:
    warnings: list[str] = []
    training = Run(settings(train={"lr": 1e30}), data=points(), tell=warnings.append)
    next(training)
    training.close()
    assert len(warnings) == 5
    assert "round 1: client" in warnings[0]
    assert "NaN or infinity" in warnings[0]


def test_custom_objects_are_named_in_the_settings_and_needed_to_resume(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)

    whole = run(settings(), tmp_path / "a", model=model, data=points(), loss=loss)
    list(whole)
    assert whole.experiment.model.name == "torch.nn.modules.linear:Linear"
    assert whole.experiment.data.name == "points"
    assert whole.experiment.train.loss.startswith("tests.test_record:")
    part = run(settings(), tmp_path / "b", model=model, data=points(), loss=loss)
    next(part)
    part.close()
    call = f"fedshift.resume({str(tmp_path / 'b')!r}, model=..., data=..., loss=...)"
    with pytest.raises(RunError, match=re.escape(f"with its own model, data and loss; resume it there with {call}")):
        resume(tmp_path / "b")
    with pytest.raises(RunError, match=re.escape(f"already contains a run; resume it in Python with {call}")):
        run(settings(), tmp_path / "b", model=model, data=points(), loss=loss)
    with pytest.raises(RunError, match=r"with its own loss; .*fedshift\.resume\('.*', loss=\.\.\.\)"):
        resume(tmp_path / "b", model=model, data=points())
    rest = resume(tmp_path / "b", model=model, data=points(), loss=loss)
    assert [outcome.number for outcome in rest] == [2, 3]
    assert same(rest.params, whole.params)
    assert isinstance(rest.model, nn.Linear)
    assert not rest.model.training


def test_a_run_in_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = run(settings(algorithm={"name": "scaffold"}), data=points())
    assert [outcome.number for outcome in training] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_contains_a_run_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(
        RunError, match=r"already contains a finished run; `fedshift report .*` shows it, and a new run"
    ):
        run(settings(), tmp_path / "run", data=points())
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_closed_run_trains_no_more_and_a_deleted_one_releases_its_folder(engine: str, tmp_path: Path) -> None:
    try:
        first = run(settings(engine={"name": engine}, train={"rounds": 5}), tmp_path / "run", data=points())
    except ForkError as problem:
        pytest.skip(str(problem))
    next(first)
    first.close()
    with resume(tmp_path / "run", data=points()) as second:
        assert next(second).number == 2
        assert list(first) == []
    for _ in resume(tmp_path / "run", data=points()):
        break
    gc.collect()
    third = resume(tmp_path / "run", data=points())
    third.close()
    assert [line["round"] for line in lines(tmp_path / "run" / "rounds.csv")] == ["1", "2", "3"]


def test_the_last_round_ends_the_run(tmp_path: Path) -> None:
    training = run(settings(train={"rounds": 1}), tmp_path / "run", data=points())
    next(training)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert training.closed


def test_the_model_of_a_run_is_a_copy() -> None:
    with run(settings(), data=points()) as training:
        next(training)
        training.model.requires_grad_(False)
        next(training)
