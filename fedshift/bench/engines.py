"""Measurements of `fedshift bench engines`: overhead against a hand-written loop, worker processes, and population."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedshift.bench.codecs import Target
from fedshift.bench.handwritten import Handwritten, average, shuffled
from fedshift.bench.timing import in_process
from fedshift.core.memory import CLEAR, reset_peak, resident
from fedshift.data import datasets
from fedshift.data.datasets import Dataset, dataset
from fedshift.data.partition import Partition
from fedshift.engines import Engine, Processes, Sequential
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.models import MLP
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import Training
from fedshift.runs.run import Run, cores_here
from fedshift.wire.measure import medians

Tick = Callable[[str], None]
ROUNDS = 1_000_000  # never reached; a benchmark stops earlier


def small(**changes: Any) -> Experiment:
    """Experiment on digits: MLP 64-128-10, 10 of 100 clients per round, 2 epochs, batch 8."""
    base: dict[str, Any] = {
        "data": {"partition": "iid"},
        "train": {"rounds": ROUNDS, "epochs": 2, "batch": 8},
        "engine": {"name": "sequential"},
    }
    return Experiment(**(base | changes))


class HandwrittenRounds:
    """Hand-written FedAvg for comparison, with the same partition; it draws clients and batches itself."""

    def __init__(self, experiment: Experiment, data: Dataset) -> None:
        self.train = experiment.train
        self.parts = build(experiment, data=data).partition
        torch.manual_seed(0)
        self.work = Handwritten(MLP(), data.x, data.y, data.test_x, data.test_y, self.train.lr)
        self.state = {name: x.clone() for name, x in self.work.model.state_dict().items()}

    def round(self) -> float:
        """Train one round; return the accuracy."""
        clients = torch.randperm(self.parts.clients)[: self.train.cohort].tolist()
        batches = (shuffled(self.parts.of(client), self.train.epochs, self.train.batch) for client in clients)
        self.state = average([self.work.train(self.state, each) for each in batches])
        return self.work.accuracy(self.state)


def overhead(repeats: int, tick: Tick) -> tuple[list[Target], dict[str, float]]:
    """Time of a round of digits, recorded and checkpointed, divided by that of the hand-written loop."""
    data = datasets.load("digits")
    with folder() as out:
        exact = Run(small(), out / "exact", data=data)
        mixed = Run(small(uplink={"bits": {32: 0.5, 4: 0.5}}), out / "mixed", data=data)
        by_hand = HandwrittenRounds(small(), data).round
        took = medians({"recorded, 32 bit": exact.__next__, "by hand": by_hand}, repeats, tick)
        took |= medians({"recorded, 32+4 bit": mixed.__next__}, repeats, tick)
        exact.close()
        mixed.close()
    ratio = took["recorded, 32 bit"] / took["by hand"]
    return [Target("round of digits, recorded / hand-written loop", "<= 1.1x", ratio, ratio <= 1.1)], took


def images(n: int, tests: int) -> Dataset:
    """Random noise with the shape of CIFAR-10; times do not depend on the content."""
    g = torch.Generator().manual_seed(0)
    x, test_x = (torch.randint(0, 256, (size, 3, 32, 32), generator=g).byte() for size in (n, tests))
    return dataset(x, torch.arange(n) % 10, test_x, torch.arange(tests) % 10, mean=(0.5,) * 3, std=(0.2,) * 3)


def paper(**train: Any) -> Experiment:
    """Experiment with the paper's CNN and settings; `train` adds settings of training."""
    return Experiment(
        data={"partition": "iid", "augment": True},
        model={"name": "paper-cnn"},
        train={"rounds": ROUNDS, "lr": 0.005, "momentum": 0.9, "epochs": 10, "batch": 50} | train,
        uplink={"bits": {32: 0.5, 4: 0.5}},
        engine={"name": "sequential"},
    )


def paper_round(tick: Tick) -> list[Target]:
    """One round of the paper on one thread: ten clients of 1,000 images, ten epochs, 10,000 test images."""
    tick("a round of the paper's CNN, which takes a minute or two")
    with folder() as out:
        run = Run(paper(selection="stratified"), out / "paper", data=images(100_000, 10_000))
        begin = time.perf_counter()
        outcome = next(run)
        took = time.perf_counter() - begin
        run.close()
    rest = (took - outcome.seconds["train"]) / took
    return [Target("round of the paper's CNN, outside local training / total", "<= 0.15x", rest, rest <= 0.15)]


def cores(repeats: int, tick: Tick) -> list[Target]:
    """Wall time of rounds of the paper's CNN: worker processes against one process."""
    experiment = paper(cohort=4)
    fed = build(experiment, data=images(20_000, 2_000))
    workers = cores_here()
    engines: dict[str, tuple[Engine, int]] = {
        "processes": (Processes(fed.task, workers), 1),
        "one thread": (Sequential(fed.task), 1),
        "all threads": (Sequential(fed.task), workers),
    }
    took: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, (engine, threads) in engines.items():
            tick(f"{workers} cores: {name}")
            took[name].append(wall(fed, engine, threads))
    for engine, _ in engines.values():
        engine.close()
    best = {name: median(seconds) for name, seconds in took.items()}
    gain, over_threads = best["one thread"] / best["processes"], best["all threads"] / best["processes"]
    return [
        Target(f"speedup of {workers} processes over one thread", ">= 1.6x", gain, gain >= 1.6),
        Target(f"speedup of {workers} processes over {workers} threads", ">= 1x", over_threads, over_threads >= 1),
    ]


def wall(fed: Federation, engine: Engine, threads: int) -> float:
    """Wall time of one round with this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    begin, training = time.perf_counter(), Training(fed, engine, rounds=1)
    turn = training.begin()  # not run_rounds, which uses one thread
    assert turn.job
    turn.take(engine.train([turn.job])[0])
    training.end(turn)
    torch.set_num_threads(before)
    return time.perf_counter() - begin


def population(rounds: int, tick: Tick) -> list[Target]:
    """Time and memory of a round with ten clients of 14 examples, for populations of 100 and 10,000 (Linux only)."""
    if not CLEAR.exists():
        return []
    tick("100 and 10,000 clients")
    trials = [
        [in_process("fedshift.bench.engines", "population_cost", clients, rounds) for clients in (100, 10_000)]
        for _ in range(3)
    ]
    few, many = (min(trial[i][0] for trial in trials) for i in range(2))  # other load of the machine only adds
    ratio, more = many / few, max(trial[1][1] - trial[0][1] for trial in trials) / 1e6
    return [
        Target("round with 10,000 clients / 100", "<= 1.1x", ratio, ratio <= 1.1),
        Target("additional MB with 10,000 clients", "<= 50", more, more <= 50),
    ]


def population_cost(clients: int, rounds: int) -> tuple[float, int]:
    """Median CPU seconds of a round of SCAFFOLD with memory on disk, and the peak of RAM without the data."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(140_000, 64, generator=g), torch.randint(0, 10, (140_000,), generator=g)
    data = dataset(x, y, x[:360], y[:360])
    before = reset_peak()
    with folder() as out:
        experiment = small(
            data={"partition": "iid", "clients": clients},
            algorithm={"name": "scaffold"},
            record={"memory": "disk"},
        )
        run = Run(experiment, out / "run", data=data)
        each = Partition(run.fed.partition.order[: 14 * clients], torch.arange(clients + 1) * 14)
        run.fed = replace(run.fed, partition=each)
        took = []
        for _ in range(rounds):
            begin = time.process_time()
            next(run)
            took.append(time.process_time() - begin)
        run.close()
    return median(took), resident("VmHWM") - before


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)
