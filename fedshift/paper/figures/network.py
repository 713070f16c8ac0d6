"""Data, network and local training of figures 2, 3, 4, 6 and 10, which need no federation.

CIFAR-10 and the paper's CNN if the data set is in the cache, else digits and a network with one hidden layer.
"""

import copy
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.data import cache as fetched
from fedshift.data.catalog import find
from fedshift.data.datasets import Dataset, load
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.settings import Experiment
from fedshift.rounds.engine import one_thread

TITLES = {"cifar10": "CIFAR-10", "digits": "digits"}


@cache
def examples() -> Dataset:
    """CIFAR-10 if it is in the cache, else digits; a damaged copy raises DataError."""
    return load("cifar10" if fetched.path(find("cifar10")).exists() else "digits")


def recipe(data: Dataset) -> Experiment:
    """Settings of one run: the paper's on CIFAR-10, or the demo's on digits."""
    preset: dict[str, Any] = PRESETS["paper" if data.name == "cifar10" else "demo"]
    raw = {key: value for key, value in preset.items() if key != "sweep"}
    return Experiment(**raw).changed(uplink="paper", **{"data.augment": False})


def weights(model: nn.Module) -> Params:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


@one_thread()
def trained(model: nn.Module, data: Dataset, index: Tensor, experiment: Experiment, epochs: int, key: Tensor) -> Params:
    """Weights after some epochs of SGD over these examples, shuffled in each epoch; the model is not changed."""
    config, copied = experiment.train, copy.deepcopy(model)
    optimizer = torch.optim.SGD(copied.parameters(), lr=config.lr, momentum=config.momentum)
    for epoch in range(epochs):
        order = rng.uniform(rng.fold(key, epoch).view(1), len(index))[0].argsort(stable=True)
        for batch in torch.split(index[order], config.batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(copied(data.inputs(data.x[batch])), data.y[batch])
            torch.autograd.backward(loss)
            optimizer.step()
    return weights(copied)
