"""`fedshift bench peers`: all systems train the same task, and what a process tree uses is counted."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fedshift.bench.peers import measure
from fedshift.bench.peers import task as tasks
from fedshift.bench.peers.measure import FailedError
from fedshift.bench.peers.runner import WARM, Measured
from fedshift.bench.peers.systems import SYSTEMS
from fedshift.bench.peers.task import RoundResult
from fedshift.bench.peers.usage import kill, supported, tree, usage
from fedshift.core.files import RunError
from fedshift.core.types import Params
from fedshift.data.cohorts import constant, draw_plan

ROUNDS = WARM + 2
linux = pytest.mark.skipif(not supported(), reason="needs /proc (Linux)")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("peers") / "task.pt"
    tasks.write(tasks.make(100, ROUNDS), file)
    return file


def results(name: str, path: Path) -> list[RoundResult]:
    """Results of all rounds in this process."""
    found: list[RoundResult] = []

    def each(result: RoundResult) -> None:
        params = {name: x.detach().clone() for name, x in result.params.items()}
        found.append(result._replace(params=params))

    SYSTEMS[name].run(path, ROUNDS, each)
    return found


def largest_difference(a: Params, b: Params) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("name", ["sequential", "processes", "recorded"])
def test_fedshift_computes_the_weights_of_the_hand_written_loop(name: str, path: Path) -> None:
    by_hand, ours = results("loop", path), results(name, path)
    assert len(by_hand) == len(ours) == ROUNDS
    for a, b in zip(by_hand, ours, strict=True):
        assert largest_difference(a.params, b.params) <= 1e-6
        assert a.accuracy == pytest.approx(b.accuracy)
    assert largest_difference(ours[0].params, ours[-1].params) > 1e-3  # it has trained


@linux
@pytest.mark.skipif(find_spec("pfl") is None, reason="needs pfl (extra peers)")
def test_pfl_research_computes_the_weights_of_the_hand_written_loop(path: Path, tmp_path: Path) -> None:
    """In its own process: pfl changes how torch starts processes."""
    measured = measure.train("pfl", path, ROUNDS - WARM, 300.0, tmp_path / "model.pt")
    by_hand = results("loop", path)
    accuracy = [result.accuracy for result in by_hand]
    assert measured.accuracy[1:] == pytest.approx(accuracy[1:])  # pfl does not evaluate after the first round
    assert largest_difference(by_hand[-1].params, torch.load(tmp_path / "model.pt")) <= 1e-6


def test_lean_uploads_are_a_twentieth_of_exact_ones(path: Path) -> None:
    exact, lean = results("sequential", path), results("lean", path)
    floats = 64 * 128 + 128 + 128 * 10 + 10
    assert results("loop", path)[0].bytes_up == tasks.COHORT * 4 * floats
    assert 1 <= exact[0].bytes_up / (tasks.COHORT * 4 * floats) < 1.01
    assert all(20 * result.bytes_up < exact[0].bytes_up for result in lean)


def test_the_batches_of_the_task_are_those_that_fedshift_draws(path: Path) -> None:
    task = tasks.read(path)
    for number in range(1, ROUNDS + 1):
        cohort = task.cohort(number)
        assert len(cohort) == tasks.COHORT
        for client, batches in cohort:
            settings = {"epochs": tasks.EPOCHS, "batch": tasks.BATCH, "rate": constant(0.1)}
            plan = draw_plan(task.partition, [client], seed=0, number=number, **settings)  # type: ignore[arg-type]
            assert [batch.tolist() for batch in batches] == [
                examples[keep].tolist() for examples, keep in zip(plan.batches[0], plan.keep[0], strict=True)
            ]
            assert [len(batch) for batch in batches] == [10, 4] * tasks.EPOCHS


@pytest.mark.parametrize("clients", [100, 250])
def test_every_client_has_14_examples_and_all_examples_are_used(clients: int) -> None:
    task = tasks.make(clients, 1)
    assert task.partition.sizes.tolist() == [14] * clients == [len(task.examples(k)) for k in range(clients)]
    assert len(set(task.order.tolist())) == min(14 * clients, len(task.x))


@linux
def test_a_separate_process_reports_what_it_used(path: Path, tmp_path: Path) -> None:
    begin = time.monotonic()
    measured = measure.train("loop", path, ROUNDS - WARM, 300.0, tmp_path / "model.pt")
    took = time.monotonic() - begin
    assert 0 < measured.wall * ROUNDS + measured.startup <= took
    assert measured.cpu >= 0
    assert 50e6 < measured.peak < 5e9
    by_hand = results("loop", path)
    assert measured.accuracy == [result.accuracy for result in by_hand]
    assert largest_difference(torch.load(tmp_path / "model.pt"), by_hand[-1].params) <= 1e-6


@linux
def test_a_process_that_fails_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"failed: FileNotFoundError.*missing.pt"):
        measure.train("loop", tmp_path / "missing.pt", 1, 300.0)


@linux
def test_a_peer_that_fails_is_noted_and_fedshift_must_not_fail(tmp_path: Path) -> None:
    notes: dict[str, str] = {}
    missing = tmp_path / "missing.pt"
    assert measure.attempt("flower", missing, 1, 0.0, notes, "Flower, 7 clients") is None
    assert notes == {"Flower, 7 clients": "stopped after 0 s"}
    with pytest.raises(RunError, match=r"^loop: stopped after 0 s$"):
        measure.attempt("loop", missing, 1, 0.0, notes, "loop")


@linux
def test_a_process_that_takes_too_long_is_stopped(path: Path) -> None:
    before = {process.pid for process in tree(os.getpid())}  # other tests may have left workers
    with pytest.raises(FailedError, match=r"stopped after 0 s"):
        measure.train("loop", path, 1, 0.0)
    assert not [process for process in tree(os.getpid()) if process.state != "Z" and process.pid not in before]


@linux
def test_usage_includes_descendants_and_kill_ends_them() -> None:
    """A process with a child that holds 100 MB and has used 0.6 s of CPU time, which is counted in ticks of 10 ms."""
    child = (
        "import time; x = bytearray(b'1') * 100_000_000\nwhile time.process_time() < 0.6: pass\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            used = usage(process.pid)
            assert used.seconds >= 0.5
            assert used.resident >= 100e6
            assert len(tree(process.pid)) == 2
        finally:
            kill(process.pid)
            process.wait()
        assert tree(process.pid) == []


def measured(wall: float, cpu: float, peak: int = 100, rounds: int = 3) -> Measured:
    return Measured(wall, cpu, startup=1.0, peak=peak, bytes_up=40.0, accuracy=[0.5] * rounds)


def test_targets_are_medians_of_ratios_within_a_repeat() -> None:
    found = {
        "loop": [measured(1.0, 1.0), measured(2.0, 2.0), measured(1.0, 1.0)],
        "pfl": [measured(1.0, 1.25), measured(2.0, 2.5), measured(1.0, 1.25)],
        "flower": [measured(3.5, 4.0), measured(7.0, 8.0), measured(3.0, 4.0)],
        "sequential": [measured(0.9, 1.0), measured(1.8, 2.0), measured(0.9, 1.0)],
        "processes": [measured(0.7, 1.5), measured(1.4, 3.0), measured(0.7, 1.5)],
    }
    targets = measure.targets(found)
    assert [target.measured for target in targets] == pytest.approx([5.0, 0.7, 0.8, 0.7, 1.0])
    assert [target.asked for target in targets] == [">= 5x", "<= 1x", "<= 1x", "<= 0.7x", "-"]
    assert [target.met for target in targets][1:3] == [True, True]
    without_peers = {name: found[name] for name in ("loop", "sequential", "processes")}
    assert [target.asked for target in measure.targets(without_peers)] == ["<= 0.7x", "-"]


def test_accuracies_are_compared_after_the_same_round() -> None:
    short, long = measured(1.0, 1.0, rounds=3), measured(2.0, 2.0, rounds=5)._replace(accuracy=[0, 0, 0.25, 1, 1])
    table = measure.listing({"loop": [short], "sequential": [long]}, 100)
    assert table.columns[-1] == "accuracy,\nround 3"
    assert [row[-1] for row in table.rows] == ["50.0", "25.0"]
    assert [row[3:5] for row in table.rows] == [("1.00", "1.00"), ("2.00", "2.00")]


def test_targets_of_populations_compare_the_largest_with_the_smallest() -> None:
    found = {
        ("sequential", 100): [measured(1.0, 1.0, 100)],
        ("sequential", 1000): [measured(9.0, 9.0, 900)],
        ("sequential", 10_000): [measured(1.0, 1.0, 120)],
    }
    time_, memory = measure.population_targets(found, (100, 1000, 10_000))
    assert (time_.measured, time_.met) == (1.0, True)
    assert (memory.measured, memory.met) == (1.2, False)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pfl", "ray"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    names, about = measure.available(["loop", "pfl", "flower", "sequential"])
    assert names == ["loop", "sequential"]
    assert about == {
        "pfl-research, one process": "not measured: it needs pfl (extra peers): pip install 'pfl[pytorch]>=0.6,<0.7'",
        "Flower's simulation": "not measured: it needs flwr (extra peers): pip install 'flwr[simulation]>=1.41,<1.43'",
    }


@linux
@pytest.mark.slow
def test_the_quick_benchmark_as_json() -> None:
    command = [sys.executable, "-c", "from fedshift.cli import app; app()", "bench", "peers", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = {row["10 of 100 clients per round"]: row for row in result["One round of digits"]}
    names, _ = measure.available(list(SYSTEMS))
    assert list(rows) == [SYSTEMS[name].label for name in names]
    assert all(target["asked"] == "-" for target in result["bars"])
    accuracies = [float(row["accuracy, round 4"]) for row in rows.values()]
    assert max(accuracies) - min(accuracies) < 25  # Flower draws other clients
    assert len(result["Populations"]) == 2 * sum(name in names for name in measure.QUICK.swept)
