"""conv 5x5 pad 1, ReLU, maxpool 2x2 pad 1 as one Triton kernel for many clients, each with its own weights.

Pooled position (p, q) covers conv positions (2p - 1 + dy, 2q - 1 + dx), dy and dx 0 or 1: its four candidates, which
depend on a window of 6x6 inputs that begins at (2p - 2, 2q - 2). Channels are last. The device code, conv_kernels.py,
has kernels for C < 16 (`narrow`) and for larger C (`wide`). The backward pass expands the pooled gradient: candidate i
gets g if index == i; while it is read, or before for tf32 (`major`) and bfloat16 (`quad`). Images in bfloat16 have a
frame of zeros (`framed`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fedshift.engines.gpu import kernels
from fedshift.engines.gpu.paper_cnn import conv_kernels

# block sizes and launch options by kernel and precision
TUNED: dict[str, dict[str, dict[str, int]]] = {
    "forward_framed": {"bf16": {"BLOCK": 64, "STEPS": 4, "num_warps": 4, "num_stages": 1}},
    "forward_narrow": {
        "bf16": {"BLOCK": 64, "num_warps": 4, "num_stages": 1},
        "tf32": {"BLOCK": 64, "num_warps": 4, "num_stages": 1},
        "fp32": {"BLOCK": 32, "num_warps": 4, "num_stages": 1},
    },
    "forward_wide": {
        "bf16": {"BLOCK": 64, "num_warps": 4, "num_stages": 5},
        "tf32": {"BLOCK": 32, "num_warps": 4, "num_stages": 4},
        "fp32": {"BLOCK": 16, "num_warps": 4, "num_stages": 1},
    },
    "input_quad": {"bf16": {"BLOCK": 256, "num_warps": 8, "num_stages": 4}},
    "input_wide": {
        "tf32": {"BLOCK": 128, "num_warps": 8, "num_stages": 3},
        "fp32": {"BLOCK": 16, "num_warps": 8, "num_stages": 1},
    },
    "weight_framed": {"bf16": {"BLOCK": 32, "SPLIT": 8, "num_warps": 4, "num_stages": 3}},
    "weight_narrow": {
        "bf16": {"BLOCK": 64, "ROWS": 8, "SPLIT": 5, "num_warps": 8, "num_stages": 1},
        "tf32": {"BLOCK": 64, "ROWS": 8, "SPLIT": 5, "num_warps": 8, "num_stages": 1},
        "fp32": {"BLOCK": 16, "ROWS": 2, "SPLIT": 4, "num_warps": 8, "num_stages": 1},
    },
    "weight_quad": {"bf16": {"BLOCK": 32, "UNITS": 2, "SPLIT": 1, "num_warps": 4, "num_stages": 4}},
    "weight_wide": {
        "tf32": {"BLOCK": 32, "SPLIT": 3, "num_warps": 4, "num_stages": 4},
        "fp32": {"BLOCK": 16, "SPLIT": 3, "num_warps": 8, "num_stages": 1},
    },
}
UNPOOL = {"BLOCK": 64, "num_warps": 8}
EXPAND = {"BLOCK": 32, "num_warps": 4}
BORDER = {"BLOCK": 64, "num_warps": 4}


def fits(x: tuple[int, ...], w: tuple[int, ...]) -> bool:
    """True if the kernels take x (K, B, H, W, C) and w (K, O, C, 5, 5) of these shapes"""
    if len(x) != 5 or len(w) != 5 or x[0] != w[0] or w[3:] != (5, 5) or x[4] != w[2] or min(x) < 1:
        return False
    k, b, height, width, c = x
    outputs = w[1] in (16, 32, 64)
    channels = c in (16, 32, 64) or (c <= 5 and w[1] <= 32)
    return (
        outputs and channels and min(height, width) >= 4 and k <= 65535 and b * (height + 2) * (width + 2) * 64 < 2**31
    )


def narrow(w: Tensor) -> bool:
    return w.shape[2] < 16


def line(channels: int) -> int:
    """6C, rounded up to 16 or 32, sizes that a product supports"""
    return 16 if 6 * channels <= 16 else 32


def pooled(n: int) -> int:
    return (n - 2) // 2 + 1


def option(kernel: str, x: Tensor, precision: str) -> dict[str, Any]:
    """Tuned launch options of a kernel, and its precision"""
    name = "bf16" if x.dtype == torch.bfloat16 else precision
    return {"PRECISION": "ieee" if name == "fp32" else "tf32", **TUNED[kernel][name]}


def major(precision: str) -> bool:
    """True if the `major` backward kernels are faster in float32"""
    return precision == "tf32"


def arranged(w: Tensor) -> Tensor:
    """w (K, O, C, 5, 5) in the layout of the kernels: (K, 6, 4 O, LINE) if narrow, else (K, 25, O, C)"""
    k, o, c = w.shape[:3]
    if not narrow(w):
        return w.permute(0, 3, 4, 1, 2).contiguous()
    out = torch.empty(k, 6, 4 * o, line(c), dtype=w.dtype, device=w.device)
    conv_kernels.spread[(6, k)](w, out, C=c, O=o, LINE=line(c), BLOCK=4 * o * line(c))
    return out


def forward(x: Tensor, ready: Tensor, outputs: int, precision: str) -> tuple[Tensor, Tensor]:
    """max(0, conv of x), pooled, and the index of its candidate; `ready` are the weights from `arranged`

    (K, B, H2, W2, O) if narrow, for the next convolution, else (K, B, O, H2, W2), for a linear layer.
    """
    k, b, h, w, c = x.shape
    size = pooled(h), pooled(w)
    shape = (k, b, *size, outputs) if c < 16 else (k, b, outputs, *size)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    index = torch.empty(shape, dtype=torch.uint8, device=x.device)
    if c < 16:
        kernel, choice = conv_kernels.forward_narrow, option("forward_narrow", x, precision) | {"LINE": line(c)}
    else:
        kernel, choice = conv_kernels.forward_wide, option("forward_wide", x, precision)
    grid = (-(-b * size[0] * size[1] // choice["BLOCK"]), k)
    kernel[grid](x, ready, out, index, b, H=h, W=w, C=c, O=outputs, **choice)
    return out, index


def input_gradient(grad: Tensor, index: Tensor, ready: Tensor, shape: tuple[int, ...], precision: str) -> Tensor:
    """Gradient of x in float32; grad and index with the channels last"""
    k, b, h, w, c = shape
    o = grad.shape[4]
    out = torch.empty(shape, dtype=grad.dtype, device=grad.device)
    choice = option("input_wide", grad, precision)
    grid = (quads(shape, choice["BLOCK"]), k)
    if major(precision):
        large = expanded(grad, index, h, w, b * (h - 2) * (w - 2), first=False)
        conv_kernels.input_major[grid](large, ready.mT.contiguous(), out, b, H=h, W=w, C=c, O=o, **choice)
    else:
        conv_kernels.input_wide[grid](grad, index, ready, out, b, H=h, W=w, C=c, O=o, **choice)
    return out


def quads(shape: tuple[int, ...], block: int) -> int:
    """Blocks of 2x2 inputs"""
    return -(-shape[1] * ((shape[2] + 1) // 2) * ((shape[3] + 1) // 2) // block)


def unpooled(grad: Tensor, index: Tensor, h: int, w: int) -> Tensor:
    """Gradient of each conv position, from column -1 on: (K, B, H - 2, 2 W2, O); grad and index (K, B, O, H2, W2)"""
    k, b, o, _, w2 = grad.shape
    out = torch.empty(k, b, h - 2, 2 * w2, o, dtype=grad.dtype, device=grad.device)
    grid = (-(-b * pooled(h) * w2 // UNPOOL["BLOCK"]), k)
    conv_kernels.unpool[grid](grad, index, out, b, H=h, W=w, O=o, **UNPOOL)
    return out


def input_quad(large: Tensor, ready: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Gradient of x in bfloat16; `large` from `unpooled`"""
    k, b, h, w, c = shape
    out = torch.empty(shape, dtype=large.dtype, device=large.device)
    choice = TUNED["input_quad"]["bf16"]
    grid = (quads(shape, choice["BLOCK"]), k)
    conv_kernels.input_quad[grid](large, ready, out, b, H=h, W=w, C=c, O=large.shape[4], **choice)
    return out


