"""Runs that are trained on one engine: their clients form one stack, and each run keeps its own record.

A packed run makes the draws it would make alone. What it computes differs by rounding, because a
larger stack adds up in another order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedshift.core.tree import same
from fedshift.core.types import Params
from fedshift.engines import Engine, Task
from fedshift.experiment.settings import Experiment
from fedshift.rounds.engine import Job, Upload
from fedshift.rounds.evaluate import Score

SPARE = 0.8  # of the device's free memory that a pack may take


class Seat(NamedTuple):
    """An engine that several runs use: who leaves it leaves it to the others."""

    engine: Engine

    @property
    def home(self) -> torch.device:
        return self.engine.home

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return self.engine.train(jobs)

    def evaluate(self, params: Params) -> Score:
        return self.engine.evaluate(params)

    def close(self) -> None:
        pass


def kind(experiment: Experiment) -> str:
    """What runs of one pack have in common."""
    said = experiment.train
    return repr(
        (
            (experiment.data.name, experiment.data.augment, experiment.model, experiment.engine),
            experiment.record.checkpoint if experiment.engine.deterministic else None,  # they go back together
            (said.batch, said.momentum, said.weight_decay, said.clip, said.loss, said.metric),
        )
    )


def alike(one: Task, other: Task) -> bool:
    """Whether what does not travel, frozen weights and private buffers, is the same: a pack has but one of it."""
    mine, its = one.fixed, other.fixed
    return mine.keys() == its.keys() and all(same(x, its[name]) for name, x in mine.items())


def fitting(experiments: Sequence[Experiment], task: Task) -> int:
    """How many of these, in their order, are trained at once: as many as are asked for, or as fit the device."""
    if asked := experiments[0].engine.pack:
        return asked
    device = task.data.x.device
    if device.type != "cuda":
        return 4  # a larger stack gains nothing on a CPU
    left = SPARE * torch.cuda.mem_get_info(device)[0]
    example, count = activations(task), 0
    for experiment in experiments:
        left -= room(experiment, task, example)
        if left < 0:
            break
        count += 1
    return max(1, count)


def room(experiment: Experiment, task: Task, example: int) -> int:
    """Bytes of device memory that a run needs in a pack.

        K (24 P + A B)  +  12 K P for FedProx and SCAFFOLD  +  4 N P for SCAFFOLD  +  4 N P for error feedback

    at most, for P weights, K clients a round of N, batches of B examples, and A bytes an example.
    """
    p = sum(x.numel() for x in task.params.values())
    said, k, n = experiment.algorithm.name, experiment.train.cohort, experiment.data.clients
    feedback = any(own.feedback for own in (experiment.uplink, *experiment.uplink.group.values()))
    kept = (said == "scaffold") + feedback if experiment.record.memory == "ram" else 0
    return k * (24 * p + example * experiment.train.batch) + 12 * k * p * (said != "fedavg") + 4 * n * p * kept


def activations(task: Task) -> int:
    """Bytes that one example takes in forward and backward pass: three times what the model's layers put out."""
    found: list[int] = []

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            found.append(12 * output.numel())

    hooks = [module.register_forward_hook(count) for module in task.model.modules()]
    with torch.no_grad():
        task.model(task.data.inputs(task.data.x[:1]))
    for hook in hooks:
        hook.remove()
    return sum(found)
