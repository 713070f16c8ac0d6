"""Packs: runs trained on one engine, whose clients form one stack; each run has its own record.

A packed run makes the same draws as it would alone. Its results differ by rounding, because a larger stack sums in
another order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedshift.algorithms.base import defines, is_affine
from fedshift.core.tree import same, take
from fedshift.core.types import Params
from fedshift.engines import Engine, Task
from fedshift.engines.gpu.nets import KERNELS
from fedshift.experiment.build import named_algorithm, split
from fedshift.experiment.settings import Experiment
from fedshift.rounds.engine import Job, Upload
from fedshift.rounds.evaluate import ClientScores, Held, Score

SPARE = 0.8  # share of the device's free memory that a pack may use


class Seat(NamedTuple):
    """Shared engine of a pack; closing it for one run leaves it open for the others."""

    engine: Engine

    @property
    def home(self) -> torch.device:
        return self.engine.home

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return self.engine.train(jobs)

    def evaluate(self, params: Params) -> Score:
        return self.engine.evaluate(params)

    def evaluate_clients(self, params: Params, held: Held) -> ClientScores:
        return self.engine.evaluate_clients(params, held)

    def close(self) -> None:
        pass


def kind(experiment: Experiment) -> str:
    """Key of the settings that runs of one pack must share."""
    train = experiment.train
    return repr(
        (
            (experiment.data.name, experiment.data.args, experiment.data.augment, experiment.model, experiment.engine),
            experiment.record.checkpoint if experiment.engine.deterministic else None,  # resumed together
            (train.batch, train.momentum, train.weight_decay, train.clip, train.loss, list(train.directions)),
            train.optimizer.model_dump(),
        )
    )


def alike(first: Task, second: Task) -> bool:
    """True if the tensors that are not sent, frozen weights and private buffers, are equal: a pack shares them."""
    ours, theirs = first.fixed, second.fixed
    return ours.keys() == theirs.keys() and all(same(x, theirs[name]) for name, x in ours.items())


def fitting(experiments: Sequence[Experiment], task: Task) -> int:
    """Number of these runs, in order, to train at once: `engine.pack`, or as many as fit the device."""
    if pack := experiments[0].engine.pack:
        return pack
    device = task.data.x.device
    if device.type != "cuda":
        return 4  # a larger stack is not faster on a CPU
    left = SPARE * torch.cuda.mem_get_info(device)[0]
    example, count = activations(task), 0
    for experiment in experiments:
        left -= memory_needed(experiment, task, example)
        if left < 0:
            break
        count += 1
    return max(1, count)


def memory_needed(experiment: Experiment, task: Task, example: int) -> int:
    """Bytes of device memory that a run needs in a pack.

        K (24 P + A B)  +  4 K P for affine rules, 12 K P for others that adjust gradients  +  8 K P for Adam
        +  4 K P for a second upload
        +  8 K P for each tensor of the clients' memory of the model's size (of the rule, of error feedback)
        +  4 N P for the same of all clients between rounds, and for the server's memory about clients

    at most, for P weights, K of N clients per round, batches of B examples, and A bytes per example.
    """
    p = sum(x.numel() for x in task.params.values())
    (client, server), k = named_algorithm(experiment), experiment.train.cohort
    n = experiment.data.clients or split(experiment, task.data).clients
    trained = take(task.params, task.trained)
    memory = sum(x.numel() for x in client.init(trained).values())
    if any(link.feedback for link in (experiment.uplink, *experiment.uplink.group.values())):
        memory += p
    kept = 4 * n * (memory + p * ("memory" in server.needs)) if experiment.record.memory == "ram" else 0
    adjusting = 4 * defines(client, "affine") if is_affine(client) else 12
    per_weight = 24 + adjusting + 8 * (task.optimizer is not None) + 4 * defines(client, "second")
    return k * (per_weight * p + 8 * memory + example * experiment.train.batch) + kept


def activations(task: Task) -> int:
    """Bytes of one example in forward and backward pass.

    Three times the outputs of the model's layers and, without kernels for the model, the largest matrix of patches of
    a convolution: of its inputs, or of the gradients of its outputs.
    """
    found: list[int] = []
    patches = [0]
    mapped = not any(package.supports(task) for package in KERNELS)

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if isinstance(output, Tensor):
            found.append(12 * output.numel())
            if mapped and isinstance(module, nn.Conv2d):
                patches.append(4 * module.weight[0].numel() * output[0, 0].numel())
                patches.append(4 * module.weight[:, 0].numel() * inputs[0][0, 0].numel())

    hooks = [module.register_forward_hook(count) for module in task.model.modules()]
    with torch.no_grad():
        task.model(task.data.inputs(task.data.x[:1].clone()))
    for hook in hooks:
        hook.remove()
    return sum(found) + max(patches)