def weight_quad(x: Tensor, large: Tensor) -> Tensor:
    """Gradient of w (K, O, C, 5, 5) in bfloat16, summed in float32 in a fixed order; `large` from `unpooled`"""
    k, b, h, w, c = x.shape
    o = large.shape[4]
    out = torch.empty(k, o, c, 5, 5, dtype=x.dtype, device=x.device)
    choice = TUNED["weight_quad"]["bf16"]
    split = choice["SPLIT"]
    part = torch.empty(k, split, 2 * o, 16, 2 * c, device=x.device)
    steps = -(-b * (h - 2) * pooled(w) // (choice["BLOCK"] * split))
    grid = (16 // choice["UNITS"] * split, k)
    conv_kernels.weight_quad[grid](x, large, part, b, H=h, W=w, C=c, O=o, STEPS=steps, **choice)
    conv_kernels.sum_quad[(o, k)](part, out, C=c, O=o, SPLIT=split)
    return out


def expanded(grad: Tensor, index: Tensor, h: int, w: int, length: int, *, first: bool) -> Tensor:
    """Gradient of each conv position, (K, O, length) or (K, length, O), 0 after the last"""
    k, b, o = len(grad), grad.shape[1], grad.shape[4]
    out = torch.empty((k, o, length) if first else (k, length, o), device=grad.device)
    grid = (-(-length // EXPAND["BLOCK"]), k)
    conv_kernels.expand[grid](grad, index, out, b, length, H=h, W=w, O=o, FIRST=first, **EXPAND)
    return out


def bordered(x: Tensor) -> Tensor:
    """x with a border of zeros and the channels first: (K, C, B (H + 2) (W + 2)), and then zeros to a multiple of 16"""
    k, b, h, w, c = x.shape
    length = -(-b * (h + 2) * (w + 2) // 16) * 16
    out = torch.empty(k, c, length, device=x.device)
    conv_kernels.border[(-(-length // BORDER["BLOCK"]), k)](x, out, b, length, H=h, W=w, C=c, **BORDER)
    return out


def weight_gradient(x: Tensor, grad: Tensor, index: Tensor, precision: str) -> Tensor:
    """Gradient of w (K, O, C, 5, 5), summed in float32 in a fixed order; grad and index with the channels last"""
    k, b, h, w, c = x.shape
    o = grad.shape[4]
    out = torch.empty(k, o, c, 5, 5, dtype=x.dtype, device=x.device)
    choice = option("weight_narrow" if c < 16 else "weight_wide", x, precision)
    split = choice["SPLIT"]
    positions = b * (pooled(h) * pooled(w) if c < 16 else (h - 2) * (w - 2))
    choice["STEPS"] = -(-positions // (choice["BLOCK"] * split))
    if c < 16:
        groups = -(-6 // choice["ROWS"])
        lines = groups * choice["ROWS"]
        part = torch.empty(k, split, 4 * o, lines, line(c), device=x.device)
        conv_kernels.weight_narrow[(groups * split, k)](
            x, grad, index, part, b, H=h, W=w, C=c, O=o, LINE=line(c), GROUPS=groups, **choice
        )
        block = 32 if c == 1 else 128
        conv_kernels.sum_narrow[(o, k)](part, out, C=c, O=o, LINE=line(c), LINES=lines, SPLIT=split, BLOCK=block)
        return out
    part = torch.empty(k, split, 7, o, 4, c, device=x.device)
    grid = (7 * split, k)
    if major(precision):
        length = split * choice["STEPS"] * choice["BLOCK"]
        near, large = bordered(x), expanded(grad, index, h, w, length, first=True)
        pitch = near.shape[2]
        conv_kernels.weight_major[grid](near, large, part, b, pitch, length, H=h, W=w, C=c, O=o, **choice)
    else:
        conv_kernels.weight_wide[grid](x, grad, index, part, b, H=h, W=w, C=c, O=o, **choice)
    conv_kernels.sum_wide[(o, k)](part, out, C=c, O=o, SPLIT=split)
    return out


class _ConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, precision: str) -> Tensor:
        if not fits(tuple(x.shape), tuple(w.shape)) or x.dtype != w.dtype or not x.is_contiguous():
            raise ValueError(
                f"conv_relu_pool: x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} do not fit the kernels"
            )
        ready = arranged(w.contiguous())
        out, index = forward(x, ready, w.shape[1], precision)
        ctx.save_for_backward(x, ready, index)
        ctx.precision = precision
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, ready, index = ctx.saved_tensors
        grad = grad.contiguous()
        dx = dw = None
        if x.shape[4] >= 16 and x.dtype == torch.bfloat16:
            large = unpooled(grad, index, *x.shape[2:4])
            dx = input_quad(large, ready, tuple(x.shape)) if ctx.needs_input_grad[0] else None
            dw = weight_quad(x, large) if ctx.needs_input_grad[1] else None
            return dx, dw, None
        if x.shape[4] >= 16:
            grad, index = (t.movedim(2, 4).contiguous() for t in (grad, index))
        if ctx.needs_input_grad[0]:
            if x.shape[4] < 16:
                raise NotImplementedError("conv_relu_pool: no gradient for inputs of fewer than 16 channels")
            dx = input_gradient(grad, index, ready, tuple(x.shape), ctx.precision)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(x, grad, index, ctx.precision)
        return dx, dw, None


def conv_relu_pool(x: Tensor, w: Tensor, precision: str = "tf32") -> Tensor:
    """maxpool(relu(conv(x[k], w[k]))): conv 5x5 pad 1, pool 2x2 pad 1; of equal candidates the first gets the gradient.

    x (K, B, H, W, C) and w (K, O, C, 5, 5), both bfloat16 or both float32, and then precision is "fp32" or "tf32";
    the sums are float32. Returns (K, B, H2, W2, O) if C < 16, else (K, B, O, H2, W2), in x's dtype. `fits` is true for
    the supported shapes.
    """
    return cast(Tensor, _ConvReluPool.apply(x, w, precision))  # type: ignore[no-untyped-call]


class _FramedConvReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, size: tuple[int, int]) -> Tensor:
        if not fits_framed(tuple(x.shape), tuple(w.shape), size) or {x.dtype, w.dtype} != {torch.bfloat16}:
            raise ValueError(
                f"framed_conv_relu_pool: x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} do not fit the "
                f"kernels for images of {size[0]}x{size[1]}"
            )
        k, o, c = w.shape[:3]
        ready = torch.empty(k, 2 * o, 128, dtype=w.dtype, device=w.device)
        conv_kernels.spread_framed[(k,)](w.contiguous(), ready, C=c, O=o)
        out, index = forward_framed(x, ready, size)
        ctx.save_for_backward(x, index)
        ctx.size, ctx.channels = size, c
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        x, index = ctx.saved_tensors
        dw = weight_framed(x, grad.contiguous(), index, ctx.size, ctx.channels) if ctx.needs_input_grad[1] else None
        return None, dw, None


def fits_framed(x: tuple[int, ...], w: tuple[int, ...], size: tuple[int, int]) -> bool:
    """True if the kernels take images of this size with a frame, x (K, B, *framed), and w (K, O, C, 5, 5)"""
    return (
        len(x) == len(w) == 5
        and x[2:] == kernels.framed(*size)
        and w[2] <= 4
        and fits((x[0], x[1], *size, w[2]), w)
        and x[1] * x[2] * x[3] * x[4] < 2**31
    )


def forward_framed(x: Tensor, ready: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Outputs and the index of their candidate (K, B, H2, W2, O); `ready` are the weights from `spread_framed`"""
    k, b, _, width, _ = x.shape
    o = ready.shape[1] // 2
    shape = (k, b, pooled(size[0]), pooled(size[1]), o)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    index = torch.empty(shape, dtype=torch.uint8, device=x.device)
    choice = TUNED["forward_framed"]["bf16"]
    grid = (-(-b * shape[2] * shape[3] // (choice["BLOCK"] * choice["STEPS"])), k)
    conv_kernels.forward_framed[grid](x, ready, out, index, b, H=size[0], W=size[1], WF=width, O=o, **choice)
    return out, index


def weight_framed(x: Tensor, grad: Tensor, index: Tensor, size: tuple[int, int], channels: int) -> Tensor:
    """Gradient of w (K, O, C, 5, 5), summed in float32 in a fixed order"""
    k, b, height, width, o = grad.shape
    choice = TUNED["weight_framed"]["bf16"]
    split = choice["SPLIT"]
    part = torch.empty(k, split, 2 * o, 128, device=x.device)
    steps = -(-b * height * width // (choice["BLOCK"] * split))
    conv_kernels.weight_framed[(split, k)](
        x, grad, index, part, b, H=size[0], W=size[1], WF=x.shape[3], O=o, STEPS=steps, **choice
    )
    out = torch.empty(k, o, channels, 5, 5, dtype=x.dtype, device=x.device)
    conv_kernels.sum_framed[(o, k)](part, out, C=channels, O=o, SPLIT=split, num_warps=1)
    return out


def framed_conv_relu_pool(x: Tensor, w: Tensor, size: tuple[int, int]) -> Tensor:
    """`conv_relu_pool` for images of this size with a frame (K, B, *framed) from `kernels.images`, in bfloat16."""
    return cast(Tensor, _FramedConvReluPool.apply(x, w, size))  # type: ignore[no-untyped-call]
