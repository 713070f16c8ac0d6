"""The task that all systems train, as a file: data, clients, initial model, and the batches of every round."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.core.types import CPU, Params
from fedshift.data import datasets
from fedshift.data.datasets import Dataset, dataset
from fedshift.data.partition import Partition
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.rounds.loop import draw

COHORT, EPOCHS, BATCH, LR = 10, 5, 10, 0.05
EXAMPLES = 14  # per client


class Task(NamedTuple):
    """MLP 64-128-10 on digits: 10 clients of 14 examples per round, 5 epochs, batch 10, SGD with rate 0.05."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    order: Tensor  # (14 N,) examples, client by client
    start: Params  # initial model
    cohorts: Tensor  # (R, 10) clients of each round
    epochs: Tensor  # (R, 10, 5, 14) examples of each epoch, in the order of the batches

    @property
    def clients(self) -> int:
        return len(self.order) // EXAMPLES

    def examples(self, client: int) -> Tensor:
        """Indices of the examples of a client."""
        return self.order[client * EXAMPLES : (client + 1) * EXAMPLES]

    def cohort(self, number: int) -> list[tuple[int, list[Tensor]]]:
        """Clients of a round, counted from 1, and the batches of each."""
        clients, epochs = self.cohorts[number - 1].tolist(), self.epochs[number - 1]
        return [
            (k, [batch for each in own for batch in each.split(BATCH)]) for k, own in zip(clients, epochs, strict=True)
        ]

    @property
    def partition(self) -> Partition:
        return Partition(self.order, torch.arange(self.clients + 1) * EXAMPLES)

    @property
    def dataset(self) -> Dataset:
        return dataset(self.x, self.y, self.test_x, self.test_y, name="digits")


class RoundResult(NamedTuple):
    """State after a round."""

    params: Params
    accuracy: float
    bytes_up: int  # of all uploads


Each = Callable[[RoundResult], None]  # called after every round


def size(params: Params) -> int:
    """Bytes of the tensors."""
    return sum(x.nbytes for x in params.values())


def experiment(rounds: int, **changes: Any) -> Experiment:
    """Experiment of this task: FedAvg, with exact uploads on the sequential engine unless `changes` say otherwise."""
    base: dict[str, Any] = {
        "train": {"rounds": rounds, "cohort": COHORT, "epochs": EPOCHS, "batch": BATCH, "lr": LR},
        "shift": {"on": False},
        "uplink": "exact",
        "engine": {"name": "sequential"},
    }
    return Experiment(**(base | changes))


def make(clients: int, rounds: int) -> Task:
    """Assign the examples of digits in turn, with repetition, and draw the batches of all rounds as fedshift does."""
    data = datasets.load("digits")
    shuffled = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))
    order = shuffled[torch.arange(clients * EXAMPLES) % len(shuffled)]
    none = torch.zeros(0)
    task = Task(data.inputs(data.x), data.y, data.inputs(data.test_x), data.test_y, order, {}, none, none)
    fed = build(experiment(rounds), data=task.dataset, partition=task.partition)
    drawn = [draw(fed, number, CPU) for number in range(1, rounds + 1)]
    kept = torch.stack([each.plan.batches[each.plan.keep] for each in drawn if each.plan])  # in the order of the steps
    return task._replace(
        start=fed.start().out.params,
        cohorts=torch.tensor([each.clients for each in drawn]),
        epochs=kept.view(rounds, COHORT, EPOCHS, EXAMPLES),
    )


def write(task: Task, path: Path) -> None:
    torch.save(task._asdict(), path)


@lru_cache(maxsize=1)
def read(path: Path) -> Task:
    """Task in a file, read once per process."""
    return Task(**torch.load(path, weights_only=True))
