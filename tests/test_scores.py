"""Scores of runs: a loss, a metric and its goal, in the record, the terminal and the report."""

import csv
import io
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from fedshift import Dataset, Experiment, dataset, run
from fedshift.experiment.toml import SettingsError
from fedshift.report.answers import section
from fedshift.report.charts import Intervals, Table
from fedshift.report.gather import gather
from fedshift.report.lines import grouped
from fedshift.report.page import render
from fedshift.runs.progress import LineDisplay
from fedshift.runs.summary import RunResult, rows, sentences, table
from tests.federations import points
from tests.report.test_lines import read
from tests.report.written import settings as recorded
from tests.report.written import write
from tests.runs import fedshift

Goal = Literal["min", "max"]
SMALL: dict[str, Any] = {
    "data": {"clients": 4, "partition": "iid"},
    "train": {"rounds": 2, "cohort": 2, "epochs": 1, "lr": 0.05},
    "shift": {"on": False},
    "engine": {"name": "sequential"},
}


def sums(*shape: int) -> Dataset:
    """Targets that are the sum of four numbers."""
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1).view(-1, *shape)
    return dataset(x[:60], y[:60], x[60:], y[60:])


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs().squeeze(1)


def close(outputs: Tensor, targets: Tensor) -> Tensor:
    return mae(outputs, targets) < 0.5


def line(out: Path) -> dict[str, str]:
    """Last line of a record."""
    return list(csv.DictReader(io.StringIO((out / "rounds.csv").read_text())))[-1]


def printed(of: object) -> str:
    console = Console(file=io.StringIO(), width=120, markup=False)
    console.print(of)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


# what is trained


@pytest.mark.parametrize("metric", [None, mae])
def test_a_loss_that_is_not_a_mean_is_refused_before_anything_is_written(metric: Any, tmp_path: Path) -> None:
    loss = nn.MSELoss(reduction="none")
    with pytest.raises(
        SettingsError, match=r"a loss must return one number, the mean over the batch, not shape \(20, 1\)"
    ):
        run(Experiment(**SMALL), tmp_path / "run", model=nn.Linear(4, 1), data=sums(1), loss=loss, metric=metric)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("shape", "seen"), [((), "(60,)"), ((1,), "(60, 1)"), ((2,), "(30, 2)")])
def test_floating_point_targets_are_not_interpreted_as_probabilities(
    shape: tuple[int, ...], seen: str, tmp_path: Path
) -> None:
    x = torch.zeros(60, 4)
    y = torch.arange(60.0).view(-1, *shape)
    data = dataset(x[: len(y)], y, x[: len(y)], y)
    with pytest.raises(SettingsError) as problem:
        run(Experiment(**SMALL), tmp_path / "run", model=nn.Linear(4, 2), data=data)
    assert str(problem.value) == (
        f"train.loss = 'cross-entropy': the targets are floating point numbers of shape {seen} and not class "
        "probabilities; labels must be whole numbers, and for regression train.loss = "
        "'torch.nn.functional:mse_loss' compares outputs and targets of one shape"
    )
    assert not (tmp_path / "run").exists()


