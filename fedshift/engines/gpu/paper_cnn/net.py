"""Forward pass of the paper's CNN for K stacked clients, and the tasks that it supports."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.types import Params
from fedshift.engines.gpu import kernels
from fedshift.engines.gpu.kernels import Held, Product
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
        self.cuts: tuple[str, ...] = ("fc1.weight",) if self.short else ()
        self.table = kernels.levels(task.data, torch.bfloat16 if self.short else torch.float32)
        channels, height, width = task.data.shape
        self.size = height, width
        self.framed = self.short and channels <= 4

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        return kernels.images(x, index, drawn, self.table, self.framed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return self._head(params, linear(self._features(params, x), params["fc1.weight"]))

    def cut(self, params: Params, x: Tensor, held: dict[str, Held]) -> tuple[Tensor, dict[str, Product]]:
        """The product with the weights of fc1, 97% of the model, is a cut in bfloat16."""
        w = params["fc1.weight"]
        if not self.short or not w.requires_grad or x.shape[1] > kernels.LARGEST_BATCH:
            return self(params, x), {}
        x = self._features(params, x)
        with torch.no_grad():
            y = torch.bmm(x, w.transpose(1, 2))
            if last := held.get("fc1.weight"):
                alike = torch.bmm(x, last.x.transpose(1, 2)) * -last.lr[:, None, None]  # (K, B, B)
                y = torch.baddbmm(y, alike.to(y.dtype), last.dy)
        y.requires_grad_()
        return self._head(params, y), {"fc1.weight": Product(x, y)}

    def _features(self, params: Params, x: Tensor) -> Tensor:
        w = params["conv1.weight"]
        if self.framed:
            x = convpool.framed_conv_relu_pool(x, w, self.size)
        else:
            x = convpool.conv_relu_pool(x, w, self.precision)
        return convpool.conv_relu_pool(x, params["conv2.weight"], self.precision).flatten(2)

    def _head(self, params: Params, x: Tensor) -> Tensor:
        return linear(F.relu(x), params["fc2.weight"]).float()


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
