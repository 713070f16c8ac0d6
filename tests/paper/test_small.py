"""The paper's tables at a small size, and the same uplinks on every task."""

from pathlib import Path

import pytest

from fedshift.cli.paper_tables import REPORTS
from fedshift.experiment import frontier, grid
from fedshift.paper import small, tasks
from fedshift.paper.experiments import SMALL, SMALL_ROUNDS, Cell, dirichlet, mixed
from fedshift.paper.records import published
from fedshift.paper.report import BEGIN, END, rewritten
from tests.paper.written import write
from tests.runs import fedshift, file_of
from tests.runs import small as tiny

ROOT = Path(__file__).parent.parent.parent


def put(to: Path, cell: Cell, accuracy: float, seed: int = 0) -> None:
    write(to, cell, accuracy, seed, base=SMALL, rounds=SMALL_ROUNDS)


def test_a_small_table_compares_the_gain_of_the_shift_with_the_papers(tmp_path: Path) -> None:
    """2.0 and 4.0 points in two seeds; the paper has 62.5 - 59.7 = 2.8."""
    for seed, gain in enumerate((0.02, 0.04)):
        put(tmp_path, mixed("fedpaq", 4, False), 0.70, seed)
        put(tmp_path, mixed("fedpaq", 4, True), 0.70 + gain, seed)
    put(tmp_path, dirichlet("uniform", 0.1, 4, False), 0.5)
    content = small.report(tmp_path).markdown()
    assert "| FedPAQ | 32+4 | 2 | 70.0 ± 0.0 | 73.0 ± 1.4 | +3.0 (+2.0, +4.0) | +2.8 |" in content
    assert "| uniform | 0.1 | 32+4 | 1 | 50.0 | not run | not run | fails |" in content
    assert "Of 1 pairs of cells with a figure in the paper, the shift helps in 1 here and in 1 in the paper" in content
    assert "| the shift helps in every cell | yes |" in content


def test_small_runs_are_not_those_of_the_paper(tmp_path: Path) -> None:
    put(tmp_path, mixed("fedpaq", 4, False), 0.7)
    assert not published(tmp_path, [mixed("fedpaq", 4, False)])[0].records
    assert published(tmp_path, [mixed("fedpaq", 4, False)], SMALL, SMALL_ROUNDS)[0].records


def test_the_small_tables_are_estimated_without_training(tmp_path: Path) -> None:
    done = fedshift("paper", "small", "--out", tmp_path / "runs", "--set", "data.name=digits", "--estimate")
    assert done.exit_code == 2  # images are needed
    assert "needs images" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_tasks_are_compared_from_published_records(tmp_path: Path) -> None:
    """Two seeds of lean and exact uploads, trained and published by the commands."""
    mine, out, results = tmp_path / "mine.toml", tmp_path / "out", tmp_path / "results"
    file_of(mine, tiny({"train": {"rounds": 2}}))
    assert fedshift("frontier", "--task", mine, "--brief", "--seeds", "2", "--out", out, "-q").exit_code == 0
    assert fedshift("paper", "publish", out, "--to", results / "digits").exit_code == 0
    done = fedshift("paper", "report", "tasks", "--results", results)
    assert done.exit_code == 0, done.output
    (task,) = tasks.published(results)
    assert {name: sorted(runs) for name, runs in task.runs.items()} == {name: [0, 1] for name in frontier.BRIEF}
    without, shifted = tasks.lean_lines(task)
    assert without[:4] == ("digits", "610", "no", "2")
    assert shifted[2:4] == ("per filter", "2")
    full, lean = (task.runs[name][0] for name in ("exact", "lean"))
    assert task.gains("lean", "exact").gains[0] == lean.score - full.score
    name, total, *parts, _ = tasks.parts_line(task)
    alone = tasks.TaskRuns(task.name, {"lean": task.runs["lean"]})
    assert tasks.weights(alone) == tasks.parts_line(alone)[-1] == ""
    assert name == "digits"
    numbers = [float(part.replace(",", "")) for part in (total, *parts)]
    assert abs(numbers[0] - sum(numbers[1:])) <= 2  # rounded
    assert grid.expand(frontier.settings("synthetic", 1, brief=True))[0].data.name == "synthetic"


@pytest.mark.parametrize("what", ["small", "tasks"])
def test_a_page_agrees_with_the_published_records(what: str) -> None:
    make, folder, document = REPORTS[what]
    page = (ROOT / document).read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    assert before
    assert END in rest
    if (ROOT / folder).is_dir():
        update = f"run `fedshift paper report {what} --markdown`"
        assert rewritten(page, make(ROOT / folder), document) == page, update


def test_an_unknown_report_is_refused_in_a_sentence() -> None:
    done = fedshift("paper", "report", "table1")
    assert (done.exit_code, done.stderr) == (2, "fedshift: paper report table1: must be one of paper, small, tasks\n")