def test_soft_labels_are_trained_with_cross_entropy() -> None:
    """A label and its softened form have the same largest entry, and so the same accuracy."""
    hard = points()
    soft = dataset(
        hard.x,
        0.9 * F.one_hot(hard.y, 4) + 0.025,
        hard.test_x,
        0.9 * F.one_hot(hard.test_y, 4) + 0.025,
    )
    outcomes = list(run(Experiment(**SMALL), model=nn.Linear(6, 4), data=soft))
    assert 0 <= (outcomes[-1].accuracy or -1) <= 1
    fixed = nn.Linear(6, 4)
    still = Experiment(**SMALL).changed(**{"train.lr": 1e-20})
    scores = [[one.accuracy for one in run(still, model=fixed, data=data)] for data in (hard, soft)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_the_loss_that_a_refusal_names_works(engine: str, dtype: torch.dtype) -> None:
    experiment = Experiment(**SMALL).changed(
        **{"train.loss": "torch.nn.functional:mse_loss", "engine.name": engine, "train.rounds": 6}
    )
    losses = [one.loss or 0.0 for one in run(experiment, model=nn.Linear(4, 1).to(dtype), data=sums(1))]
    assert losses[-1] < losses[0] / 4


def test_targets_that_torch_would_broadcast_are_refused(tmp_path: Path) -> None:
    experiment = Experiment(**SMALL).changed(**{"train.loss": "torch.nn.functional:mse_loss"})
    with pytest.raises(SettingsError, match=r"Using a target size \(torch.Size\(\[20\]\)\) that is different"):
        run(experiment, tmp_path / "run", model=nn.Linear(4, 1), data=sums())
    assert not (tmp_path / "run").exists()


# what it is scored by


def test_a_custom_loss_is_the_score_unless_there_is_a_metric(tmp_path: Path) -> None:
    assert Experiment().train.metric == "accuracy"
    assert Experiment(train={"loss": "mine:f"}).train.metric == "loss"
    assert Experiment(train={"loss": "mine:f", "metric": "accuracy"}).train.metric == "accuracy"
    assert Experiment(train={"metric": "accuracy"}).changed(**{"train.loss": "mine:f"}).train.metric == "accuracy"
    assert Experiment().changed(**{"train.loss": "mine:f"}).train.metric == "loss"
    whole = run(Experiment(**SMALL), tmp_path / "run", model=nn.Linear(4, 1), data=sums(1), loss=F.mse_loss)
    (*_, last) = whole
    assert whole.experiment.train.metric == "loss"
    assert last.accuracy == last.loss
    cells = line(tmp_path / "run")
    assert float(cells["loss"]) == pytest.approx(last.loss, rel=1e-5)
    assert "accuracy" not in cells
    assert 'metric = "loss"' in (tmp_path / "run" / "settings.toml").read_text()


def test_a_custom_loss_with_accuracy_as_metric_has_both(tmp_path: Path) -> None:
    experiment = Experiment(**SMALL).changed(**{"train.metric": "accuracy"})
    (*_, last) = run(experiment, tmp_path / "run", model=nn.Linear(6, 4), data=points(), loss=F.cross_entropy)
    cells = line(tmp_path / "run")
    assert float(cells["accuracy"]) == pytest.approx(last.accuracy, rel=1e-5)
    assert float(cells["loss"]) == pytest.approx(last.loss, rel=1e-5)


def test_progress_shows_the_metric_by_its_name() -> None:
    console = Console(file=io.StringIO(), width=120)
    lines = LineDisplay(console, console)
    for place, metric in enumerate(("accuracy", "loss", "mine:mae")):
        assert lines.add(f"run {place}", 1, Path(), metric) == place
        lines.round(place, 1, 0.25, 0.5, 1_500_000)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "run 0: round 1 of 1, 25.0 %, loss 0.500, 1.5 MB up",
        "run 1: round 1 of 1, loss 0.500, 1.5 MB up",
        "run 2: round 1 of 1, mae 0.25, loss 0.500, 1.5 MB up",
    ]


