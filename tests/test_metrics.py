"""Several metrics: built-in ones against scikit-learn, users' own, on every engine, in the record and the report."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from fedshift import Experiment, run
from fedshift.engines import Batched, Engine, Sequential, Task
from fedshift.experiment.build import build
from fedshift.experiment.settings import run_number
from fedshift.experiment.toml import SettingsError
from fedshift.report.charts import Choice, Curves, Table
from fedshift.report.gather import gather
from fedshift.report.page import render
from fedshift.rounds.metrics import AUC, F1, METRICS, areas, top5
from fedshift.runs.columns import metric_columns
from fedshift.runs.run import Run
from fedshift.runs.summary import metrics_table as table
from fedshift.runs.summary import rows
from fedshift.track.figures import Figures
from tests.federations import federation, points, processes, settings
from tests.report.written import settings as recorded
from tests.report.written import write
from tests.runs import fedshift
from tests.test_scores import printed, result

ALL = ["accuracy", "loss", "perplexity", "f1", "auc", "top5"]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lines(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((out / "rounds.csv").read_text())))


def confused(outputs: Tensor, targets: Tensor) -> Tensor:
    """Rows of a metric with a result."""
    return torch.stack([outputs.argmax(-1), targets], dim=1)


confused.result = lambda counts: float((counts[:, 0] == counts[:, 1]).double().mean())  # type: ignore[attr-defined]


def spoiling(outputs: Tensor, targets: Tensor) -> Tensor:
    """Accuracy on all labels but 3, which are set to 0 in place."""
    targets[targets == 3] = 0
    found = outputs.argmax(-1) == targets
    outputs.zero_()
    return found


def spoiling_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of two groups of labels, which are made in place."""
    return F.cross_entropy(outputs, targets.sub_(targets // 2 * 2))


def two_processes(task: Task) -> Engine:
    return processes(task, 2)


class Inplace(nn.Module):
    """A model that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.mul_(0.5))  # type: ignore[no-any-return]


def f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric with the name of one of fedshift."""
    return torch.full((len(targets),), 2.5)


class Order:
    """Sensitive to the order of the examples: sum_i i x_i."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0].double()

    def result(self, rows: Tensor) -> float:
        return float((rows * torch.arange(len(rows))).sum())


# built-in metrics


@pytest.mark.parametrize("seed", range(5))
def test_auc_of_two_classes_is_that_of_scikit_learn_with_ties(seed: int) -> None:
    outputs = (2 * draw(seed, 200, 2)).round()  # many equal scores
    labels = (draw(seed + 100, 200) > 0.3).long()
    expected = roc_auc_score(labels.numpy(), (outputs[:, 1] - outputs[:, 0]).numpy())
    assert AUC().result(AUC()(outputs, labels)) == pytest.approx(expected, abs=1e-12)
    single = outputs[:, 1:]  # one output is the score
    assert AUC().result(AUC()(single, labels)) == pytest.approx(roc_auc_score(labels, single[:, 0]), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_auc_of_several_classes_is_the_mean_of_one_against_the_rest(seed: int) -> None:
    outputs, labels = draw(seed, 300, 5).round(), torch.arange(300) % 5
    expected = roc_auc_score(labels.numpy(), outputs.double().softmax(1).numpy(), multi_class="ovr", average="macro")
    assert AUC().result(AUC()(outputs, labels)) == pytest.approx(expected, abs=1e-12)
    assert AUC().result(AUC()(outputs, F.one_hot(labels, 5).float())) == pytest.approx(expected, abs=1e-12)


def test_auc_counts_pairs_and_ties_as_one_half() -> None:
    """Positives 3 and 2 against negatives 2 and 1: three pairs in order and one tie."""
    scores, positive = torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False])
    found = areas(scores.expand(3, 4).contiguous(), torch.stack([positive, ~positive, positive | True]))
    assert found.tolist() == pytest.approx([3.5 / 4, 0.5 / 4, math.nan], nan_ok=True)
    assert math.isnan(AUC().result(AUC()(draw(0, 6, 3), torch.zeros(6).long()[:6] + 7)))  # no known label
    assert math.isnan(AUC().result(AUC()(torch.full((4, 2), math.nan), torch.tensor([0, 1, 0, 1]))))


@pytest.mark.parametrize("labels", [3, 6])
def test_f1_is_the_macro_mean_of_scikit_learn(labels: int) -> None:
    """With six outputs and three labels, some predicted labels are never present."""
    outputs, targets = draw(1, 250, 6), torch.arange(250) % labels
    expected = f1_score(targets.numpy(), outputs.argmax(1).numpy(), average="macro")
    assert F1().result(F1()(outputs, targets)) == pytest.approx(expected, abs=1e-12)


def test_top5_looks_at_five_outputs() -> None:
    outputs = torch.tensor([[9.0, 8, 7, 6, 5, 4], [9.0, 8, 7, 6, 5, 4]])
    assert top5(outputs, torch.tensor([4, 5])).tolist() == [True, False]
    assert top5(outputs[:, :3], torch.tensor([2, 0])).tolist() == [True, True]


def test_perplexity_is_the_exponential_of_the_mean_loss(tmp_path: Path) -> None:
    experiment = settings(train={"metrics": ["perplexity", "accuracy"]})
    outcomes = list(run(experiment, tmp_path / "run", data=points()))
    for outcome in outcomes:
        assert outcome.accuracy == pytest.approx(math.exp(outcome.loss or 0.0), rel=1e-12)
    last = lines(tmp_path / "run")[-1]
    assert float(last["metric.perplexity"]) == pytest.approx(math.exp(float(last["loss"])), rel=1e-4)


# every engine


def test_all_engines_give_the_same_scores_by_all_metrics() -> None:
    """The test set has several chunks, which processes score apart."""
    names = [*ALL, "tests.test_metrics:confused", "tests.test_metrics:Order"]
    experiment = settings(train={"metrics": dict.fromkeys(names[:6]) | dict.fromkeys(names[6:], "max")})
    data = points(tests=4300)
    task = build(experiment, data=data).task
    params = task.params
    expected = Sequential(task).evaluate(params)
    engine = processes(task, 2)
    assert engine.evaluate(params) == expected
    engine.close()
    assert Batched(task).evaluate(params).others == pytest.approx(expected.others, rel=1e-4)
    model = task.model.eval()
    outputs = torch.cat([model(data.test_x[i : i + 1024]) for i in range(0, 4300, 1024)]).detach()
    predicted = outputs.argmax(1).numpy()
    found = dict(zip(names[1:], expected.others, strict=True))
    assert found["f1"] == pytest.approx(f1_score(data.test_y.numpy(), predicted, average="macro"), abs=1e-12)
    scores = outputs.double().softmax(1).numpy()
    assert found["auc"] == pytest.approx(roc_auc_score(data.test_y.numpy(), scores, multi_class="ovr"), abs=1e-12)
    assert found["tests.test_metrics:confused"] == expected.metric / 4300
    order = float((outputs[:, 0].double() * torch.arange(4300)).sum())
    assert found["tests.test_metrics:Order"] == pytest.approx(order, rel=1e-12)


def test_a_metric_with_a_result_can_be_the_score() -> None:
    """As an object, and as a class by its name."""
    experiment = settings(train={"goal": "max"})
    by_object = [outcome.accuracy for outcome in Run(experiment, data=points(), metric=confused)]
    assert by_object == pytest.approx([outcome.accuracy for outcome in Run(settings(), data=points())], abs=1e-12)
    named = settings(train={"metric": "tests.test_metrics:Order", "goal": "max"})
    as_object = [outcome.accuracy for outcome in Run(experiment, data=points(), metric=Order())]
    assert [outcome.accuracy for outcome in Run(named, data=points())] == as_object


def test_further_metrics_do_not_change_the_run() -> None:
    plain, several = settings(uplink={"bits": "32+4"}), settings(uplink={"bits": "32+4"}, train={"metrics": ALL})
    first, second = Run(plain, data=points()), Run(several, data=points())
    for one, other in zip(first, second, strict=True):
        assert (one.accuracy, one.loss, one.bytes_up) == (other.accuracy, other.loss, other.bytes_up)
    assert all(torch.equal(x, second.params[name]) for name, x in first.params.items())
    assert run_number(plain) == run_number(several)


# settings


def test_metrics_are_a_list_or_a_table_and_the_first_one_is_the_score() -> None:
    train = Experiment(train={"metrics": ["f1", "mine:mae", "loss"]}).train
    assert (train.metric, train.direction) == ("f1", "max")
    assert train.directions == {"f1": "max", "mine:mae": "min", "loss": "min"}
    train = Experiment(train={"metric": "mine:close", "metrics": {"mine:close": "min", "accuracy": "max"}}).train
    assert (train.metric, train.direction, train.lower) == ("mine:close", "min", True)
    train = Experiment(train={"metric": "accuracy", "metrics": ["f1"]}).train
    assert train.directions == {"accuracy": "max", "f1": "max"}
    train = Experiment(train={"metric": "mine:close", "goal": "min", "metrics": ["mine:close", "f1"]}).train
    assert train.directions == {"mine:close": "min", "f1": "max"}
    assert Experiment(train={"metrics": ["f1", "loss"]}).changed(**{"train.lr": 0.1}).train.metric == "f1"
    assert Experiment().train.directions == {"accuracy": "max"}
    assert "metrics" not in Experiment().toml()


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"metrics": []}, "train.metrics: must contain one metric or more"),
        ({"metrics": "f1"}, "train.metrics = 'f1': must be a list of metrics, or a table {metric = 'min' or 'max'}"),
        (
            {"metrics": {"f1": "up"}},
            "train.metrics.f1 = 'up': must be 'min' (lower is better) or 'max' (higher is better), perhaps 'max'",
        ),
        ({"metrics": {"f1": "min"}}, "train.metrics: f1 = 'min': the goal of f1 is 'max'"),
        (
            {"metrics": ["perplexty"]},
            "train.metrics: 'perplexty': no such metric; did you mean 'perplexity'? (or module:function)",
        ),
        (
            {"metrics": ["accuracy", "mine:close"]},
            "train.metrics: 'mine:close': its name does not say which scores are better; write a table, "
            '{"mine:close" = "min"} (lower is better) or {"mine:close" = "max"} (higher is better)',
        ),
        (
            {"metrics": {"mine:close": "min"}, "goal": "max"},
            "train.metrics: 'mine:close' = 'min': contradicts goal = 'max'",
        ),
        ({"metric": "auc", "goal": "min"}, "train.goal = 'min': the goal of auc is 'max'"),
    ],
)
def test_invalid_metrics_are_reported_in_one_sentence(train: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as problem:
        Experiment(train=train)
    assert str(problem.value) == sentence


class Wrong:
    """A metric with wrong rows, or with a wrong result."""

    def __init__(self, rows: Any = None, result: Any = 0.5) -> None:
        self.rows, self.found = rows, result

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return outputs if self.rows is None else self.rows

    def result(self, rows: Tensor) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        (
            Wrong(torch.zeros(3)),
            "Wrong: a metric with a result must return a tensor with 60 rows, one per example, not shape",
        ),
        (Wrong([0.5] * 60), "a metric with a result must return a tensor with 60 rows, one per example, not list"),
        (Wrong(result=torch.zeros(2)), "the result of a metric must be one number, not shape (2,)"),
        (Wrong(result="high"), "Wrong: the result of a metric must be one number, not str"),
        (Wrong(result=KeyError("no")), "KeyError: 'no'"),
    ],
)
def test_a_wrong_metric_is_reported_before_anything_is_written(metric: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as problem:
        run(settings(train={"goal": "max"}), tmp_path / "run", data=points(), metric=metric)
    assert str(problem.value).startswith("train.metric = 'tests.test_metrics:Wrong': ")
    assert sentence in str(problem.value)
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "run").exists()


def undefined(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.full((len(targets),), math.nan)


def test_a_metric_or_loss_that_is_not_a_function_is_refused() -> None:
    for name in ("metric", "loss"):
        with pytest.raises(TypeError, match=rf"^{name}=3: must be a function \(outputs, targets\)"):
            run(settings(), data=points(), **{name: 3})  # type: ignore[arg-type]


def test_a_score_that_is_nan_is_recorded_and_reported_once(tmp_path: Path) -> None:
    told: list[str] = []
    metrics = {"accuracy": "max", "tests.test_metrics:undefined": "max"}
    outcomes = list(Run(settings(train={"metrics": metrics}), tmp_path / "run", data=points(), tell=told.append))
    assert told == ["round 1: tests.test_metrics:undefined is NaN, and is recorded as NaN"]
    assert [line["metric.undefined"] for line in lines(tmp_path / "run")] == ["nan"] * len(outcomes)


# the record


def test_every_metric_has_a_column_in_the_record(tmp_path: Path) -> None:
    names = ["accuracy", "f1", "loss", "tests.test_metrics:confused"]
    experiment = settings(
        train={"metrics": dict.fromkeys(names[:3]) | {names[3]: "max"}, "rounds": 4}, record={"evaluate": 3}
    )
    outcomes = list(run(experiment, tmp_path / "run", data=points()))
    found = lines(tmp_path / "run")
    assert list(found[0])[:5] == ["round", "accuracy", "loss", "metric.f1", "metric.confused"]
    assert [line["metric.f1"] == "" for line in found] == [True, True, False, False]
    for line, outcome in zip(found, outcomes, strict=True):
        if outcome.score is not None:
            scores = [float(line[name]) for name in ("metric.f1", "loss", "metric.confused")]
            assert scores == pytest.approx(outcome.score.others, rel=1e-5)
            assert line["metric.confused"] == line["accuracy"]


def test_metrics_of_one_name_have_different_columns() -> None:
    experiment = Experiment(train={"metrics": ["f1", "a:f1", "b:f1", "accuracy"]})
    assert list(metric_columns(experiment).values()) == ["metric.f1", "metric.a:f1", "metric.b:f1", "accuracy"]
    experiment = Experiment(train={"metrics": ["a:f1", "f1", "a:accuracy", "accuracy"]})
    assert list(metric_columns(experiment).values()) == ["metric.a:f1", "metric.f1", "metric.accuracy", "accuracy"]


def test_a_metric_with_the_name_of_a_known_one_keeps_its_own_score(tmp_path: Path) -> None:
    mine = "tests.test_metrics:f1"
    (outcome,) = run(settings(train={"metrics": [mine, "f1"], "rounds": 1}), tmp_path / "run", data=points())
    assert outcome.score is not None
    (line,) = lines(tmp_path / "run")
    assert float(line[f"metric.{mine}"]) == 2.5
    assert float(line["metric.f1"]) == pytest.approx(outcome.score.others[0], rel=1e-5) != 2.5


def test_a_run_with_several_metrics_is_resumed_to_the_same_record(tmp_path: Path) -> None:
    experiment = settings(train={"metrics": ALL, "rounds": 4}, evaluate={"per_client": True, "held_out": 0.25})
    stopped = Run(experiment, tmp_path / "stopped", data=points())
    next(stopped), next(stopped)
    stopped.close()
    list(Run(experiment, tmp_path / "stopped", data=points(), again=True))
    list(Run(experiment, tmp_path / "whole", data=points()))
    timeless = [
        [{key: x for key, x in line.items() if not key.startswith("seconds.")} for line in lines(tmp_path / name)]
        for name in ("stopped", "whole")
    ]
    assert timeless[0] == timeless[1]
    contents = [(tmp_path / name / "client_scores.csv").read_text() for name in ("stopped", "whole")]
    assert contents[0] == contents[1]


def test_trackers_log_every_metric(tmp_path: Path) -> None:
    experiment = settings(
        train={"metrics": ["accuracy", "f1"]},
        evaluate={"per_client": True, "held_out": 0.25},
        uplink={"bits": "32+4"},
    )
    list(run(experiment, tmp_path / "run", data=points()))
    _, figures = list(Figures(tmp_path / "run" / "rounds.csv").new())[-1]
    last = lines(tmp_path / "run")[-1]
    assert figures["test/metric.f1"] == float(last["metric.f1"])
    assert figures["clients/worst"] == float(last["clients.worst"])
    assert figures["clients/group.4 bit"] == float(last["clients.group.4 bit"])


# the terminal and the report


def several(folder: Path) -> Path:
    """Two settings with an accuracy, an F1 and a perplexity that do not change."""
    for bits, f1, ppl in (("32+32", 0.75, 2.0), ("32+4", 0.5, 4.0)):
        raw = recorded(12, bits, False, train={"rounds": 12, "metrics": ["accuracy", "f1", "perplexity"]})
        write(folder / bits, raw, 0.625, figures={"metric.f1": f1, "metric.perplexity": ppl})
    return folder


def test_the_report_has_a_table_and_curves_of_all_metrics(tmp_path: Path) -> None:
    report = gather([several(tmp_path)])
    parts = {part.name: part for section in report.sections for part in section.parts}
    made, curves = parts["metrics"], parts["metric"]
    assert isinstance(made, Table)
    assert made.columns == [
        "line",
        "accuracy, % (higher is better)",
        "f1 (higher is better)",
        "perplexity (lower is better)",
    ]
    assert [row.cells for row in made.rows] == [
        ["32+32 bits", "62.5", "0.75", "2"],
        ["32+4 bits", "62.5", "0.5", "4"],
    ]
    assert isinstance(curves, Choice)
    assert [name for name, _ in curves.of] == ["f1", "perplexity"]
    chart = curves.of[1][1]
    assert isinstance(chart, Curves)
    assert chart.y.label == "perplexity (lower is better)"
    assert [set(curve.y) for curve in chart.panels[0].curves] == [{2}, {4}]
    assert "Further metrics" in render(report)


def test_a_report_without_further_metrics_has_no_such_table(tmp_path: Path) -> None:
    write(tmp_path / "run", recorded(12))
    names = [part.name for section in gather([tmp_path]).sections for part in section.parts]
    assert not {"metrics", "metric", "metric-1", "client-table"} & {*names}
    assert [section.name for section in gather([tmp_path]).sections] == ["worth", "answer", "cost", "inside", "what"]


def test_the_terminal_shows_all_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(settings(train={"metrics": ["accuracy", "f1", "perplexity"]}).toml())
    shown = fedshift("run", "small.toml", "--out", "run")
    assert "All metrics" in shown.output
    assert "perplexity" in shown.output
    rows = json.loads(fedshift("resume", "run", "--json").output.splitlines()[-1])["rows"]
    evaluated = [float(line["metric.f1"]) for line in lines(tmp_path / "run")]
    assert rows[0]["metrics"]["f1"] == pytest.approx(np.mean(evaluated))
    assert list(rows[0]["metrics"]) == ["accuracy", "f1", "perplexity"]


def test_runs_with_one_metric_have_no_further_table() -> None:
    assert table(rows([result("accuracy", None, "32+32", False, 0, 0.5)])) is None


def test_runs_that_differ_only_in_further_metrics_are_compared() -> None:
    """Full precision without F1 is the base of 4 bits with it."""
    runs = [
        result("accuracy", None, "32+32", False, 0, 0.75),
        result("accuracy", None, "32+4", False, 0, 0.5),
    ]
    extra = runs[1].experiment.changed(**{"train.metrics": ["accuracy", "f1"]})
    made = rows([runs[0], runs[1]._replace(experiment=extra)])
    assert [row.gain for row in made] == [None, -0.25]
    assert "train.metrics" in made[0].label
    drawn = table(made)
    assert drawn is not None
    assert "f1" in printed(drawn)


def test_the_names_of_metrics_are_those_that_have_a_goal() -> None:
    assert list(METRICS) == ALL
    assert None not in Experiment(train={"metrics": ALL}).train.directions.values()


def test_a_stack_of_runs_needs_the_same_metrics() -> None:
    from fedshift.runs.packs import kind

    assert kind(settings()) == kind(settings(train={"metrics": ["accuracy"]}))
    assert kind(settings()) != kind(settings(train={"metrics": ["accuracy", "f1"]}))


def test_a_federation_has_the_metrics_of_the_settings() -> None:
    task = federation(train={"metrics": ["accuracy", "f1"]}).task
    assert task.metrics == (METRICS["accuracy"], METRICS["f1"])
    assert isinstance(task.model, nn.Module)


@pytest.mark.parametrize("engine", ["sequential", "processes", "batched"])
def test_functions_that_change_their_arguments_change_no_data_and_no_other_score(engine: str) -> None:
    data, untouched = points(), points()
    named = ["tests.test_metrics:spoiling", "accuracy", "f1"]
    names = {"metric": named[0], "metrics": named, "goal": "max", "loss": "tests.test_metrics:spoiling_loss"}
    fed = federation(Inplace(), data, train=names, engine={"name": "sequential"})
    made = {"sequential": Sequential, "batched": lambda task: Batched(task, "fp32"), "processes": two_processes}
    trained: Engine = made[engine](fed.task)  # type: ignore[operator]
    first, again = trained.evaluate(fed.task.params), trained.evaluate(fed.task.params)
    trained.close()
    assert all(torch.equal(getattr(data, name), getattr(untouched, name)) for name in ("x", "y", "test_x", "test_y"))
    outputs = Inplace()(data.test_x.clone()).detach()
    guesses, group = outputs.argmax(-1), data.test_y.where(data.test_y != 3, 0)
    assert first == again
    assert first.metric == (guesses == group).sum()
    assert first.others[0] == pytest.approx(float((guesses == data.test_y).float().mean()))
    assert first.loss / first.examples == pytest.approx(float(F.cross_entropy(outputs, data.test_y % 2)), rel=1e-5)
    assert first.predicted == tuple(guesses.bincount(minlength=4).tolist())
