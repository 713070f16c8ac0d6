"""Tradeoff of compression: hand-worked bytes, scores and sentences."""

import math
from typing import Any

import pytest

from fedshift import Experiment
from fedshift.runs.summary import RunResult, SummaryRow, Trace, by_merit, front, mean_of, rows
from fedshift.runs.tradeoff import answers, bytes_to, equal_bytes, score_at, smooth, target

ROUNDS = 20


def run(bits: Any, each: float, scores: list[float], seed: int = 0, **more: Any) -> RunResult:
    """Run with `each` bytes per round; its final score is the mean of the last ten."""
    uplink = {"bits": bits, **more.pop("uplink", {})}
    experiment = Experiment(uplink=uplink, seed=seed, **more)
    sent = [each * (i + 1) for i in range(len(scores))]
    final = mean_of(scores[-10:])
    return RunResult(experiment, final, scores[-1], int(sent[-1]), 0, Trace(range(1, len(scores) + 1), sent, scores))


def rising(last: float) -> list[float]:
    """Scores that rise linearly for ten rounds and stay constant for ten."""
    return [last * min(i, 10) / 10 for i in range(1, ROUNDS + 1)]


def test_a_score_is_smoothed_over_five_rounds_on_each_side() -> None:
    """A straight line is unchanged, but for the last score, which is the mean of the last ten."""
    line = [float(i) for i in range(20)]
    assert smooth(line)[:14] == line[:14]
    assert smooth(line)[-1] == 14.5
    assert smooth([]) == []


def test_full_precision_at_equal_bytes_lies_on_its_curve() -> None:
    """1000 bytes per round: after 250 bytes of 4 bits it is not evaluated; 2500 bytes are half way from 0.2 to 0.3."""
    trace = run(32, 1000, rising(1.0)).trace
    assert score_at(trace, 2500) == pytest.approx(0.25)
    assert score_at(trace, 3000) == pytest.approx(0.3)
    assert math.isnan(score_at(trace, 999))
    assert score_at(trace, 10**9) == 1.0


def compared(low: list[float], each: float = 125, **more: Any) -> list[SummaryRow]:
    """Two seeds of full precision, which reaches 0.8, and of 4 bits; the second seed is 0.02 better throughout."""
    results = [
        run(bits, size, [x + 0.02 * seed for x in scores], seed, **more)
        for bits, size, scores in ((32, 1000, rising(0.8)), (4, each, low))
        for seed in range(2)
    ]
    return rows(results)


def test_a_setting_is_compared_with_full_precision_stopped_after_its_bytes() -> None:
    """20 rounds of 125 bytes are 2.5 of full precision, which has reached 0.2, and 0.22 with the second seed."""
    _, packed = compared(rising(0.79))
    found = equal_bytes(packed)
    assert found is not None
    assert found.score == pytest.approx(0.21)
    assert found.gain.gain == pytest.approx(0.59)
    assert found.gain.margin == pytest.approx(0.0, abs=1e-9)
    assert (found.better, found.noise) == (True, False)
    assert packed.fewer == 8.0
    assert packed.cost is not None
    assert packed.cost.gain == pytest.approx(-0.01)


def test_bytes_to_a_target_are_those_of_the_first_round_that_reaches_it() -> None:
    """The target is 0.81 - 0.01. Of the eleven rounds around the 13th, the 8th and the 9th lack 0.16 and 0.08:
    0.81 - 0.24 / 11 = 0.788. Around the 14th only the 9th does: 0.81 - 0.08 / 11 = 0.803."""
    full, packed = compared(rising(0.81))
    goal = target(full)
    assert goal == pytest.approx(0.8)
    assert bytes_to(full, goal) == 14_000
    assert bytes_to(packed, goal) == 14 * 125  # 0.82 - 0.243 / 11 = 0.798 in round 13, 0.813 in round 14
    assert bytes_to(packed, 0.9) is None


def test_targets_of_other_metrics_are_one_per_cent_worse_in_their_direction() -> None:
    for name, goal in (("mine:mae", 0.505), ("mine:auc", 0.495)):
        (row,) = rows([run(32, 1000, [0.5] * 3, train={"metric": name})])
        assert target(row) == pytest.approx(goal)
    falling = run(32, 1000, [2.0, 1.0, 0.5, 0.5, 0.5], train={"metric": "mine:mae"})
    (row,) = rows([falling])
    assert smooth(falling.trace.scores) == pytest.approx([2.0, 3.5 / 3, 0.9, 0.9, 0.9])
    assert bytes_to(row, 0.95) == 3000


def test_the_front_keeps_ties_and_knows_the_direction() -> None:
    points = [(2.0, 0.7), (2.0, 0.7), (1.0, 0.7), (1.0, 0.6), (3.0, 0.9), (4.0, math.nan)]
    assert front(points) == [False, False, True, False, True, False]
    assert front(points, lower=True) == [False, False, False, True, False, False]
    assert front(points[:2]) == [True, True]
    assert front([]) == []


def of_sizes(metric: str = "accuracy") -> list[SummaryRow]:
    kinds = ((32, 1000, 0.9), ("32+4", 500, 0.7), (4, 125, 0.8), (8, 250, 0.8), (2, 60, 0.5))
    return rows([run(bits, size, [score] * 3, train={"metric": metric}) for bits, size, score in kinds])


@pytest.mark.parametrize(
    ("metric", "order"),
    [("accuracy", ["2", "4", "32", "8", "32+4"]), ("mine:mae", ["2", "4", "8", "32+4", "32"])],
)
def test_rows_are_sorted_by_merit(metric: str, order: list[str]) -> None:
    """8 bits score as 4 for more bytes; where errors are minimised, 2 bits beat all others."""
    assert [row.label["uplink.bits"] for row in by_merit(of_sizes(metric))] == order


