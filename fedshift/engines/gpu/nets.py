"""Contract of the forward pass of K stacked clients, and the packages of kernels that implement it for one model."""

from typing import Protocol

from torch import Tensor

from fedshift.core.types import Params
from fedshift.engines.gpu import paper_cnn
from fedshift.rounds.engine import Task


class Net(Protocol):
    """Forward pass of K clients."""

    short: bool  # True if its weights are bfloat16

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        """Inputs of the model: the examples x[index], index (K, B), cropped and flipped as drawn (K, B, 3)."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """params (K, ...), inputs (K, B, ...) -> outputs (K, B, ...)"""


class Kernels(Protocol):
    """Kernels written for one model: a package with these two functions."""

    def supports(self, task: Task) -> bool:
        """True if the kernels can train this model on this data and device."""

    def stack(self, task: Task, precision: str) -> Net:
        """Forward pass of K clients with these kernels; `precision` is "fp32", "tf32" or "bf16"."""


# in order of preference; a model that none of them supports is trained through `torch.vmap`
KERNELS: tuple[Kernels, ...] = (paper_cnn,)
