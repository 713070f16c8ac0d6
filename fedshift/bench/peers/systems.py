"""Systems that train the task; each reports the result of every round."""

import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedshift.bench.engines import folder
from fedshift.bench.handwritten import Handwritten, average, shuffled
from fedshift.bench.peers import task as tasks
from fedshift.bench.peers.task import BATCH, COHORT, EPOCHS, LR, Each, RoundResult, Task, size
from fedshift.core.types import Params
from fedshift.models import MLP
from fedshift.runs.run import Run, cores_here


def by_hand(path: Path, rounds: int, each: Each) -> None:
    """Plain loop over clients and batches."""
    task = tasks.read(path)
    work, params = handwritten(task), task.start
    for number in range(1, rounds + 1):
        params = average([work.train(params, batches) for _, batches in task.cohort(number)])
        each(RoundResult(params, work.accuracy(params), COHORT * size(params)))


def fedshift(path: Path, rounds: int, each: Each, recorded: bool = False, **changes: Any) -> None:
    """A run without record, or with record and checkpoints."""
    task = tasks.read(path)
    experiment = tasks.experiment(rounds, **changes)
    with folder() as out:
        run = Run(experiment, out / "run" if recorded else None, data=task.dataset, partition=task.partition)
        with run:
            for outcome in run:
                each(RoundResult(run.params, outcome.accuracy or 0.0, sum(outcome.bytes_up)))


def pfl_research(path: Path, rounds: int, each: Each) -> None:
    from fedshift.bench.peers import pfl_research as peer

    peer.simulate(tasks.read(path), rounds, each)


def flower(path: Path, rounds: int, each: Each) -> None:
    """Flower's simulation; Flower draws the clients, and each client shuffles its examples."""
    from fedshift.flower.testing.peer import simulate

    task = tasks.read(path)
    work = handwritten(task)

    def end(params: Params, bytes_up: int) -> None:
        each(RoundResult(params, work.accuracy(params), bytes_up))

    with tempfile.TemporaryDirectory(prefix="fedshift-", ignore_cleanup_errors=True) as home:
        train = partial(train_client, path)
        simulate(train, task.start, end, task.clients, COHORT, rounds, cores_here(), Path(home))


def train_client(path: Path, params: Params, client: int, number: int) -> Params:
    """Local training in a worker process of Flower, which reads the task once."""
    torch.set_num_threads(1)
    task = tasks.read(path)
    generator = torch.Generator().manual_seed(number * task.clients + client)
    return worker(path).train(params, shuffled(task.examples(client), EPOCHS, BATCH, generator))


@lru_cache(maxsize=1)
def worker(path: Path) -> Handwritten:
    return handwritten(tasks.read(path))


def handwritten(task: Task) -> Handwritten:
    return Handwritten(MLP(), task.x, task.y, task.test_x, task.test_y, LR)


class System(NamedTuple):
    """A system that can be measured."""

    label: str
    run: Callable[[Path, int, Each], None]
    rounds: int  # that are measured, after two that are not
    packages: tuple[str, ...] = ()  # that it needs


SYSTEMS = {
    "loop": System("hand-written loop", by_hand, 60),
    "pfl": System("pfl-research, one process", pfl_research, 60, ("pfl",)),
    "flower": System("Flower's simulation", flower, 10, ("flwr", "ray")),
    "sequential": System("fedshift, sequential", fedshift, 60),
    "processes": System("fedshift, processes", partial(fedshift, engine={"name": "processes"}), 60),
    "recorded": System("fedshift, sequential, recorded", partial(fedshift, recorded=True), 60),
    "lean": System("fedshift, sequential, lean", partial(fedshift, uplink="lean"), 60),
}
