"""K models at once: weights, inputs and outputs with a leading axis of clients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshift.core.tree import same
from fedshift.core.types import Params
from fedshift.data.augment import cropped
from fedshift.data.datasets import Dataset
from fedshift.engines.gpu.paper_cnn import convpool, kernels
from fedshift.models import PaperCNN
from fedshift.rounds.engine import Task, arithmetic, duplicate, told
from fedshift.rounds.evaluate import Loss

BATCH_STATISTICS = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd
TRIED = 8  # examples of a client in the trial


class StackError(ValueError):
    """A model whose clients cannot be trained as one stack."""


class Net(Protocol):
    """The forward pass of K clients."""

    short: bool  # whether it takes its weights in bfloat16

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        """The examples x[index], index (K, B), cropped and flipped as drawn (K, B, 3), as the model sees them."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """params (K, ...), inputs (K, B, ...) -> outputs (K, B, ...)"""


class Mapped:
    """Any module, by vmap over its clients."""

    short = False

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.bf16 = task, precision == "bf16"
        self.forward: Callable[[Params, Tensor], Tensor] = vmap(self._one)

    def _one(self, params: Params, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.task.model, params, (x,))
        return outputs

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        x = x[index]
        return self.task.data.inputs(x if drawn is None else cropped(x, drawn))

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        # no cache of casts: a graph that is replayed must cast anew
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
            outputs = self.forward(params, x)
        return outputs.to(self.task.data.dtype) if self.bf16 else outputs


class Convolved:
    """The paper's CNN on a GPU, channels last: convolution, ReLU and pooling are one kernel."""

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision, self.short = task, precision, precision == "bf16"
        self.table = levels(task.data, torch.bfloat16 if self.short else torch.float32)

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        return kernels.images(x, index, drawn, self.table)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        x = convpool.conv_relu_pool(x, params["conv1.weight"], self.precision)
        x = convpool.conv_relu_pool(x, params["conv2.weight"], self.precision)
        x = x.permute(0, 1, 4, 2, 3).flatten(2)  # the order of the model's own flatten
        x = F.relu(linear(x, params["fc1.weight"]))
        return linear(x, params["fc2.weight"]).float()


def levels(data: Dataset, dtype: torch.dtype) -> Tensor:
    """What a model sees of each of the 256 values of a channel: (C, 256)"""
    values = torch.arange(256, dtype=torch.uint8, device=data.x.device).view(1, 256, 1)
    return data.inputs(values.expand(data.shape[0], 256, 1))[..., 0].to(dtype).contiguous()


class _Linear(torch.autograd.Function):
    """x w^T for K clients; the gradient of w has the layout of w, which autograd's own has not."""

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


def stacked(task: Task, precision: str) -> Net:
    """The fastest forward pass there is for this model here; StackError where there is none."""
    for name, module in task.model.named_modules():
        if module not in task.learners:
            continue
        kind = f"{name} ({type(module).__name__})"
        if isinstance(module, BATCH_STATISTICS):
            raise StackError(_refusal(task, f"{kind} mixes the examples of a batch"))
        if isinstance(module, DROPOUT) and module.p:
            raise StackError(_refusal(task, f"{kind} draws at random"))
        if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None):
            raise StackError(_refusal(task, f"{kind} has padding_idx or max_norm, which a stack does not know"))
    try:
        with arithmetic("fp32"):
            problem = _different(task)
            if problem and task.data.dtype in (torch.float16, torch.bfloat16):  # which rounding alone may cause
                problem = _different(replace(task, model=duplicate(task.unused).float()))
    except Exception as raised:
        raise StackError(_refusal(task, told(raised))) from raised
    if problem:
        raise StackError(_refusal(task, problem))
    if (
        type(task.model) is PaperCNN
        and task.data.x.is_cuda
        and task.data.x.dtype == torch.uint8
        and task.data.dtype == torch.float32
        and kernels.AVAILABLE
        and all(convpool.fits(*shapes) for shapes in _convolutions(task.model, task.data.shape))
    ):
        return Convolved(task, precision)
    return Mapped(task, precision)


def _convolutions(model: PaperCNN, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the inputs (K, B, H, W, C) and weights (K, O, C, 5, 5) of the two."""
    c, h, w = shape
    after = convpool.pooled(h), convpool.pooled(w)
    weights = [tuple(conv.weight.shape) for conv in (model.conv1, model.conv2)]
    return [((1, 1, h, w, c), (1, *weights[0])), ((1, 1, *after, weights[0][0]), (1, *weights[1]))]


def _different(task: Task) -> str:
    """Why the gradients of two clients in a stack, one of them with a short batch, are not those of each alone."""
    data, net, device = task.data, Mapped(task, "fp32"), task.data.x.device
    b = min(TRIED, len(data.x))
    index = torch.arange(2 * b, device=device).view(2, b) * (len(data.x) // (2 * b) or 1) % len(data.x)
    keep = torch.ones(2, b, dtype=torch.bool, device=device)
    keep[1, (b + 1) // 2 :] = False
    before = {name: x.clone() for name, x in task.model.named_buffers()}
    alone = []
    for row, kept in zip(index, keep, strict=True):
        loss = task.loss(task.model(data.inputs(data.x[row[kept]])), data.targets(data.y[row[kept]]))
        alone.append(torch.autograd.grad(loss, task.weights, allow_unused=True))
    now = dict(task.model.named_buffers())
    if moved := [name for name, x in before.items() if name not in now or not same(x, now[name])]:
        for name, x in before.items():
            task.model.get_buffer(name).copy_(x)
        return f"{moved[0]} changes while it trains"
    params = dict(task.model.named_parameters()) | now
    stack = {name: params[name].detach().expand(2, *params[name].shape).clone() for name in task.params}
    leaves = [stack[name].requires_grad_() for name in task.trained]
    outputs = net(stack, net.inputs(data.x, index, None))
    losses = mean_losses(each_loss(task.loss, outputs, data.targets(data.y[index])), keep)
    together = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    for name, grad, *each in zip(task.trained, together, *alone, strict=True):
        for k, true in enumerate(each):
            zero = torch.zeros_like(stack[name][k])
            one, other = (zero if true is None else true), (zero if grad is None else grad[k])
            if one.isfinite().all() and not torch.allclose(
                one, other, rtol=1e-2, atol=1e-4 + 1e-2 * float(one.abs().max())
            ):
                return (
                    f"the gradient of {name} depends on who else is in the batch; "
                    "examples must not see each other, and a loss must be the mean of its examples' losses"
                )
    return ""


def _refusal(task: Task, why: str) -> str:
    return (
        f"{type(task.model).__name__} cannot be trained for many clients at once: {why}; "
        "engine.name = 'sequential' or 'processes' trains it, and GroupNorm can stand in for BatchNorm"
    )


def each_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every example on its own (K, B): a loss is a mean over examples."""
    if loss is F.cross_entropy and outputs.ndim == 3 and targets.ndim == 2:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    each: Tensor = vmap(vmap(lambda output, target: loss(output[None], target[None])))(outputs, targets)
    return each


def mean_losses(each: Tensor, keep: Tensor) -> Tensor:
    """(K,): the mean over the examples that count, 0 for a client that has none."""
    return torch.where(keep, each, 0.0).sum(1) / keep.sum(1).clamp(min=1)
