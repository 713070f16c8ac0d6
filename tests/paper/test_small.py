"""The paper's tables at a small size, and the same uplinks on every task."""

from pathlib import Path

import pytest

from fedshift import Experiment
from fedshift.cli.paper_tables import REPORTS
from fedshift.experiment import frontier, grid
from fedshift.experiment.toml import merge
from fedshift.paper import dadaquant, small, tasks
from fedshift.paper.experiments import (
    BASE,
    SMALL,
    SMALL_ROUNDS,
    STATIC,
    Cell,
    brief,
    contrasts,
    dirichlet,
    filtered,
    mixed,
    settings,
)
from fedshift.paper.experiments import dadaquant as dadaquant_cells
from fedshift.paper.records import Results, finished_runs, published
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
    assert "| FedPAQ | 32+4 | 70.0 ± 0.0 (2) | 73.0 ± 1.4 (2) | not run | +3.0 |  | +2.8 |" in content
    assert "| uniform | 0.1 | 32+4 | 50.0 (1) | not run | not run |  |  | fails |" in content
    assert "Of 1 settings with figures in the paper, its shift helps in 1 here and in 1 in the paper" in content
    assert "| the shift helps in every cell | yes | not tested |" in content


def test_a_small_report_compares_gains_with_those_at_full_size(tmp_path: Path) -> None:
    """The shift adds 3.0 points here and 2.0 at full size, per filter -1.0 and 4.0."""
    plain, layer = (mixed("fedpaq", 4, shift) for shift in (False, True))
    cells = plain, layer, filtered(plain)
    for cell, here, full in zip(cells, (0.70, 0.73, 0.69), (0.60, 0.62, 0.64), strict=True):
        put(tmp_path / "small", cell, here)
        write(tmp_path, cell, full)
    put(tmp_path / "small", mixed("fedef", 4, False), 0.7)
    content = small.report(tmp_path / "small").markdown()
    figures = "+3.0 (+3.0 to +3.0) | 1 of 1 | +2.0 (+2.0 to +2.0) | 1 of 1 | 1 of 1"
    assert f"| Table 1 | per layer | 1 of 1 | {figures} |" in content
    figures = "-1.0 (-1.0 to -1.0) | 0 of 1 | +4.0 (+4.0 to +4.0) | 1 of 1 | 0 of 1"
    assert f"| Table 1 | per filter | 1 of 1 | {figures} |" in content
    assert "| Table 2 | per layer | 0 of 0 | not run |  | not run |  |  |" in content
    assert "| the shift helps in every cell | yes | yes |" in content


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
    assert fedshift("paper", "publish", out, "--to", results / "tasks" / "digits").exit_code == 0
    done = fedshift("paper", "report", "tasks", "--results", results)
    assert done.exit_code == 0, done.output
    (task,) = tasks.published(results)
    runs = task.results.records
    assert {name: sorted(seeds) for name, seeds in runs.items()} == {name: [0, 1] for name in frontier.BRIEF}
    without, shifted = tasks.lean_lines(task)
    assert without[:3] == ("digits", "610", "no")
    assert shifted[2] == "per filter"
    assert shifted[4].endswith(" (2)")  # seeds
    full, lean = (runs[name][0] for name in ("exact", "lean"))
    assert task.gains("lean", "exact").gains[0] == lean.score - full.score
    name, total, *parts, _ = tasks.parts_line(task)
    alone = tasks.TaskRuns(task.name, Results({"lean": runs["lean"]}))
    assert tasks.parts_line(alone)[-1] == ""
    assert name == "digits"
    numbers = [float(part.replace(",", "")) for part in (total, *parts)]
    assert abs(numbers[0] - sum(numbers[1:])) <= 2  # rounded
    assert grid.expand(frontier.settings("synthetic", 1, brief=True))[0].data.name == "synthetic"