def test_merit_is_among_runs_of_one_task() -> None:
    kinds = [("digits", 32, 1000, 0.9), ("mnist", 4, 125, 0.95), ("digits", 4, 125, 0.5), ("mnist", 32, 1000, 0.9)]
    made = rows([run(bits, size, [score] * 3, data={"name": name}) for name, bits, size, score in kinds])
    order = [(row.label["data.name"], row.label["uplink.bits"]) for row in by_merit(made)]
    assert order == [("digits", "4"), ("digits", "32"), ("mnist", "4"), ("mnist", "32")]


def test_the_best_choice_is_one_sentence() -> None:
    """Full precision reaches 81.0 %, the target 80.0 % in round 14 of it and in round 14 of 4 bits."""
    sentences = answers(compared(rising(0.799)))
    assert sentences == [
        "4 bits uploads 2.5 kB instead of 20 kB (8.0 times fewer) and reaches 80.9 % "
        "(full precision with the same server rule: 81.0 %; difference -0.1 points).",
        "Full precision stopped after the same uploaded bytes reaches 21.0 %.",
        "To reach 80.0 % (full precision less 1 point) it uploads 1.75 kB, and full precision 14 kB.",
    ]


def test_a_setting_that_loses_to_fewer_rounds_is_named() -> None:
    """20 rounds of 900 bytes are 18 of full precision, when its score is constant."""
    sentences = answers(compared(rising(0.6), 900))
    assert sentences == [
        "Compression was not worth it: no setting beats full precision stopped after the same uploaded bytes.",
        "4 bits (61.0 % against 81.0 %) loses to simply running fewer rounds in full precision "
        "(stopped after the same uploaded bytes).",
    ]
    (alone,) = answers(rows([run(32, 1000, rising(0.8)), run(4, 900, rising(0.6))]))[1:]
    assert alone.endswith("(stopped after the same uploaded bytes; too few seeds to know the noise).")


def test_the_best_setting_at_equal_bytes_is_named_if_none_is_near_full_precision() -> None:
    first, second = answers(compared(rising(0.5)))
    assert first.startswith(
        "No compressed setting stays within 0.5 points of full precision (81.0 %) and beats it at equal bytes; "
        "the best setting at equal bytes: "
        "4 bits uploads 2.5 kB instead of 20 kB (8.0 times fewer) and reaches 51.0 %"
    )
    assert second == "Full precision stopped after the same uploaded bytes reaches 21.0 %."


def test_errors_are_judged_by_their_direction() -> None:
    train = {"metric": "mine:mae"}
    falling = [2.0 - 0.1 * i for i in range(10)] + [1.0] * 10
    made = rows([run(32, 1000, falling, train=train), run(4, 125, falling, train=train)])
    assert answers(made)[0] == (
        "4 bits uploads 2.5 kB instead of 20 kB (8.0 times fewer) and reaches mae 1 (full precision with the same "
        "server rule: mae 1; difference +0, one seed: noise unknown)."
    )


def test_a_missing_baseline_is_named_with_the_setting_that_adds_it() -> None:
    made = rows([run(bits, 125, [0.5] * 3) for bits in ("32+4", "32+8")])
    assert answers(made) == [
        "There is no finished full-precision run with the same server rule to compare with 32+4 bits; 32+8 bits; "
        "add a run with `--set uplink.bits=32+32` and otherwise the same settings."
    ]
    made = rows([run(4, 125, [0.5] * 3, shift={"on": True}), run(32, 125, [0.5] * 3, shift={"on": False})])
    assert "`--uplink exact`" in answers(made)[0]  # which has another server rule
    assert answers(made[1:]) == ["All runs upload in full precision, so there is no compression to judge."]


def test_a_share_of_the_uploads_is_none_in_full_precision() -> None:
    """So that the shift per layer is compared with full precision without the shift, which is the same."""
    full, layer = rows([run(32, 1000, [0.5] * 3, shift={"on": False}), run(4, 125, [0.5] * 3, shift={"per": "layer"})])
    assert layer.full == full


def test_each_task_has_its_own_sentences() -> None:
    results = [
        run(bits, size, rising(0.8), data={"name": name}, algorithm={"name": algorithm})
        for name in ("digits", "mnist")
        for algorithm in ("fedavg", "scaffold")
        for bits, size in ((32, 1000), (4, 125))
    ]
    sentences = answers(rows(results))
    begins = [sentence.partition(" uploads")[0] for sentence in sentences if "instead of" in sentence]
    assert begins == [
        f"{name}, {algorithm}: 4 bits, {name}, {algorithm}"
        for name in ("digits", "mnist")
        for algorithm in ("fedavg", "scaffold")
    ]


def test_scores_that_are_nan_are_reported() -> None:
    made = rows([run(32, 1000, [math.inf, -math.inf]), run(4, 125, [math.nan] * 3)])
    assert answers(made) == ["Final scores (accuracy) are NaN or infinite."]
    assert equal_bytes(made[1]) is None
    made = rows([run(32, 1000, [math.nan] * 3), run(4, 125, [0.5] * 3)])
    assert answers(made) == ["Final scores of full precision are NaN or infinite, so compression cannot be judged."]


def test_settings_are_near_the_best_full_precision_and_not_one_that_is_poor() -> None:
    """4 bits without the shift keep the 0.5 of full precision without it, but the shift reaches 0.8."""
    made = rows(
        [
            run(bits, size, rising(score), shift={"on": on})
            for bits, size, score, on in ((32, 1000, 0.5, False), (4, 125, 0.5, False), (32, 1000, 0.8, True))
        ]
    )
    assert answers(made)[0].startswith("No compressed setting stays within 0.5 points of full precision (80.0 %)")
