"""The section "What was run?"."""

import json
from pathlib import Path

import pytest

from fedshift.report.charts import Choice, Heat, Table
from fedshift.report.gather import gather
from fedshift.report.lines import grouped
from fedshift.report.what import section
from fedshift.runs.recorded import Broken
from tests.report.test_lines import read
from tests.report.written import damage, settings, write, write_clients


def tables(folders: list[Path], broken: list[Broken] | None = None) -> dict[str, Table]:
    runs = read(folders)
    return {part.name: part for part in section(grouped(runs), runs, broken or []).parts if isinstance(part, Table)}


def test_every_run_is_listed_with_its_status(tmp_path: Path) -> None:
    whole, half = write(tmp_path / "a", settings(seed=0)), write(tmp_path / "b", settings(seed=1), reached=9)
    hurt = write(tmp_path / "c", settings(seed=2))
    damage(hurt / "rounds.csv", 5, lambda line: b"?")
    tail = write(tmp_path / "d", settings(seed=3))
    lines = (tail / "rounds.csv").read_text().splitlines(keepends=True)
    (tail / "rounds.csv").write_text("".join(lines[:9]))
    runs = tables([whole, half, hurt, tail], [Broken(tmp_path / "e", "settings.toml: not TOML")])["runs"]
    assert runs.columns == ["run", "seed", "status"]
    assert [(row.line, *row.cells) for row in runs.rows] == [
        ("line-0", "a", "0", "finished"),
        ("", "b", "1", "stopped after round 9 of 20"),
        ("line-0", "c", "2", "finished; 1 damaged line in rounds.csv; 1 round without a line"),
        ("", "d", "3", "finished, but the record ends with round 8 of 20; 12 rounds without a line"),
        ("", "e", "", "broken: settings.toml: not TOML"),
    ]


def test_settings_are_those_in_which_runs_agree(tmp_path: Path) -> None:
    folders = [write(tmp_path / str(lr), settings(train={"lr": lr})) for lr in (0.1, 0.2)]
    made = tables(folders)
    values = {row.cells[0]: row.cells[1] for row in made["settings"].rows}
    assert (values["train.rounds"], values["shift.on"], values["shift.share"]) == ("20", "per layer", "uploads")
    assert {"train.lr", "seed", "name", "shift.tensors"}.isdisjoint(values)
    assert made["settings"].folded
    assert made["runs"].columns == ["run", "lr", "seed", "status"]


def test_optimizer_steps_and_schedules_are_shown_unless_they_are_the_usual_ones(tmp_path: Path) -> None:
    kinds = {"usual": {}, "other": {"optimizer": {"name": "adamw", "betas": [0.9, 0.8]}, "steps": 20, "warmup": 3}}
    shown = {}
    for name, train in kinds.items():
        rows = tables([write(tmp_path / name, settings(train=train))])["settings"].rows
        shown[name] = {row.cells[0]: row.cells[1] for row in rows if row.cells[0].startswith("train.")}
    more = {
        "train.steps": "20",
        "train.warmup": "3",
        "train.optimizer.name": "adamw",
        "train.optimizer.betas": "0.9, 0.8",
    }
    assert shown["other"] == {key: x for key, x in shown["usual"].items() if key != "train.epochs"} | more
    assert more.keys().isdisjoint(shown["usual"])


def test_versions_are_counted(tmp_path: Path) -> None:
    folders = [write(tmp_path / str(seed), settings(seed=seed)) for seed in range(3)]
    (folders[2] / "about.json").write_text('{"commit": "def", "torch": "2.13"}')
    rows = [row.cells for row in tables(folders)["versions"].rows]
    assert rows == [["commit", "abc", "2"], ["commit", "def", "1"], ["torch", "2.13", "3"], ["cpu", "a Xeon", "2"]]


def test_shifted_tensors_are_listed_if_they_are_recorded(tmp_path: Path) -> None:
    names = [["fc1.weight", "fc2.weight"], ["fc1.weight", "fc2.weight"], [], None, "damaged"]
    folders = [write(tmp_path / str(seed), settings(seed=seed)) for seed in range(len(names))]
    for folder, shifted in zip(folders, names, strict=True):
        (folder / "about.json").write_text(json.dumps({} if shifted is None else {"shifted": shifted}))
    rows = [row.cells for row in tables(folders)["shifted"].rows]
    assert rows == [["per layer", "fc1.weight, fc2.weight", "2"], ["per layer", "none", "1"]]
    plain = write(tmp_path / "plain", settings(shift=False))
    (plain / "about.json").write_text('{"shifted": []}')
    assert "shifted" not in tables([plain])


def test_clients_are_ordered_by_group_those_of_most_bits_first(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    (heat,) = [part for part in section(grouped(read([folder])), read([folder]), []).parts if isinstance(part, Heat)]
    assert heat.rows == ["0, 32 bit", "2, 32 bit", "1, 4 bit", "3, 4 bit"]
    assert heat.values[0] == [10, 0, 10, 0]
    assert heat.marks == ["superior", "inferior", "superior", "inferior"]


def test_different_partitions_are_a_choice(tmp_path: Path) -> None:
    for seed in range(2):
        write(tmp_path / str(seed), settings(seed=seed))
    write_clients(tmp_path / "1", classes=3)
    runs = read(sorted(tmp_path.iterdir()))
    (choice,) = [part for part in section(grouped(runs), runs, []).parts if isinstance(part, Choice)]
    assert [label for label, _ in choice.of] == ["seed 0", "seed 1"]


@pytest.mark.parametrize("plain_first", [True, False])
def test_of_runs_with_the_same_partition_one_with_marks_is_shown(plain_first: bool, tmp_path: Path) -> None:
    plain, mixed = ("a", "b") if plain_first else ("b", "a")
    write(tmp_path / mixed, settings())
    write_clients(write(tmp_path / plain, settings(bits="32+32")), group=lambda client: f"32 bit ({client % 2 + 1})")
    runs = read(sorted(tmp_path.iterdir()))
    (heat,) = [part for part in section(grouped(runs), runs, []).parts if isinstance(part, Heat)]
    assert heat.marks == ["superior", "inferior", "superior", "inferior"]


def test_runs_of_the_same_name_are_distinguished_and_duplicates_are_marked(tmp_path: Path) -> None:
    for sweep, shift in (("a", True), ("b", False), ("c", True)):
        write(tmp_path / sweep / "seed-0", settings(shift=shift))
    made = gather([tmp_path])
    (table,) = [part for one in made.sections for part in one.parts if part.name == "runs"]
    assert isinstance(table, Table)
    assert [(row.cells[0], row.cells[-1]) for row in table.rows] == [
        ("a/seed-0", "finished"),
        ("b/seed-0", "finished"),
        ("c/seed-0", "finished; left out: another run has the same settings and seed"),
    ]
    assert made.warnings[0].endswith(f"c/seed-0 ({tmp_path / 'a' / 'seed-0'}).")