# which scores are better


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (
            {"goal": "minimise"},
            "train.goal = 'minimise': must be 'min' (lower is better) or 'max' (higher is better), perhaps 'min'",
        ),
        (
            {"goal": "highest"},
            "train.goal = 'highest': must be 'min' (lower is better) or 'max' (higher is better), perhaps 'max'",
        ),
        ({"goal": "min"}, "train.goal = 'min': the goal of accuracy is 'max'"),
        ({"metric": "loss", "goal": "max"}, "train.goal = 'max': the goal of loss is 'min'"),
    ],
)
def test_an_invalid_goal_is_reported_in_one_sentence(train: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as problem:
        Experiment(train=train)
    assert str(problem.value) == sentence
    assert Experiment(train={"metric": "mine:error", "goal": "max"}).train.direction == "max"  # its owner knows


def test_a_metric_of_unknown_direction_requires_a_goal(tmp_path: Path) -> None:
    own: dict[str, Any] = {"model": nn.Linear(4, 1), "data": sums(1), "loss": F.mse_loss, "metric": close}
    with pytest.raises(SettingsError) as problem:
        run(Experiment(**SMALL), tmp_path / "run", **own)
    assert str(problem.value) == (
        "train.metric = 'tests.test_scores:close': its name does not say which scores are better; "
        "set train.goal to 'min' (lower is better) or 'max' (higher is better)"
    )
    assert not (tmp_path / "run").exists()
    begun = run(Experiment(**SMALL), tmp_path / "run", goal="max", **own)
    assert [outcome.number for outcome in begun] == [1, 2]
    settings = tmp_path / "run" / "settings.toml"
    assert 'goal = "max"' in settings.read_text()
    settings.write_text(settings.read_text().replace('goal = "max"\n', ""))  # as before there were goals
    warnings = gather([tmp_path / "run"]).warnings
    assert warnings == ["No goal is recorded for tests.test_scores:close; higher values are assumed to be better."]


def result(metric: str, goal: Goal | None, bits: str, shift: bool, seed: int, score: float) -> RunResult:
    train = {"metric": metric} | ({"goal": goal} if goal else {})
    experiment = Experiment(uplink={"bits": bits}, shift={"on": shift}, seed=seed, train=train)
    return RunResult(experiment, score, score, 1_000_000)


def compared(metric: str, goal: Goal | None = None) -> list[RunResult]:
    """0.5 with 32 bits, 0.75 with 4, 0.625 with 4 and the shift; seeds add 0, 0.125 and 0.25."""
    kinds = (("32+32", False, 0.5), ("32+4", False, 0.75), ("32+4", True, 0.625))
    return [
        result(metric, goal, bits, shift, seed, score + seed / 8) for bits, shift, score in kinds for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("metric", "goal", "verdicts"),
    [
        ("mine:mae", None, ("worsened", "improved")),
        ("mine:auc", None, ("improved", "worsened")),
        ("mine:close", "min", ("worsened", "improved")),
        ("mine:close", "max", ("improved", "worsened")),
        ("loss", None, ("worsened", "improved")),
    ],
)
def test_the_terminal_judges_by_the_goal(metric: str, goal: Goal | None, verdicts: tuple[str, str]) -> None:
    """0.75 - 0.5 = 0.25 and 0.625 - 0.75 = -0.125, in every seed."""
    name = metric.rpartition(":")[2]
    assert sentences(rows(compared(metric, goal))) == [
        f"32+4 bits {verdicts[0]} {name} by 0.25 against 32.",
        f"The shift per filter {verdicts[1]} {name} by 0.125 at 32+4 bits.",
    ]


def test_the_table_says_whether_a_difference_of_an_error_is_better() -> None:
    made = rows(compared("mine:mae"))
    drawn = printed(table(made, made[0].experiment))
    assert "+0.25 (worse) against 32 bits" in drawn
    assert "-0.125 (better) against no shift" in drawn
    assert "0.625 ± 0.125" in drawn  # no percentage
    made = rows(compared("mine:auc"))
    drawn = printed(table(made, made[0].experiment))
    assert "+0.25 against 32 bits" in drawn
    assert "-0.125 against no shift" in drawn


def test_a_table_of_several_metrics_names_each() -> None:
    runs = [result(metric, None, "32+32", False, 0, 0.5) for metric in ("accuracy", "loss", "mine:mae")]
    drawn = printed(table(rows(runs), runs[0].experiment))
    assert all(cell in drawn for cell in ("score", "accuracy 50.0", "loss 0.5", "mae 0.5"))


def test_a_difference_of_zero_is_neither_better_nor_worse() -> None:
    kinds = [result("mine:mae", None, "32+4", shift, seed, 0.5) for shift in (False, True) for seed in range(3)]
    assert sentences(rows(kinds)) == ["The shift per filter made no difference (within noise)."]


# the report


def written(folder: Path, metric: str, goal: Goal | None = None) -> list[Path]:
    for i, one in enumerate(compared(metric, goal)):
        experiment = one.experiment
        train = {"rounds": 12, "metric": metric} | ({"goal": goal} if goal else {})
        more = recorded(12, str(experiment.uplink.bits), experiment.shift.on, seed=experiment.seed, train=train)
        write(folder / f"run {i}", more, one.score)
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    ("metric", "goal", "answer"),
    [
        ("mine:mae", None, "With the shift per layer, mae differs by -0.125 (better)."),
        ("mine:auc", None, "With the shift per layer, auc differs by -0.125."),
        ("mine:close", "min", "With the shift per layer, close differs by -0.125 (better)."),
    ],
)
def test_the_report_judges_by_the_goal(metric: str, goal: Goal | None, answer: str, tmp_path: Path) -> None:
    made = section(grouped(read(written(tmp_path, metric, goal))))
    lower, name = "(better)" in answer, metric.rpartition(":")[2]
    assert made.answer == [answer]
    results, chart = made.parts
    assert isinstance(results, Table)
    assert results.title == f"Final {name}{' (lower is better)' * lower}"
    assert [row.cells[3] for row in results.rows][1:] == [
        f"+0.25{' (worse)' * lower} against 32 bits",
        f"-0.125{' (better)' * lower} against no shift",
    ]
    assert isinstance(chart, Intervals)
    assert (chart.lower, chart.x.label, chart.x.unit) == (lower, f"{name}{' (lower is better)' * lower}", "")


