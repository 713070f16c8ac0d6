"""Contract of the forward pass of K stacked clients, and the packages of kernels that implement it for one model."""

from typing import Protocol

from torch import Tensor

from fedshift.core.types import Params
from fedshift.engines.gpu import paper_cnn
from fedshift.engines.gpu.kernels import Held, Product
from fedshift.rounds.engine import Task


class Net(Protocol):
    """Forward pass of K clients."""

    short: bool  # True if its weights are bfloat16
    cuts: tuple[str, ...]  # weights whose products `cut` may return

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        """Inputs of the model: the examples x[index], index (K, B), cropped and flipped as drawn (K, B, 3)."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """params (K, ...), inputs (K, B, ...) -> outputs (K, B, ...)"""

    def cut(self, params: Params, x: Tensor, held: dict[str, Held]) -> tuple[Tensor, dict[str, Product]]:
        """Outputs, and products by the name of their bfloat16 weights, in the order of the forward pass.

        Their weights w need no gradient: it is dy^T x, which `kernels.linear_sgd` applies without storing it. If a
        gradient is held, w is that of `kernels.look_ahead`, and y = x (w - lr dy^T x of the held step)^T.
        """


class Kernels(Protocol):
    """Kernels written for one model: a package with these two functions."""

    def supports(self, task: Task) -> bool:
        """True if the kernels can train this model on this data and device."""

    def stack(self, task: Task, precision: str) -> Net:
        """Forward pass of K clients with these kernels; `precision` is "fp32", "tf32" or "bf16"."""


# in order of preference; a model that none of them supports is trained through `torch.vmap`
KERNELS: tuple[Kernels, ...] = (paper_cnn,)
