"""Triton kernels for stacked clients of any model: the SGD step and the images of a batch.

All tensors have the clients on their first axis. The module can be imported without Triton; `AVAILABLE` is then False.
Kernels use no atomic additions, so that equal inputs give equal bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803 - constants of a kernel are in capitals

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedshift.data.datasets import Dataset

try:
    import triton
    import triton.language as tl

    AVAILABLE = True
    jit: Any = triton.jit
except ImportError:
    AVAILABLE = False

    def jit(kernel: Any) -> Any:
        return kernel


# launch options
SGD = {"BLOCK": 2048, "num_warps": 4}
IMAGES = {"BLOCK": 1024, "num_warps": 4}


@jit
def _sgd(w, v, g, shadow, lr, momentum, n, SHADOW: tl.constexpr, BLOCK: tl.constexpr):
    client = tl.program_id(1)
    rate = tl.load(lr + client)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    first = client.to(tl.int64) * n
    old = tl.load(w + first + at, mask=inside)
    speed = momentum * tl.load(v + first + at, mask=inside) + tl.load(g + first + at, mask=inside).to(tl.float32)
    new = tl.where(rate == 0.0, old, old - rate * speed)
    tl.store(v + first + at, speed, mask=inside)
    tl.store(w + first + at, new, mask=inside)
    if SHADOW:
        tl.store(shadow + first + at, new.to(tl.bfloat16), mask=inside)


def sgd(w: Tensor, v: Tensor, g: Tensor, lr: Tensor, momentum: float, shadow: Tensor | None = None) -> None:
    """v = momentum v + g;  w = w - lr[k] v;  shadow = bfloat16(w); in place.

    w, v float32 (K, ...), g float32 or bfloat16 of that shape, lr float32 (K,). If lr[k] is 0, the bits of w[k] do not
    change for any v.
    """
    for name, x in (("w", w), ("v", v), ("g", g), ("shadow", w if shadow is None else shadow)):
        if x.shape != w.shape or not x.is_contiguous():
            raise ValueError(f"sgd: {name} must be contiguous and of w's shape {tuple(w.shape)}, got {tuple(x.shape)}")
    n = w[0].numel()
    grid = (-(-n // SGD["BLOCK"]), len(w))
    _sgd[grid](w, v, g, w if shadow is None else shadow, lr, momentum, n, SHADOW=shadow is not None, **SGD)


@jit
def _images(
    x,
    index,
    offsets,
    table,
    out,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    MOVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of the output: (h, w, c)
    inside = at < H * W * C
    c, column, row = at % C, at // C % W, at // (C * W)
    if MOVED:
        dy = tl.load(offsets + 3 * image)
        dx = tl.load(offsets + 3 * image + 1)
        flip = tl.load(offsets + 3 * image + 2)
        row += dy
        column = tl.where(flip != 0, W - 1 - column, column) + dx
    seen = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    source = x + tl.load(index + image) * (C * H * W)
    value = tl.load(source + (c * H + row) * W + column, mask=seen, other=0).to(tl.int32)
    tl.store(out + image * (H * W * C) + at, tl.load(table + c * 256 + value, mask=inside), mask=inside)


def images(x: Tensor, index: Tensor, offsets: Tensor | None, table: Tensor) -> Tensor:
    """out[k, b, h, w, c] = table[c, x[index[k, b], c, h + dy, w' + dx]], w' = W - 1 - w if flipped; black outside.

    x uint8 (N, C, H, W), index int64 (K, B), offsets int32 (K, B, 3) = (dy, dx, flip) or None, table (C, 256) from
    `levels`, in the dtype of the output. out (K, B, H, W, C).
    """
    c, h, w = x.shape[1:]
    out = torch.empty(*index.shape, h, w, c, dtype=table.dtype, device=x.device)
    grid = (index.numel(), -(-h * w * c // IMAGES["BLOCK"]))
    moved = offsets is not None
    places = offsets.contiguous() if offsets is not None else index
    _images[grid](
        x.contiguous(), index.contiguous(), places, table.contiguous(), out, C=c, H=h, W=w, MOVED=moved, **IMAGES
    )
    return out


def levels(data: Dataset, dtype: torch.dtype) -> Tensor:
    """Input of a model for each of the 256 values of a channel: (C, 256)"""
    values = torch.arange(256, dtype=torch.uint8, device=data.x.device).view(1, 256, 1)
    return data.inputs(values.expand(data.shape[0], 256, 1))[..., 0].to(dtype).contiguous()