def test_many_comparisons_of_an_error_are_counted_by_its_goal(tmp_path: Path) -> None:
    for algorithm, change in (("fedavg", 0.25), ("fedprox", -0.125)):
        for shift in (False, True):
            raw = recorded(12, shift=shift, algorithm={"name": algorithm}, train={"rounds": 12, "metric": "mine:mae"})
            write(tmp_path / f"{algorithm} {shift}", raw, 0.5 + change * shift)
    made = section(grouped(read(sorted(tmp_path.iterdir()))))
    assert made.answer == [
        "With the shift per layer, mae is higher (worse) in 1 of 2 comparisons and lower (better) in 1.",
        "There are too few seeds to estimate the noise.",
        "The mean difference is +0.0625 (worse), from -0.125 (better) (fedprox, shift per layer) "
        "to +0.25 (worse) (fedavg, shift per layer).",
    ]


@pytest.mark.parametrize(
    ("metric", "best"), [("mine:mae", "lowest of 2 is lr 0.1"), ("mine:auc", "highest of 2 is lr 0.2")]
)
def test_the_best_of_several_lines_follows_the_goal(metric: str, best: str, tmp_path: Path) -> None:
    for lr, score in ((0.1, 0.25), (0.2, 0.75)):
        raw = recorded(12, shift=False, train={"rounds": 12, "metric": metric, "lr": lr})
        write(tmp_path / f"{lr}", raw, score)
    answer = section(grouped(read(sorted(tmp_path.iterdir())))).answer[0]
    name, value = metric.rpartition(":")[2], {"mine:mae": "0.25", "mine:auc": "0.75"}[metric]
    assert answer == f"The {best}, with {name} {value}, the mean of the last 10 evaluated rounds."


def test_a_page_of_losses_draws_them_once(tmp_path: Path) -> None:
    for shift in (False, True):
        raw = recorded(12, shift=shift, train={"rounds": 12, "loss": "mine:f"})
        write(tmp_path / f"{shift}", raw, figures={"loss": 0.5 - shift / 4})
    report = gather([tmp_path])
    names = [part.name for one in report.sections for part in one.parts]
    assert [name for name in names if name.startswith(("score", "loss"))] == ["score-bytes", "score-seconds", "score"]
    page = render(report)
    assert "With the shift per layer, loss differs by -0.25 (better) (one seed: noise unknown)." in page
    assert "loss (lower is better)" in page
    assert "accuracy" not in page.partition("<script")[0]


def test_a_sweep_of_a_regression_is_judged_in_words_and_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "regression.py").write_text(
        "from tests.test_scores import mae, nn, sums\n\n\ndef arrays():\n    return sums(1)\n\n\n"
        "def model():\n    return nn.Linear(4, 1)\n"
    )
    (tmp_path / "grid.toml").write_text(
        'data = {name = "regression:arrays", clients = 4, partition = "iid"}\n'
        'model = {name = "regression:model"}\n'
        'train = {rounds = 1, cohort = 4, loss = "torch.nn.functional:mse_loss", metric = "regression:mae"}\n'
        'shift = {on = false}\nsweep = {"uplink.bits" = ["32+32", "32+1"]}\n'
    )
    shown = fedshift("sweep", "grid.toml", "--out", "runs")
    assert "mae (lower is better): mean of the last 1 evaluated rounds" in shown.output
    assert "accuracy" not in shown.output
    again = fedshift("resume", "runs", "--json")
    rows = json.loads(again.output.splitlines()[-1])["rows"]
    assert [(row["metric"], row["goal"]) for row in rows] == [("regression:mae", "min")] * 2
