"""The section "Was compression worth it?"."""

from pathlib import Path
from typing import Any

import pytest

from fedshift.report.charts import Choice, Points, Section, Table
from fedshift.report.lines import grouped
from fedshift.report.worth import section
from tests.report.test_lines import read
from tests.report.written import settings, write

SMALL = {"bytes.codes": 0, "bytes.side": 60, "bytes.header": 40}  # 100 bytes a round instead of 1000


def answered(tmp_path: Path, *runs: tuple[dict[str, Any], float | list[float], bool], **more: Any) -> Section:
    """Section on runs, given by their settings, their scores, and True for small uploads."""
    for i, (raw, score, small) in enumerate(runs):
        write(tmp_path / f"{i:02}", raw, score, figures=SMALL if small else {}, **more)
    return section(grouped(read(sorted(tmp_path.iterdir()))))


def kind(bits: str, seed: int = 0, shift: bool = False, **more: Any) -> dict[str, Any]:
    return settings(bits=bits, seed=seed, shift=shift, **more)


def table(of: Section) -> Table:
    found = of.parts[0]
    assert isinstance(found, Table)
    return found


def points(of: Section) -> list[Points]:
    return [part for part in of.parts if isinstance(part, Points)]


def test_each_setting_is_compared_with_full_precision(tmp_path: Path) -> None:
    """Full precision uploads 20 kB to reach 90 %, and has 50 % after the 2 kB of two rounds."""
    rising = [0.5, 0.5, 0.5, *[0.9] * 17]
    runs = [(kind("32+32", seed), [x + seed / 50 for x in rising], False) for seed in range(2)]
    runs += [(kind("32+4", seed), [x + seed / 50 - 0.004 for x in rising], True) for seed in range(2)]
    made = answered(tmp_path, *runs)
    assert (made.name, made.title) == ("worth", "Was compression worth it?")
    assert made.answer[0] == (
        "32+4 bits uploads 2 kB instead of 20 kB (10.0 times fewer) and reaches 90.6 % "
        "(full precision with the same server rule: 91.0 %; difference -0.4 points)."
    )
    assert table(made).columns == [
        "bits",
        "accuracy, %",
        "MB up",
        "Pareto",
        "times fewer bytes",
        "difference, points (95 % interval)",
        "full precision at equal bytes, %",
        "MB to target",
    ]
    packed, full = [row.cells for row in table(made).rows]
    assert packed[:6] == ["32+4", "90.6 ± 1.4", "0.0020", "yes", "10.0", "-0.4 (-0.4 to -0.4)"]
    assert packed[6] == "51.0 (this setting wins by 39.6)"
    assert full == ["32+32", "91.0 ± 1.4", "0.02", "yes", "", "full precision", "", "0.0090"]
    assert table(made).caption.startswith("Pareto-optimal settings first")
    assert "Target: the final accuracy of full precision less 1 point." in table(made).caption


def test_a_setting_that_loses_to_fewer_rounds_is_marked_in_the_table(tmp_path: Path) -> None:
    made = answered(tmp_path, (kind("32+32"), 0.9, False), (kind("32+4"), 0.7, True))
    assert "loses to simply running fewer rounds in full precision" in made.answer[1]
    assert table(made).rows[0].cells[5:] == ["-20.0 (one seed)", "90.0 (this setting loses by 20.0)", "not reached"]
    assert "With one seed, noise is unknown." in table(made).caption


def test_points_are_drawn_against_bytes_up_and_against_all_bytes(tmp_path: Path) -> None:
    """Broadcasts of 2000 bytes per round are 40 kB more."""
    runs = [(kind("32+32"), 0.9, False), (kind("32+4"), 0.7, True), (kind("32+8"), 0.6, True)]
    up, both = points(answered(tmp_path, *runs))
    assert (up.name, both.name, up.x.log, both.x.log) == ("pareto", "pareto-total", True, True)
    assert [(point.x, point.y, point.front) for point in up.fields[0].points] == [
        (20_000, 0.9, True),
        (2000, 0.7, True),
        (2000, 0.6, False),
    ]
    assert [point.x for point in both.fields[0].points] == [60_000, 42_000, 42_000]