def test_the_paper_task_is_compared_from_the_papers_records(tmp_path: Path) -> None:
    """Lean loses 0.5 points with a fifth of the bytes; the shift adds 5.0 points, per layer 2.0."""
    plain, shifted = mixed("fedavg", 32, False), {row.label[1:]: row for row in contrasts()}["two labels", "32+32"]
    lean = brief()["lean"]
    for cell, accuracy, sent in (plain, 0.70, 5000), (shifted.filter, 0.75, 5000), (lean, 0.745, 1000):
        write(tmp_path, cell, accuracy, sent=sent)
    write(tmp_path, shifted.layer, 0.72)
    (task,) = tasks.published(tmp_path)
    assert {name: sorted(runs) for name, runs in task.results.records.items()} == {
        name: [0] for name in ("exact-no-shift", "exact", "lean", "exact-layer")
    }
    without, with_shift = tasks.lean_lines(task)
    assert without == ("cifar10", "2,155,872", "no", "70.0 (1)", "not run", "", "", "")
    assert with_shift == ("cifar10", "2,155,872", "per filter", "75.0 (1)", "74.5 (1)", "-0.5", "", "5.0")
    content = tasks.report(tmp_path).markdown()
    assert "| cifar10 | two labels | exact | 70.0 (1) | +2.0 | +5.0 |" in content
    assert tasks.parts_line(task)[1:] == ("",) * 5  # these records have no parts


def test_scores_of_a_task_state_the_number_of_their_seeds(tmp_path: Path) -> None:
    """Full precision in two seeds, random and nearest codes in one: differences are over the seed that both have."""
    for name, accuracies in (("exact", (0.80, 0.82)), ("lean", (0.79,)), ("nearest", (0.75,))):
        for seed, accuracy in enumerate(accuracies):
            write(tmp_path, brief()[name], accuracy, seed)
    (task,) = tasks.published(tmp_path)
    _, line = tasks.lean_lines(task)
    assert line[3:6] == ("81.0 ± 1.4 (2)", "79.0 (1)", "-1.0")
    assert tasks.nearest_lines(task) == [("cifar10", "per filter", "79.0 (1)", "-1.0", "75.0 (1)", "-5.0")]


def test_a_run_of_the_full_frontier_with_nearest_codes_at_the_rate_of_lean_is_recognised() -> None:
    (run,) = (x for x in grid.expand(frontier.settings("digits", 1)) if x.name == "step-0.8_seed-0")
    assert tasks.kind(run) == "nearest"


def test_brief_cells_of_the_paper_task_have_the_settings_of_a_frontier() -> None:
    assert brief().keys() == frontier.BRIEF.keys() | frontier.EARLIER.keys()
    for name in frontier.BRIEF:
        cell = brief()[name]
        ours = Experiment(**merge(BASE, settings(cell, 0)))
        theirs = next(x for x in grid.expand(frontier.settings("cifar10", 1, brief=True)) if x.name == f"{name}_seed-0")
        assert ours.shift.on == theirs.shift.on
        assert ours.shift.per == theirs.shift.per or not ours.shift.on
        kind = (
            {"quantizer", "rate", "keep", "feedback", "biases", "send"} if ours.uplink.bits != "32+32" else {"feedback"}
        )
        assert ours.uplink.model_dump(include=kind) == theirs.uplink.model_dump(include=kind)


def test_dadaquants_row_is_trained_published_and_compared(tmp_path: Path) -> None:
    """Two rounds of each uplink: more levels of QSGD cost more bytes, and a frame consists of its parts."""
    few = ("--set", "train.epochs=1", "--rounds", "2", "--set", "engine.name=sequential")
    done = fedshift("paper", "dadaquant", "--out", tmp_path / "runs", *few, "-q")
    assert done.exit_code == 0, done.output
    folders = sorted((tmp_path / "runs").glob("*_seed-0"))
    assert len(folders) == len(dadaquant_cells())
    runs = [(cell, 0, tmp_path / "runs" / f"{cell.name}_2-rounds_seed-0") for cell in dadaquant_cells()]
    results = finished_runs(runs)
    lines = {line[0]: line for line in dadaquant.listing(results).rows}
    numbers = {name: [float(x.replace(",", "")) for x in line[5:9]] for name, line in lines.items()}
    assert all(abs(total - sum(parts)) <= 2 for total, *parts in numbers.values())  # rounded
    levels = [numbers[f"QSGD, q = {q}"][1] for q in STATIC]
    assert levels == sorted(levels)
    assert numbers["full precision"][1] == 610 * 4
    assert lines["QSGD, q = 16"][-1] == "17"


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
    assert (done.exit_code, done.stderr) == (
        2,
        "fedshift: paper report table1: must be one of paper, details, small, tasks\n",
    )
