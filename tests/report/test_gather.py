"""Reports on folders with complete, unfinished and damaged runs."""

import os
from itertools import product
from pathlib import Path
from shutil import copytree

import pytest

from fedshift.core.files import RunError
from fedshift.report.charts import Curves, Report, Section, to_json
from fedshift.report.files import write_report
from fedshift.report.gather import gather
from fedshift.runs.progress import strict_json
from tests.report.written import damage, published, settings, write, write_histograms
from tests.runs import linux

ROOT = Path(__file__).parent.parent.parent


def section(of: Report, name: str) -> Section:
    (found,) = [one for one in of.sections if one.name == name]
    return found


def test_a_report_answers_in_order(tmp_path: Path) -> None:
    for seed in range(2):
        write(tmp_path / "sweep" / f"seed-{seed}", settings(seed=seed))
    made = gather([tmp_path / "sweep"])
    assert (made.title, made.about) == ("sweep", "digits: 2 runs of 20 rounds, seeds 0, 1")
    assert [one.title for one in made.sections] == [
        "Was compression worth it?",
        "Did the shift help?",
        "What did it cost?",
        "What happened during training?",
        "What was run?",
    ]
    assert made.warnings == []


def test_names_of_charts_and_tables_are_unique(tmp_path: Path) -> None:
    for i, raw in enumerate([settings(), settings(train={"metric": "mine:gain"}), settings(data={"name": "mnist"})]):
        write_histograms(write(tmp_path / str(i), raw), [1, 20])
    names = [part.name for one in gather([tmp_path]).sections for part in one.parts]
    assert len(names) == len(set(names))
    assert {"results", "results-2", "score", "score-2", "predicted", "predicted-2"} <= set(names)


def test_unfinished_broken_damaged_and_duplicate_runs_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "whole", settings(seed=0))
    copytree(tmp_path / "whole", tmp_path / "whole again")
    write(tmp_path / "half", settings(seed=1), reached=9)
    damage(write(tmp_path / "hurt", settings(seed=2)) / "rounds.csv", 5, lambda line: b"?")
    (write(tmp_path / "broken", settings(seed=3)) / "settings.toml").write_text("?")
    runs = "runs = [{seed = 0, name = 'a_seed-0'}, {seed = 5, name = 'b_seed-5'}]"
    (tmp_path / "sweep.toml").write_text(f"[sweep]\n{runs}\n")
    (tmp_path / "a_seed-0").mkdir()
    unfinished, waiting, broken, hurt, double = gather([tmp_path]).warnings
    assert unfinished == "Not finished, and not included in final scores: half (stopped after round 9 of 20)."
    assert waiting == "Not started: b_seed-5."
    assert broken.startswith(f"Broken: broken ({tmp_path / 'broken' / 'settings.toml'}: not TOML")
    assert hurt == (
        "Damaged, and read without the damaged lines: hurt (1 damaged line in rounds.csv; 1 round without a line)."
    )
    assert double == (
        f"Left out, because another run has the same settings and seed: whole again ({tmp_path / 'whole'})."
    )


def test_a_run_without_rounds_does_not_prevent_a_report(tmp_path: Path) -> None:
    write(tmp_path / "begun", reached=0)
    alone = gather([tmp_path])
    assert alone.warnings == ["Not finished, and not included in final scores: begun (stopped after round 0 of 20)."]
    assert [part.name for one in alone.sections for part in one.parts] == [
        "worth-table",
        "results",
        "runs",
        "settings",
        "versions",
        "clients",
    ]
    write(tmp_path / "whole", settings(shift=False))
    assert [
        len(part.panels[0].curves)
        for part in section(gather([tmp_path]), "inside").parts[:1]
        if isinstance(part, Curves)
    ] == [1]


def test_a_folder_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "run")
    (tmp_path / "sweep.toml").write_text("[sweep]\nruns = [{seed = 5, name = 'b_seed-5'}]\n")
    made = gather([tmp_path, tmp_path, tmp_path / "run", tmp_path / "." / "run"])
    assert made.about == "digits: 1 run of 20 rounds, seed 0"
    assert made.warnings == ["Not started: b_seed-5."]


@linux
def test_a_folder_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    """Its path is too long for the system, which fails for all users."""
    write(tmp_path / "run")
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("x" * 250, dir_fd=at)
        inner = os.open("x" * 250, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    made = gather([tmp_path])
    assert made.about == "digits: 1 run of 20 rounds, seed 0"
    (broken,) = made.warnings
    assert broken.startswith(f"Broken: {'x' * 250} (")
    assert "File name too long" in broken


def test_a_name_that_is_not_utf_8_does_not_prevent_a_report(tmp_path: Path) -> None:
    folder = write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")))
    page = write_report([folder], tmp_path / "report.html").read_text("utf-8")
    assert "<title>bad\\udcff</title>" in page


def test_published_and_complete_records_are_compared(tmp_path: Path) -> None:
    published(tmp_path / "a", settings(shift=False), 0.5)
    write(tmp_path / "b", settings(shift=True), 0.6)
    made = gather([tmp_path])
    assert made.warnings == []
    assert section(made, "answer").answer == ["The shift per layer gave back 10.0 points (one seed: noise unknown)."]


def test_the_published_records_of_the_paper_make_a_report() -> None:
    made = gather([ROOT / "results"])
    assert made.warnings == []
    answer = section(made, "answer").answer
    assert answer[0].startswith("With the shift per layer, accuracy is higher in ")
    assert answer[3].startswith("With the shift per filter, accuracy is higher in ")


def test_a_sweep_of_120_runs_of_800_rounds_is_readable(tmp_path: Path) -> None:
    layers = ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight")
    wander = [0.1 + 0.8 * ((t * 7919) % 997) / 997 for t in range(800)]
    figures = {f"{figure}.{layer}": wander for figure in ("mean_after", "step", "drift") for layer in layers}
    grid = product(("fedavg", "fedprox", "scaffold"), ("32+4", "32+5", "32+6", "32+8"), (False, True), range(5))
    for name, bits, shift, seed in grid:
        raw = settings(rounds=800, bits=bits, shift=shift, seed=seed, algorithm={"name": name})
        folder = tmp_path / f"{name}_{bits}_{shift}_{seed}"
        write(folder, raw, wander, layers=layers, classes=10, figures=figures)
        write_histograms(folder, [1, *range(50, 801, 50)], layers)
    made = gather([tmp_path])
    assert len(made.lines) == 24
    (score,) = [part for part in section(made, "inside").parts if part.name == "score"]
    assert isinstance(score, Curves)
    assert [(panel.title, len(panel.curves)) for panel in score.panels] == [
        ("fedavg", 8),
        ("fedprox", 8),
        ("scaffold", 8),
    ]
    assert len({line.colour for line in made.lines}) == 4
    assert len(strict_json(to_json(made))) < 3_000_000


def test_folders_without_runs_are_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere: there is no such folder"):
        gather([tmp_path / "nowhere"])
    with pytest.raises(RunError, match=r"contains no run \(there is no settings\.toml in it or below\)"):
        gather([tmp_path])
    (write(tmp_path / "run") / "settings.toml").write_text("?")
    with pytest.raises(RunError, match=r"settings\.toml: not TOML: .*; there is no other run in "):
        gather([tmp_path])
