"""Forward pass of the paper's CNN for K stacked clients, channels last, and the tasks that it supports."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.types import Params
from fedshift.engines.gpu import kernels
from fedshift.engines.gpu.paper_cnn import convpool
from fedshift.models import PaperCNN
from fedshift.rounds.engine import Task


def supports(task: Task) -> bool:
    """True for the paper's CNN in float32 on uint8 data on a GPU, if there are kernels for its shapes."""
    return (
        type(task.model) is PaperCNN
        and task.data.x.is_cuda
        and task.data.x.dtype == torch.uint8
        and task.data.dtype == torch.float32
        and kernels.AVAILABLE
        and all(convpool.fits(*shapes) for shapes in _convolutions(task.model, task.data.shape))
    )


def stack(task: Task, precision: str) -> "PaperNet":
    """Forward pass of a supported model; `precision` is "fp32", "tf32" or "bf16"."""
    return PaperNet(task, precision)


class PaperNet:
    """Forward pass of K clients; convolution, ReLU and pooling are one kernel."""

    def __init__(self, task: Task, precision: str) -> None:
        self.precision, self.short = precision, precision == "bf16"
        self.table = kernels.levels(task.data, torch.bfloat16 if self.short else torch.float32)

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        return kernels.images(x, index, drawn, self.table)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        x = convpool.conv_relu_pool(x, params["conv1.weight"], self.precision)
        x = convpool.conv_relu_pool(x, params["conv2.weight"], self.precision)
        x = x.permute(0, 1, 4, 2, 3).flatten(2)  # the order of flatten in the model
        x = F.relu(linear(x, params["fc1.weight"]))
        return linear(x, params["fc2.weight"]).float()


class _Linear(torch.autograd.Function):
    """x w^T for K clients; the gradient of w has the layout of w, unlike autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.bmm(grads[0], w), torch.bmm(grads[0].transpose(1, 2), x)


def linear(x: Tensor, w: Tensor) -> Tensor:
    """x (K, B, n), w (K, m, n) -> (K, B, m)"""
    outputs: Tensor = _Linear.apply(x, w)  # type: ignore[no-untyped-call]
    return outputs


def _convolutions(model: PaperCNN, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the inputs (K, B, H, W, C) and weights (K, O, C, 5, 5) of both convolutions, K = B = 1"""
    c, h, w = shape
    after = convpool.pooled(h), convpool.pooled(w)
    weights = [tuple(conv.weight.shape) for conv in (model.conv1, model.conv2)]
    return [((1, 1, h, w, c), (1, *weights[0])), ((1, 1, *after, weights[0][0]), (1, *weights[1]))]
