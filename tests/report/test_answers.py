"""The section "Did the shift help?"."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedshift.report.answers import section
from fedshift.report.charts import Intervals, Section, Table
from fedshift.report.lines import grouped
from tests.report.test_lines import read
from tests.report.written import settings, write

SCORES = {("32+32", False): 0.9, ("32+4", False): 0.8, ("32+4", True): 0.85}


def answered(tmp_path: Path, scores: dict[tuple[str, bool], float], wander: float = 0.0, **more: Any) -> Section:
    """Section on three seeds of each setting; `wander` spreads the seeds with the shift."""
    for (bits, shift), mean in scores.items():
        for seed in range(3):
            raw = settings(rounds=12, bits=bits, shift=shift, seed=seed, **more)
            write(tmp_path / f"{bits} {shift} {seed}", raw, mean + 0.01 * seed + wander * shift * (seed - 1))
    return section(grouped(read(sorted(tmp_path.iterdir()))))


def table(of: Section) -> Table:
    found = of.parts[0]
    assert isinstance(found, Table)
    return found


def test_the_gain_of_the_shift_comes_first(tmp_path: Path) -> None:
    """0.80, 0.81, 0.82 and 0.85, 0.86, 0.87: standard deviation 0.01, a difference of 0.05 in every seed."""
    made = answered(tmp_path, SCORES)
    assert made.answer == [
        "The shift per layer gave back 5.0 points at 32+4 bits.",
        "32+4 bits cost 10.0 points against 32.",
    ]
    assert table(made).columns == ["shift", "bits", "accuracy, %", "difference", "seeds", "last round", "MB up"]
    assert [row.cells for row in table(made).rows] == [
        ["no", "32+32", "91.0 ± 1.0", "", "3", "91.0", "0.01"],
        ["no", "32+4", "81.0 ± 1.0", "-10.0 against 32 bits", "3", "81.0", "0.01"],
        ["per layer", "32+4", "86.0 ± 1.0", "+5.0 against no shift", "3", "86.0", "0.01"],
    ]


def test_a_difference_explained_by_seeds_is_within_noise(tmp_path: Path) -> None:
    """Differences -0.05, 0.05 and 0.15 have a standard error of 0.058, times 4.303."""
    made = answered(tmp_path, SCORES, wander=0.1)
    assert made.answer[0] == "The shift per layer gave back 5.0 points at 32+4 bits (within noise)."
    assert table(made).rows[2].cells[3] == "+5.0 against no shift (within noise)"


def test_intervals_to_be_compared_share_a_row(tmp_path: Path) -> None:
    chart = answered(tmp_path, SCORES).parts[1]
    assert isinstance(chart, Intervals)
    ((heading, bands),) = chart.bands
    assert (heading, [band.label for band in bands]) == ("", ["32+32 bits", "32+4 bits"])
    plain, shifted = bands[1].intervals
    assert (plain.line, shifted.line) == ("line-1", "line-2")
    assert shifted.mean == pytest.approx(0.86)
    assert shifted.spread == pytest.approx(0.01)
    assert shifted.seeds == {0: 0.85, 1: 0.86, 2: 0.87}
    assert (chart.x.label, chart.x.unit) == ("accuracy", "%")


def test_many_comparisons_are_counted(tmp_path: Path) -> None:
    for name, gain in (("fedavg", 0.05), ("fedprox", -0.02), ("scaffold", 0.06)):
        for shift in (False, True):
            for seed in range(3):
                raw = settings(rounds=12, shift=shift, seed=seed, algorithm={"name": name})
                wander = 0.2 * (seed - 1) * shift * (name == "scaffold")
                write(tmp_path / f"{name} {shift} {seed}", raw, 0.5 + gain * shift + wander)
    for shift in (False, True):
        raw = settings(rounds=12, shift=shift, algorithm={"name": "fedprox", "mu": 0.5})
        write(tmp_path / f"one seed {shift}", raw, 0.5 + 0.03 * shift)
    made = section(grouped(read(sorted(tmp_path.iterdir()))))
    assert made.answer == [
        "With the shift per layer, accuracy is higher in 3 of 4 comparisons and lower in 1.",
        "Beyond noise it is higher in 1 and lower in 1; in 1 the difference is within noise; "
        "in 1 there are too few seeds to judge.",
        "The mean difference is +3.0 points, "
        "from -2.0 points (fedprox, mu 0.01, shift per layer) to +6.0 points (scaffold, mu 0.01, shift per layer).",
    ]
    assert [heading for heading, _ in made.parts[1].bands] == ["fedavg", "fedprox", "scaffold"]  # type: ignore[union-attr]


def test_comparisons_are_counted_for_each_rule(tmp_path: Path) -> None:
    rules: list[tuple[dict[str, Any], float]] = [
        ({"on": False}, 0.0),
        ({"per": "filter"}, 0.06),
        ({"per": "layer"}, 0.02),
    ]
    for name in ("fedavg", "scaffold"):
        for i, (shift, gain) in enumerate(rules):
            write(
                tmp_path / f"{name} {i}", settings(rounds=12, algorithm={"name": name}) | {"shift": shift}, 0.5 + gain
            )
    made = section(grouped(read(sorted(tmp_path.iterdir()))))
    assert made.answer[0] == "With the shift per layer, accuracy is higher in 2 of 2 comparisons and lower in 0."
    assert made.answer[2].startswith("The mean difference is +2.0 points")
    assert made.answer[3] == "With the shift per filter, accuracy is higher in 2 of 2 comparisons and lower in 0."
    assert made.answer[5].startswith("The mean difference is +6.0 points")


@pytest.mark.parametrize(
    ("shift", "sentence"),
    [
        (True, "There is no run without the shift to compare with, so its effect is unknown."),
        (False, "No run uses the shift, so its effect is unknown."),
    ],
)
def test_a_single_run_has_its_score_and_no_comparison(shift: bool, sentence: str, tmp_path: Path) -> None:
    made = section(grouped(read([write(tmp_path / "run", settings(shift=shift), 0.625)])))
    label = f"fedavg, 32+4 bits, {'shift per layer' if shift else 'no shift'}"
    assert made.answer == [f"{label} reached accuracy 62.5 %, the mean of the last 10 evaluated rounds.", sentence]
    assert table(made).rows[0].cells == [label, "62.5", "1", "62.5", "0.02"]


def test_an_unfinished_line_is_marked_in_the_table(tmp_path: Path) -> None:
    write(tmp_path / "a", settings(shift=False), 0.5)
    write(tmp_path / "b", settings(shift=True), 0.75, reached=9)
    made = section(grouped(read(sorted(tmp_path.iterdir()))))
    assert table(made).rows[1].cells == ["per layer", "unfinished, round 9 of 20", "1", "75.0", "0.0090"]
    only = section(grouped(read([tmp_path / "b"])))
    assert only.answer == ["No run is finished yet."]


def test_a_custom_metric_is_shown_unchanged(tmp_path: Path) -> None:
    made = answered(
        tmp_path, {("32+4", False): 20.0, ("32+4", True): 25.0}, train={"rounds": 12, "metric": "mine:Gain"}
    )
    assert made.answer == ["With the shift per layer, Gain differs by +5."]
    assert table(made).title == "Final Gain"
    assert table(made).rows[1].cells == ["per layer", "25.01 ± 0.01", "+5 against no shift", "3", "25.01", "0.01"]


def test_scores_that_are_nan_are_reported(tmp_path: Path) -> None:
    raw = settings(rounds=12, train={"metric": "mine:gain"})
    made = section(grouped(read([write(tmp_path / "run", raw, math.nan)])))
    assert made.answer == ["Final scores (gain) are NaN or infinite."]
    assert table(made).rows[0].cells[1] == "nan"
    assert len(made.parts) == 1


def test_a_base_with_a_score_of_nan_is_not_reported_as_missing(tmp_path: Path) -> None:
    made = answered(tmp_path, {("32+4", False): math.nan, ("32+4", True): 0.5})
    assert made.answer[1] == "Scores with or without the shift are NaN or infinite, so its effect is unknown."


def test_accuracies_on_different_data_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path / "a", settings(data={"name": "digits"}), 0.5)
    write(tmp_path / "b", settings(data={"name": "mnist"}), 0.75)
    first, second, _ = section(grouped(read(sorted(tmp_path.iterdir())))).answer
    assert first.startswith("digits reached accuracy 50.0 %")
    assert second.startswith("mnist reached accuracy 75.0 %")


def test_no_difference_with_one_seed_has_unknown_noise(tmp_path: Path) -> None:
    write(tmp_path / "a", settings(shift=False), 0.5)
    write(tmp_path / "b", settings(shift=True), 0.5)
    made = section(grouped(read(sorted(tmp_path.iterdir()))))
    assert made.answer == ["The shift per layer made no difference (one seed: noise unknown)."]
