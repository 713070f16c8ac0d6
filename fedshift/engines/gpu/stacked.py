"""Forward pass of K stacked models: weights, inputs and outputs have a leading axis of clients."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshift.core.tree import same
from fedshift.core.types import Params
from fedshift.data.augment import cropped
from fedshift.engines.gpu.convolution import Products
from fedshift.engines.gpu.kernels import Held, Product
from fedshift.engines.gpu.nets import KERNELS, Kernels, Net
from fedshift.rounds.engine import RAISED, Task, arithmetic, describe, duplicate
from fedshift.rounds.evaluate import Loss

BATCH_STATISTICS = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd
TRIED = 8  # examples per client in the trial


class StackError(ValueError):
    """A model cannot be trained for stacked clients."""


class Mapped:
    """Any module, with `torch.vmap` over the clients; on a GPU, its convolutions are products of matrices."""

    short = False
    cuts: tuple[str, ...] = ()

    def __init__(self, task: Task, precision: str, products: bool | None = None) -> None:
        self.task, self.bf16 = task, precision == "bf16"
        self.products = task.data.x.is_cuda if products is None else products
        self.forward: Callable[[Params, Tensor], Tensor] = vmap(self._forward)

    def _forward(self, params: Params, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.task.model, params, (x,))
        return outputs

    def inputs(self, x: Tensor, index: Tensor, drawn: Tensor | None) -> Tensor:
        x = x[index]
        return self.task.data.inputs(x if drawn is None else cropped(x, drawn))

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        # no cache of casts: a replayed graph must cast again
        cast = torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)
        with cast, Products() if self.products else nullcontext():
            outputs = self.forward(params, x)
        return outputs.to(self.task.data.dtype) if self.bf16 else outputs

    def cut(self, params: Params, x: Tensor, held: dict[str, Held]) -> tuple[Tensor, dict[str, Product]]:
        return self(params, x), {}


def stacked(task: Task, precision: str, kernels: Sequence[Kernels] = KERNELS) -> Net:
    """Forward pass of the first kernels that support the model, else `Mapped`; StackError if it cannot be stacked."""
    for name, module in task.model.named_modules():
        if module not in task.learners:
            continue
        kind = f"{name} ({type(module).__name__})"
        if isinstance(module, BATCH_STATISTICS):
            raise StackError(_refusal(task, f"{kind} mixes the examples of a batch"))
        if isinstance(module, DROPOUT) and module.p:
            raise StackError(_refusal(task, f"{kind} draws random numbers"))
        if isinstance(module, nn.RNNBase):
            raise StackError(_refusal(task, f"{kind} is a fused recurrent layer, which cannot be stacked", ""))
        if isinstance(module, nn.Embedding) and (module.padding_idx is not None or module.max_norm is not None):
            raise StackError(_refusal(task, f"{kind} has padding_idx or max_norm, which stacked models do not support"))
    try:
        with arithmetic("fp32"):
            problem = _different(task)
            if problem:  # which rounding alone may cause: cuDNN has errors of 0.3 % in gradients of float32
                data = replace(task.data, dtype=torch.float64)
                with suppress(Exception):  # of models and losses that do not support float64
                    problem = _different(replace(task, model=duplicate(task.unused).double(), data=data))
    except RAISED as raised:
        raise StackError(_refusal(task, describe(raised))) from raised
    if problem:
        raise StackError(_refusal(task, problem))
    for package in kernels:
        if package.supports(task):
            return package.stack(task, precision)
    return Mapped(task, precision)


def _different(task: Task) -> str:
    """Reason why two stacked clients, one with a short batch, have other gradients than alone; '' if they are equal."""
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
        return f"{moved[0]} changes during training"
    params = dict(task.model.named_parameters()) | now
    stack = {name: params[name].detach().expand(2, *params[name].shape).clone() for name in task.params}
    leaves = [stack[name].requires_grad_() for name in task.trained]
    outputs = net(stack, net.inputs(data.x, index, None))
    losses = mean_losses(each_loss(task.loss, outputs, data.targets(data.y[index])), keep)
    together = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    for name, grad, *each in zip(task.trained, together, *alone, strict=True):
        for k, true in enumerate(each):
            zero = torch.zeros_like(stack[name][k])
            expected, found = (zero if true is None else true), (zero if grad is None else grad[k])
            if expected.isfinite().all() and not torch.allclose(
                expected, found, rtol=1e-2, atol=1e-4 + 1e-2 * float(expected.abs().max())
            ):
                return (
                    f"the gradient of {name} depends on other examples of the batch; "
                    "examples must be independent, and a loss must be the mean of the examples' losses"
                )
    return ""


def _refusal(task: Task, why: str, change: str = ", or GroupNorm instead of BatchNorm") -> str:
    """Message with the reason and the ways out: another engine, or a change of the model."""
    return (
        f"{type(task.model).__name__} cannot be trained for many clients at once: {why}; "
        f"use engine.name = 'sequential' or 'processes'{change}"
    )


def each_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each example (K, B); a loss must be a mean over examples."""
    if loss is F.cross_entropy and outputs.ndim == 3 and targets.ndim == 2:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    each: Tensor = vmap(vmap(lambda output, target: loss(output[None], target[None])))(outputs, targets)
    return each


def mean_losses(each: Tensor, keep: Tensor) -> Tensor:
    """Mean over the examples in `keep` for each client (K,), 0 for a client without any."""
    return torch.where(keep, each, 0.0).sum(1) / keep.sum(1).clamp(min=1)
