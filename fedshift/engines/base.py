"""The contract of an engine: the side of a round that happens on clients.

An engine is given jobs, one for each run it works for, and gives back what the clients of each
upload, in the order of the cohort. It also scores models, because it has the model and the data.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fedshift.algorithms.base import ClientRule
from fedshift.data.cohorts import Plan
from fedshift.data.datasets import Dataset
from fedshift.evaluate import Loss, Metric, Score
from fedshift.types import Broadcast, Decoded, Params
from fedshift.uplink import Uplink


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained, on what, and how: the same for every client and round."""

    model: nn.Module
    data: Dataset
    loss: Loss
    metric: Metric
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # the largest norm of a gradient; 0 for no limit
    augment: bool = False
    learners: list[nn.Module] = field(init=False)  # modules that are in training mode while clients train
    params: Params = field(init=False)  # what travels, as it was given: what is trained, and buffers

    def __post_init__(self) -> None:
        state = self.model.state_dict()
        if strange := [name for name, x in state.items() if not isinstance(x, Tensor)]:
            raise ValueError(f"{strange[0]}: a model's state must be tensors, and this is none")
        if not self.trained:
            raise ValueError(f"{type(self.model).__name__} has no parameters to train")
        # parts that the caller set to evaluation, like a frozen batch norm, stay so; a whole model that is, does not
        learners = [module for module in self.model.modules() if module.training or not self.model.training]
        object.__setattr__(self, "learners", learners)
        # frozen weights stay where they are, and of tensors with two names only the first travels
        moving = {*self.trained, *(name for name, _ in self.model.named_buffers())}
        params = {name: x.detach().to("cpu", copy=True) for name, x in state.items() if name in moving}
        object.__setattr__(self, "params", params)

    @property
    def trained(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    @property
    def fixed(self) -> Params:
        """Tensors that do not travel: frozen weights, and buffers that are not part of the model's state."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: x for name, x in tensors if name not in self.params}


class TrainingError(RuntimeError):
    """What a model, a loss or a metric raised, and where."""


def told(problem: BaseException) -> str:
    """An exception in a line: what it says, and which line of whose file raised it."""
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}{where}"


class Job(NamedTuple):
    """The clients of one round of one run."""

    number: int  # of the round
    clients: Sequence[int]
    rule: ClientRule
    sent: Broadcast
    recall: Callable[[int], Params]  # what a client remembers: the rule's memory and 'error/' of its uplink
    plan: Plan
    examples: Sequence[int]  # how many each client holds
    uplinks: Sequence[Uplink]  # one a client
    layers: Sequence[str]  # tensors whose drift and error are wanted
    histograms: bool = False  # whether to count weights before and after the quantizer


class Histogram(NamedTuple):
    """How often a layer's weights fall into equal bins between low and high."""

    layer: str
    low: float
    high: float
    before: list[int]  # the quantizer
    after: list[int]


class Upload(NamedTuple):
    """What one client sends, and what a simulation can tell about it."""

    client: int
    frame: bytes | Decoded  # b"" when there is nothing that could be sent
    extra: bytes | Decoded  # a second frame: SCAFFOLD's change of c, where it is sent
    memory: Params  # what the client will remember
    drift: list[tuple[float, float]]  # |w_k - w_t| and |Q(w_k) - w_t| of each layer
    error: float  # |u - Q(u)| / |u| over all quantized tensors
    seconds: tuple[float, float]  # training, encoding
    failure: str = ""  # why there is no frame
    histograms: tuple[Histogram, ...] = ()


class Engine(Protocol):
    @property
    def home(self) -> torch.device:
        """Where the server's state, the draws and the uploads are at home."""

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        """The uploads of every job, in the order of its clients; each may be worked out as it is taken."""

    def evaluate(self, params: Params) -> Score: ...

    def close(self) -> None:
        """Give back processes and memory; nothing can be trained after it."""


@contextmanager
def arithmetic(precision: str, deterministic: bool = False) -> Iterator[None]:
    """How a GPU multiplies float32 matrices: 'tf32' rounds their entries to ten bits, others do not."""
    matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.use_deterministic_algorithms(deterministic or strict, warn_only=warns)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matrices)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(strict, warn_only=warns)


@contextmanager
def one_thread() -> Iterator[None]:
    """Results must not depend on how many threads a sum was split over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
