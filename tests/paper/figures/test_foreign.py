"""Figures of runs unlike the paper's, and protection of other files."""

from pathlib import Path

import pytest

from fedshift.cli.paper_figures import runs
from fedshift.core.files import RunError
from fedshift.paper.figures import curves, predictions
from fedshift.paper.figures.fence import ratios
from fedshift.paper.figures.records import Source
from tests.report.written import settings, write
from tests.runs import fedshift


def source(folder: Path) -> Source:
    found = runs(folder)
    assert found
    return found


def test_panels_name_their_data_and_model(tmp_path: Path) -> None:
    for data, model in (("mnist", "mlp"), ("digits", "paper-cnn")):
        write(tmp_path / data, settings(data={"name": data}, model={"name": model}))
    assert [panel.more for panel in source(tmp_path).panels] == [
        "data digits, model paper-cnn",
        "data mnist, model mlp",
    ]


def test_runs_with_different_metrics_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a", settings())
    write(tmp_path / "b", settings(train={"metric": "mine:gain"}), 7.0)
    with pytest.raises(
        RunError, match=r"have the metrics accuracy and metric\.gain; figure 7 needs runs of one metric"
    ):
        curves.draw_accuracy(source(tmp_path))


def test_shares_are_means_of_evaluated_rounds(tmp_path: Path) -> None:
    seldom: list[float | None] = [None, None, None, None, 0.25] * 4
    shares = {f"predicted.{label}": seldom for label in range(4)}
    write(tmp_path / "run", settings(record={"evaluate": 5}), seldom, figures={"loss": seldom, **shares})
    caption = predictions.draw(source(tmp_path)).figure.get_supxlabel()
    assert caption == "digits, 20 rounds, one seed; mean of the last 4 evaluated rounds"


def test_only_some_of_many_labels_are_on_the_axis(tmp_path: Path) -> None:
    write(tmp_path / "run", classes=100)
    axes = predictions.draw(source(tmp_path)).figure.axes[0]
    assert list(axes.get_xticks()) == list(range(0, 100, 5))


def test_one_round_is_too_few_for_the_fence(tmp_path: Path) -> None:
    write(tmp_path / "run", settings(rounds=1))
    found = source(tmp_path)
    assert found.drawn(found.panels) == f"1 run of 1 round in {tmp_path}"
    with pytest.raises(RunError, match="the fence needs layer means of consecutive rounds"):
        ratios(found.pair)


def test_only_figures_of_this_command_are_overwritten(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "figure-2.svg", tmp_path / "figure-1.svg"
    for _ in range(2):
        assert fedshift("paper", "figures", "2", "--format", "svg", "--format", "pdf", "--out", tmp_path).exit_code == 0
    theirs.write_text("mine")
    before = ours.read_bytes()
    refused = fedshift("paper", "figures", "1", "2", "--out", tmp_path)
    assert refused.exit_code == 2
    assert f"{theirs}: already exists and was not drawn by fedshift paper figures" in refused.stderr
    assert (theirs.read_text(), ours.read_bytes()) == ("mine", before)
