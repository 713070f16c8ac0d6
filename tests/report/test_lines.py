"""Lines of the legend: their runs, labels, colours and panels."""

from itertools import product
from pathlib import Path
from typing import Any

from fedshift.report.lines import Grouped, grouped
from fedshift.runs.recorded import Recorded, recorded
from tests.report.written import settings, write


def read(folders: list[Path]) -> list[Recorded]:
    return [run for folder in folders if isinstance(run := recorded(folder), Recorded)]


def lines_of(tmp_path: Path, *runs: dict[str, Any]) -> Grouped:
    return grouped(read([write(tmp_path / str(i), raw) for i, raw in enumerate(runs)]))


def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path: Path) -> None:
    made = lines_of(tmp_path, *(settings(shift=shift, seed=seed) for shift in (True, False) for seed in (0, 1)))
    assert [one.line.label for one in made.strands] == ["no shift", "shift per layer"]
    assert [one.line.runs for one in made.strands] == [["2", "3"], ["0", "1"]]
    assert [one.line.settings for one in made.strands] == [{"shift": "no"}, {"shift": "per layer"}]
    assert made.varying == ["shift.on"]


def test_a_line_is_dashed_without_the_shift_and_coloured_by_the_rest(tmp_path: Path) -> None:
    made = lines_of(tmp_path, *(settings(bits=bits, shift=on) for bits in ("32+4", "32+8") for on in (False, True)))
    assert [(one.line.label, one.line.colour, one.line.dash) for one in made.strands] == [
        ("32+4 bits, no shift", 0, "dashed"),
        ("32+4 bits, shift per layer", 0, ""),
        ("32+8 bits, no shift", 1, "dashed"),
        ("32+8 bits, shift per layer", 1, ""),
    ]
    assert {one.panel for one in made.strands} == {""}


def test_three_rules_of_one_band_have_one_colour_and_three_dashes(tmp_path: Path) -> None:
    rules = [{"on": True, "per": "filter"}, {"on": True, "per": "layer"}, {"on": False, "per": "filter"}]
    made = lines_of(tmp_path, *(settings() | {"shift": rule} for rule in rules))
    assert [(one.line.label, one.line.colour, one.line.dash) for one in made.strands] == [
        ("no shift", 0, "dashed"),
        ("shift per layer", 0, "dotdash"),
        ("shift per filter", 0, ""),
    ]
    assert {one.band for one in made.strands} == {"32+4 bits"}


def test_no_line_is_dashed_if_none_has_the_shift(tmp_path: Path) -> None:
    made = lines_of(tmp_path, settings(shift=False), settings(shift=False, bits="32+8"))
    assert not any(one.line.dash for one in made.strands)


def test_a_single_run_is_named_by_its_algorithm_bits_and_shift(tmp_path: Path) -> None:
    (one,) = lines_of(tmp_path, settings()).strands
    assert (one.line.label, one.heading, one.band) == ("fedavg, 32+4 bits, shift per layer", "fedavg", "32+4 bits")


def test_a_label_leaves_out_settings_that_are_off_or_redundant(tmp_path: Path) -> None:
    made = lines_of(
        tmp_path,
        settings(train={"lr": 0.1, "epochs": 1}, uplink={"quantizer": "kmeans"}),
        settings(train={"lr": 0.2, "epochs": 3}, uplink={"quantizer": "kmeans"}),
        settings(train={"lr": 0.1, "epochs": 1}, uplink={"quantizer": "kmeans", "feedback": True}),
    )
    assert [one.line.label for one in made.strands] == ["1 epoch", "3 epochs", "1 epoch, feedback"]
    assert made.strands[0].line.settings == {"epochs": "1", "lr": "0.1", "feedback": "no"}


def test_more_than_eight_lines_are_split_by_algorithm(tmp_path: Path) -> None:
    runs = product(("fedavg", "fedprox", "scaffold"), ("32+4", "32+8"), (False, True))
    made = lines_of(tmp_path, *(settings(bits=bits, shift=on, algorithm={"name": name}) for name, bits, on in runs))
    assert [one.panel for one in made.strands] == ["fedavg"] * 4 + ["fedprox"] * 4 + ["scaffold"] * 4
    assert [one.line.colour for one in made.strands] == [0, 0, 1, 1] * 3
    assert [one.band for one in made.strands[:4]] == ["32+4 bits", "32+4 bits", "32+8 bits", "32+8 bits"]


def test_without_algorithms_lines_are_split_by_the_setting_that_leaves_fewest_in_each_panel(tmp_path: Path) -> None:
    runs = product((0.1, 0.2, 0.3, 0.4, 0.5), ("32+4", "32+8"))
    made = lines_of(tmp_path, *(settings(bits=bits, train={"lr": lr}) for lr, bits in runs))
    assert {one.panel for one in made.strands} == {"32+4 bits", "32+8 bits"}


def test_a_duplicate_run_is_left_out(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", settings(), reached=9), write(tmp_path / "b", settings())
    made = grouped(read([first, second]))
    assert [run.folder for run in made.strands[0].runs] == [second]
    assert [(double.folder, kept.folder) for double, kept in made.doubles] == [(first, second)]


def test_a_line_consists_of_finished_seeds_or_else_of_unfinished_ones(tmp_path: Path) -> None:
    half = [write(tmp_path / "half", settings(seed=0), reached=9), write(tmp_path / "whole", settings(seed=1))]
    (one,) = grouped(read(half)).strands
    assert ([run.folder.name for run in one.runs], one.line.label) == (["whole"], "fedavg, 32+4 bits, shift per layer")
    (alone,) = grouped(read(half[:1])).strands
    assert (alone.row, alone.line.label) == (None, "fedavg, 32+4 bits, shift per layer, unfinished")