def test_broadcasts_that_are_not_recorded_leave_one_chart(tmp_path: Path) -> None:
    write(tmp_path / "run", kind("32+4"), figures={"bytes.down": [None] * 20})
    made = section(grouped(read([tmp_path / "run"])))
    assert [chart.name for chart in points(made)] == ["pareto"]


def test_for_a_single_run_the_missing_base_is_named(tmp_path: Path) -> None:
    made = answered(tmp_path, (kind("32+4"), 0.7, False))
    assert made.answer == [
        "There is no finished full-precision run with the same server rule to compare with "
        "fedavg, 32+4 bits, no shift; add a run with `--set uplink.bits=32+32` and otherwise the same settings."
    ]
    assert table(made).rows[0].cells[-3:] == ["no full precision to compare with", "", ""]
    assert [len(chart.fields[0].points) for chart in points(made)] == [1, 1]


def test_unfinished_runs_are_last_in_the_table_and_in_no_chart(tmp_path: Path) -> None:
    write(tmp_path / "a", kind("32+4"), 0.7, reached=9)
    alone = section(grouped(read([tmp_path / "a"])))
    assert alone.answer == ["No run is finished yet."]
    assert points(alone) == []
    write(tmp_path / "b", kind("32+32"), 0.9)
    made = section(grouped(read(sorted(tmp_path.iterdir()))))
    assert [row.cells[1] for row in table(made).rows] == ["90.0", "unfinished, round 9 of 20"]
    assert [len(chart.fields[0].points) for chart in points(made)] == [1, 1]


def test_tasks_have_their_own_panels(tmp_path: Path) -> None:
    runs = [
        (kind(bits, data={"name": data}, algorithm={"name": algorithm}), 0.9, bits == "32+4")
        for data in ("digits", "mnist")
        for algorithm in ("fedavg", "scaffold")
        for bits in ("32+32", "32+4")
    ]
    up = points(answered(tmp_path, *runs))[0]
    assert [(field.title, len(field.points)) for field in up.fields] == [
        ("digits, fedavg", 2),
        ("mnist, fedavg", 2),
        ("digits, scaffold", 2),
        ("mnist, scaffold", 2),
    ]


def test_many_tasks_are_a_choice(tmp_path: Path) -> None:
    runs = [(kind("32+4", data={"alpha": (i + 1) / 10, "partition": "dirichlet"}), 0.9, True) for i in range(13)]
    made = answered(tmp_path, *runs, layers=(), classes=0)
    choice = made.parts[1]
    assert isinstance(choice, Choice)
    assert [label for label, _ in choice.of][:2] == ["alpha 0.1", "alpha 0.2"]
    assert made.answer[-1] == "The other 9 combinations of data, model and algorithm are in the report's table."


@pytest.mark.parametrize("metric", ["mine:mae", "mine:auc"])
def test_a_metric_is_judged_by_its_goal(metric: str, tmp_path: Path) -> None:
    """0.5 at few bytes is best if lower is better; then 0.9 of 32 bits is dominated."""
    train = {"metric": metric}
    made = answered(tmp_path, (kind("32+32", train=train), 0.9, False), (kind("32+4", train=train), 0.5, True))
    lower = metric == "mine:mae"
    optimal = {row.cells[0]: row.cells[3] for row in table(made).rows}
    assert optimal == {"32+4": "yes", "32+32": "no" if lower else "yes"}
    assert points(made)[0].lower == lower
    assert ("worth" in made.answer[0]) != lower
    target = f"Target: the final {metric[5:]} of full precision {'plus' if lower else 'less'} 1 %."
    assert target in table(made).caption


def test_lines_that_differ_in_many_settings_are_named_in_one_column(tmp_path: Path) -> None:
    kinds = [(0.1, 1, "fedavg", "32+32"), (0.2, 2, "scaffold", "32+4")]
    runs = [
        (kind(bits, train={"lr": lr, "epochs": epochs}, algorithm={"name": name}), 0.9, False)
        for lr, epochs, name, bits in kinds
    ]
    made = answered(tmp_path, *runs)
    assert table(made).columns[0] == "line"
    assert [row.cells[0] for row in table(made).rows] == ["fedavg, 32+32 bits", "scaffold, 32+4 bits"]
