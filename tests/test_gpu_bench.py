"""`fedshift bench engines --gpu`: its packs, its targets for hand-worked times, and its rounds on a CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fedshift import Dataset, Experiment
from fedshift.bench import gpu, report
from fedshift.bench.engines import images
from fedshift.bench.gpu import CURVES, PACKS, RUNS, Packed, pack, packed, paper, ratio_targets
from fedshift.runs.packs import kind

SMALL: dict[str, Any] = {
    "data.clients": 4,
    "model.name": "logistic",
    "train.cohort": 2,
    "train.epochs": 1,
    "engine.device": "cpu",
    "engine.precision": "fp32",
}


@pytest.mark.parametrize("name", PACKS)
def test_ten_runs_of_a_pack_can_be_trained_together(name: str) -> None:
    experiments = pack(name, "bf16")
    assert len(experiments) == 10
    assert len({kind(experiment) for experiment in [*experiments, paper("bf16")]}) == 1
    assert [experiment.seed for experiment in experiments] == list(range(10))


def test_the_mixed_pack_has_two_runs_of_each() -> None:
    names = [(experiment.algorithm.name, experiment.uplink.feedback) for experiment in pack("mixed", "bf16")]
    ways = [("fedavg", False), ("fedprox", False), ("scaffold", False), ("fedavg", True), ("fedavg", False)]
    assert names == ways * 2


def test_both_sides_of_the_estimate_differ_only_in_the_coder() -> None:
    ours, theirs = (paper("bf16", **RUNS[name]).uplink for name in ("lean", "lean, packed"))
    assert (ours.coder, theirs.coder) == ("range", "bitpack")
    assert (ours.quantizer, ours.rate, ours.send, ours.feedback, ours.biases) == (
        theirs.quantizer,
        theirs.rate,
        theirs.send,
        theirs.feedback,
        theirs.biases,
    )


def point(total: float, runs: int = 10) -> Packed:
    return Packed(runs, 0.9 * total, total, 10**9)


def test_targets_are_ratios_of_seconds_per_round() -> None:
    """1.1 s and 1.2 s instead of 1 s: below and above 1.15; 2.04 s instead of 2 s: below 1.03."""
    totals = {"FedAvg": 1.0, "Fed-EF": 1.1, "SCAFFOLD": 1.2, "mixed": 1.15, "lean": 2.04, "lean, packed": 2.0}
    found = ratio_targets("bf16", {name: point(total) for name, total in totals.items()})
    assert [(target.measured, target.met) for target in found] == [
        (1.1, True),
        (1.2, False),
        (1.15, True),
        (1.02, True),
    ]
    assert found[-1].what == "bf16: seconds per round, ten runs, lean / lean, packed"
    assert [target.asked for target in found] == ["<= 1.15x"] * 3 + ["<= 1.03x"]


def test_the_report_lists_every_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times of one second per run instead of measured ones."""
    measured: list[tuple[str, int]] = []

    def one_second(data: Dataset, experiments: Sequence[Experiment], rounds: int) -> Packed:
        measured.append((experiments[0].engine.precision, len(experiments)))
        return point(len(experiments), len(experiments))

    monkeypatch.setattr(gpu, "images", lambda *_: images(10, 10))
    monkeypatch.setattr(Dataset, "to", lambda data, device: data)
    for name, function in (("packed", one_second), ("one_at_a_time", lambda *_: 30.0), ("centralised", lambda *_: 1.5)):
        monkeypatch.setattr(gpu, name, function)
    ticks: list[str] = []
    targets, (precisions, curve, packs) = report.measure_gpu(3, ticks.append)
    expected = [("bf16", runs) for runs in CURVES["bf16"]] + [("bf16", 10)] * len(PACKS)
    assert measured == expected + [("tf32", runs) for runs in CURVES["tf32"]]
    assert [row[0] for row in packs.rows] == ["FedAvg", *PACKS]
    assert all(row[3] == "1" for row in packs.rows)
    assert all(len(row) == len(listing.columns) for listing in (precisions, curve, packs) for row in listing.rows)
    assert len(targets) == 2 * 6 + 4
    assert len(ticks) == len(measured) + 4


@pytest.mark.parametrize("name", ["mixed", "lean, packed"])
def test_rounds_of_a_pack_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with a small model; the functions that only a GPU has do nothing."""
    nothing: dict[str, Callable[[], int]] = dict.fromkeys(
        ("empty_cache", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated", "synchronize"), lambda: 0
    )
    for function, replacement in nothing.items():
        monkeypatch.setattr(torch.cuda, function, replacement)
    experiments = [experiment.changed(**SMALL) for experiment in pack(name, "bf16")[:5]]
    found = packed(images(80, 20), experiments, rounds=1)
    assert found.runs == 5
    assert 0 < found.train <= found.total
