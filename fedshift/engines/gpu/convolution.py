"""Convolutions of K stacked clients as products of matrices, for GPUs.

`torch.vmap` turns them into one convolution of K groups, which is slow on a GPU if a group has few channels. Here the
patches of all examples are the columns of one matrix, and

    y_k = w_k columns(x_k)        dw_k = sum over examples of dy_k columns(x_k)^T        dx_k = conv(dy_k, w_k turned)

are batched products. Columns are computed again for the gradient instead of being kept in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Pair = tuple[int, int]


class Products(TorchFunctionMode):
    """Within it, `conv2d` of stacked clients is computed with products; other functions are unchanged.

    Convolutions with groups, dilation, a padding given by name or one image instead of a batch are unchanged too.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.conv2d:
            return _conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _conv2d(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d`, with its arguments."""
    if groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.ndim != 4:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    x, w, device = input, weight, input.device.type
    if torch.is_autocast_enabled(device):  # as torch casts the operands of conv2d
        x, w = (part.to(torch.get_autocast_dtype(device)) for part in (x, w))
    y: Tensor = _Mapped.apply(x, w, _pair(stride), _pair(padding))  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.to(y.dtype)[:, None, None]


def _pair(of: int | Sequence[int]) -> Pair:
    return (of, of) if isinstance(of, int) else (of[0], of[-1])


class _Mapped(torch.autograd.Function):
    """Convolution of one client, which `torch.vmap` replaces with that of all clients."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
        return F.conv2d(x, w, None, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass  # all clients at once have their own gradient

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, w: Tensor, stride: Pair, padding: Pair
    ) -> tuple[Tensor, int]:
        x, w = (
            part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            for part, dim in zip((x, w), in_dims[:2], strict=True)
        )
        if info.batch_size == 1:  # one group, as in an evaluation, whose columns would need much memory
            return F.conv2d(x[0], w[0], None, stride, padding)[None], 0
        y: Tensor = Stacked.apply(x, w, stride, padding)  # type: ignore[no-untyped-call]
        return y, 0


class Stacked(torch.autograd.Function):
    """Convolutions of K clients: x (K, B, C, H, W), w (K, O, C, h, v) -> (K, B, O, H', W')."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.stride, ctx.padding = stride, padding
        return _product(w, _columns(x, w.shape[-2:], stride, padding))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x, w), (dy,) = ctx.saved_tensors, grads
        dx = dw = None
        if ctx.needs_input_grad[0]:
            spread = _spread(dy, x.shape[-2:], w.shape[-2:], ctx.stride, ctx.padding)
            dx = _product(w.transpose(1, 2).flip(3, 4), _columns(spread, w.shape[-2:], (1, 1), (0, 0)))
        if ctx.needs_input_grad[1]:
            dw = _outer(dy, _columns(x, w.shape[-2:], ctx.stride, ctx.padding)).view(w.shape)
        return dx, dw, None, None


def _columns(x: Tensor, kernel: Sequence[int], stride: Pair, padding: Pair) -> Tensor:
    """Patches of x (K, B, C, H, W) as (C h v, K, B, H', W'): any batch of these axes is a matrix without a copy."""
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    patches = padded.unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])  # (K, B, C, H', W', h, v)
    return patches.permute(2, 5, 6, 0, 1, 3, 4).flatten(0, 2).contiguous()


def _product(w: Tensor, columns: Tensor) -> Tensor:
    """w_k columns_k: (K, O, C, h, v) and (C h v, K, B, H, W) -> (K, B, O, H, W)"""
    _, k, b, height, width = columns.shape
    y = torch.bmm(w.flatten(2), columns.flatten(2).transpose(0, 1))  # (K, O, B H W)
    return y.view(k, w.shape[1], b, height, width).transpose(1, 2)


def _outer(dy: Tensor, columns: Tensor) -> Tensor:
    """Sum over examples of dy columns^T: (K, B, O, H, W) and (C h v, K, B, H, W) -> (K, O, C h v).

    A sum per example and then over examples occupies a GPU better than one long sum, and needs less memory than the
    columns if there are fewer output channels than positions.
    """
    _, k, b, height, width = columns.shape
    if dy.shape[2] <= height * width:
        each = torch.bmm(dy.flatten(0, 1).flatten(2), columns.flatten(1, 2).flatten(2).permute(1, 2, 0))
        return each.view(k, b, *each.shape[1:]).sum(1)
    return torch.bmm(dy.transpose(1, 2).flatten(2), columns.flatten(2).permute(1, 2, 0))


def _spread(dy: Tensor, size: Sequence[int], kernel: Sequence[int], stride: Pair, padding: Pair) -> Tensor:
    """dy with stride - 1 zeros between positions, and a border that gives its convolution the size of the inputs."""
    if stride != (1, 1):
        lengths = [(n - 1) * step + 1 for n, step in zip(dy.shape[-2:], stride, strict=True)]
        zeros = dy.new_zeros(*dy.shape[:-2], *lengths)
        zeros[..., :: stride[0], :: stride[1]] = dy
        dy = zeros
    before = [h - 1 - pad for h, pad in zip(kernel, padding, strict=True)]
    after = [n + pad - length for n, pad, length in zip(size, padding, dy.shape[-2:], strict=True)]
    return F.pad(dy, (before[1], after[1], before[0], after[0]))
