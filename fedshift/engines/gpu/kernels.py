"""Triton kernels for stacked clients of any model: the SGD step, also with the backward pass of a linear layer, and the
images of a batch.

All tensors have the clients on their first axis. The module can be imported without Triton; `AVAILABLE` is then False.
Kernels use no atomic additions, so that equal inputs give equal bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803 - constants of a kernel are in capitals

from __future__ import annotations

from typing import Any, NamedTuple

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
LINEAR_SGD = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
LINEAR_SGD_PAIR = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1}
IMAGES = {"BLOCK": 8192, "num_warps": 8}
LARGEST_BATCH = 128  # examples per client that `linear_sgd` supports


@jit
def _sgd(
    w,
    v,
    g,
    shadow,
    pull,
    offset,
    lr,
    momentum,
    n,
    SHADOW: tl.constexpr,
    PULL: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    client = tl.program_id(1)
    rate = tl.load(lr + client)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    first = client.to(tl.int64) * n
    old = tl.load(w + first + at, mask=inside)
    slope = tl.load(g + first + at, mask=inside).to(tl.float32)
    if PULL:
        slope += tl.load(pull + client) * old
    if OFFSET:
        slope += tl.load(offset + first + at, mask=inside)
    speed = momentum * tl.load(v + first + at, mask=inside) + slope
    new = tl.where(rate == 0.0, old, old - rate * speed)
    tl.store(v + first + at, speed, mask=inside)
    tl.store(w + first + at, new, mask=inside)
    if SHADOW:
        tl.store(shadow + first + at, new.to(tl.bfloat16), mask=inside)


def sgd(
    w: Tensor,
    v: Tensor,
    g: Tensor,
    lr: Tensor,
    momentum: float,
    shadow: Tensor | None = None,
    pull: Tensor | None = None,
    offset: Tensor | None = None,
) -> None:
    """v = momentum v + (g + pull[k] w + offset);  w = w - lr[k] v;  shadow = bfloat16(w); in place.

    w, v float32 (K, ...), g float32 or bfloat16 and offset float32 of that shape, lr and pull float32 (K,). If lr[k] is
    0, the bits of w[k] do not change for any v.
    """
    _check_shapes("sgd", w, v=v, g=g, shadow=shadow, offset=offset)
    n = w[0].numel()
    grid = (-(-n // SGD["BLOCK"]), len(w))
    _sgd[grid](
        w,
        v,
        g,
        w if shadow is None else shadow,
        lr if pull is None else pull,
        w if offset is None else offset,
        lr,
        momentum,
        n,
        SHADOW=shadow is not None,
        PULL=pull is not None,
        OFFSET=offset is not None,
        **SGD,
    )


class Product(NamedTuple):
    """Product y = x w^T of K clients at which a forward pass is cut: later layers see y as a leaf."""

    x: Tensor  # (K, B, n), in the graph of the layers before
    y: Tensor  # (K, B, m), a leaf that requires a gradient


class Held(NamedTuple):
    """Gradient dy^T x of a step that the stored weights and velocity do not contain yet."""

    x: Tensor  # (K, B, n)
    dy: Tensor  # (K, B, m)
    lr: Tensor  # (K,) of its step


@jit
def _linear_sgd(
    x,  # (K, B, N)
    dy,  # (K, B, M)
    w,  # (K, M, N)
    v,
    shadow,
    dx,  # (K, B, N)
    pull,
    offset,
    lr,
    momentum,
    B,
    M,
    N,
    BATCH: tl.constexpr,
    STEPS: tl.constexpr,
    PULL: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Columns of w; every weight is read once, for the gradient of the inputs and for its own step"""
    client = tl.program_id(1).to(tl.int64)
    rate = tl.load(lr + client)
    b, m = tl.arange(0, BATCH), tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x += client * B * N
    dx += client * B * N
    dy += client * B * M
    w += client * M * N
    v += client * M * N
    shadow += client * M * N
    offset += client * M * N
    inputs = b[:, None] * N + n[None, :]
    held = (b < B)[:, None] & (n < N)[None, :]
    near = tl.load(x + inputs, mask=held, other=0.0)
    back = tl.zeros((BATCH, BLOCK_N), tl.float32)
    for step in range(STEPS):
        row = step * BLOCK_M + m
        at = row[:, None] * N + n[None, :]
        inside = (row < M)[:, None] & (n < N)[None, :]
        old = tl.load(w + at, mask=inside, other=0.0)
        speed = tl.load(v + at, mask=inside, other=0.0)
        slope = tl.load(dy + b[:, None] * M + row[None, :], mask=(b < B)[:, None] & (row < M)[None, :], other=0.0)
        back = tl.dot(slope, old.to(slope.dtype), back)
        g = tl.dot(tl.trans(slope), near)
        if PULL:
            g += tl.load(pull + client) * old
        if OFFSET:
            g += tl.load(offset + at, mask=inside, other=0.0)
        speed = momentum * speed + g
        new = tl.where(rate == 0.0, old, old - rate * speed)
        tl.store(v + at, speed, mask=inside)
        tl.store(w + at, new, mask=inside)
        tl.store(shadow + at, new.to(tl.bfloat16), mask=inside)
    tl.store(dx + inputs, back.to(dx.dtype.element_ty), mask=held)


def linear_sgd(
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    v: Tensor,
    shadow: Tensor,
    lr: Tensor,
    momentum: float,
    pull: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Backward pass of y = x shadow^T and the step of its weights: dx = dy shadow, and `sgd` with g = dy^T x.

    x (K, B, n), dy (K, B, m) and shadow (K, m, n) bfloat16, w and v float32; shadow must be bfloat16(w), and B at most
    LARGEST_BATCH. g is float32 and never stored. Returns dx (K, B, n) for the weights before the step.
    """
    (k, b, n), m = x.shape, dy.shape[2]
    if dy.shape[:2] != (k, b) or w.shape != (k, m, n) or b > LARGEST_BATCH:
        raise ValueError(
            f"linear_sgd: x {tuple(x.shape)}, dy {tuple(dy.shape)} and w {tuple(w.shape)} do not fit, "
            f"or more than {LARGEST_BATCH} examples per client"
        )
    _check_shapes("linear_sgd", w, v=v, shadow=shadow, offset=offset)
    dx = torch.empty(k, b, n, dtype=x.dtype, device=x.device)
    _linear_sgd[(-(-n // LINEAR_SGD["BLOCK_N"]), k)](
        x.contiguous(),
        dy.contiguous(),
        w,
        v,
        shadow,
        dx,
        lr if pull is None else pull,
        w if offset is None else offset,
        lr,
        momentum,
        b,
        m,
        n,
        BATCH=64 if b <= 64 else 128,
        STEPS=-(-m // LINEAR_SGD["BLOCK_M"]),
        PULL=pull is not None,
        OFFSET=offset is not None,
        **LINEAR_SGD,
    )
    return dx


@jit
def _linear_sgd_pair(
    first_x,  # (K, B, N)
    first_dy,  # (K, B, M)
    x,
    dy,
    w,  # (K, M, N)
    v,
    shadow,
    ahead,
    dx,  # (K, B, N)
    pull,
    offset,
    first_lr,
    lr,
    next_lr,
    momentum,
    B,
    M,
    N,
    BATCH: tl.constexpr,
    STEPS: tl.constexpr,
    PULL: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Columns of w, as in `_linear_sgd`"""
    client = tl.program_id(1).to(tl.int64)
    first_rate, rate, next_rate = tl.load(first_lr + client), tl.load(lr + client), tl.load(next_lr + client)
    b, m = tl.arange(0, BATCH), tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_x += client * B * N
    x += client * B * N
    dx += client * B * N
    first_dy += client * B * M
    dy += client * B * M
    w += client * M * N
    v += client * M * N
    shadow += client * M * N
    ahead += client * M * N
    offset += client * M * N
    inputs = b[:, None] * N + n[None, :]
    held = (b < B)[:, None] & (n < N)[None, :]
    first_near = tl.load(first_x + inputs, mask=held, other=0.0)
    near = tl.load(x + inputs, mask=held, other=0.0)
    back = tl.zeros((BATCH, BLOCK_N), tl.float32)
    for step in range(STEPS):
        row = step * BLOCK_M + m
        at = row[:, None] * N + n[None, :]
        inside = (row < M)[:, None] & (n < N)[None, :]
        old = tl.load(w + at, mask=inside, other=0.0)
        speed = tl.load(v + at, mask=inside, other=0.0)
        slopes = b[:, None] * M + row[None, :]
        seen = (b < B)[:, None] & (row < M)[None, :]
        first_slope = tl.load(first_dy + slopes, mask=seen, other=0.0)
        slope = tl.load(dy + slopes, mask=seen, other=0.0)
        g = tl.dot(tl.trans(first_slope), first_near)
        if PULL:
            g += tl.load(pull + client) * old
        if OFFSET:
            g += tl.load(offset + at, mask=inside, other=0.0)
        speed = momentum * speed + g
        old = tl.where(first_rate == 0.0, old, old - first_rate * speed)
        back = tl.dot(slope, old.to(slope.dtype), back)
        g = tl.dot(tl.trans(slope), near)
        if PULL:
            g += tl.load(pull + client) * old
        if OFFSET:
            g += tl.load(offset + at, mask=inside, other=0.0)
        speed = momentum * speed + g
        new = tl.where(rate == 0.0, old, old - rate * speed)
        tl.store(v + at, speed, mask=inside)
        tl.store(w + at, new, mask=inside)
        tl.store(shadow + at, new.to(tl.bfloat16), mask=inside)
        known = momentum * speed
        if PULL:
            known += tl.load(pull + client) * new
        if OFFSET:
            known += tl.load(offset + at, mask=inside, other=0.0)
        later = tl.where(next_rate == 0.0, new, new - next_rate * known)
        tl.store(ahead + at, later.to(tl.bfloat16), mask=inside)
    tl.store(dx + inputs, back.to(dx.dtype.element_ty), mask=held)


def linear_sgd_pair(
    first: Held,
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    v: Tensor,
    shadow: Tensor,
    ahead: Tensor,
    lr: Tensor,
    next_lr: Tensor,
    momentum: float,
    pull: Tensor | None = None,
    offset: Tensor | None = None,
) -> Tensor:
    """Two steps of `linear_sgd`, that of `first` and that of x and dy, which read and write w and v once.

    ahead becomes what `look_ahead` returns for the step after them. Returns dx = dy bfloat16(w) for the weights between
    the two steps.
    """
    (k, b, n), m = x.shape, dy.shape[2]
    if not x.shape == first.x.shape or not dy.shape == first.dy.shape or w.shape != (k, m, n) or b > LARGEST_BATCH:
        raise ValueError(
            f"linear_sgd_pair: x {tuple(x.shape)}, dy {tuple(dy.shape)} and w {tuple(w.shape)} do not fit, "
            f"or more than {LARGEST_BATCH} examples per client"
        )
    _check_shapes("linear_sgd_pair", w, v=v, shadow=shadow, ahead=ahead, offset=offset)
    dx = torch.empty(k, b, n, dtype=x.dtype, device=x.device)
    _linear_sgd_pair[(-(-n // LINEAR_SGD_PAIR["BLOCK_N"]), k)](
        first.x.contiguous(),
        first.dy.contiguous(),
        x.contiguous(),
        dy.contiguous(),
        w,
        v,
        shadow,
        ahead,
        dx,
        lr if pull is None else pull,
        w if offset is None else offset,
        first.lr,
        lr,
        next_lr,
        momentum,
        b,
        m,
        n,
        BATCH=64 if b <= 64 else 128,
        STEPS=-(-m // LINEAR_SGD_PAIR["BLOCK_M"]),
        PULL=pull is not None,
        OFFSET=offset is not None,
        **LINEAR_SGD_PAIR,
    )
    return dx


@jit
def _look_ahead(
    w, v, out, pull, offset, lr, momentum, n, PULL: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):
    client = tl.program_id(1)
    rate = tl.load(lr + client)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = client.to(tl.int64) * n
    old = tl.load(w + first + at, mask=at < n)
    known = momentum * tl.load(v + first + at, mask=at < n)
    if PULL:
        known += tl.load(pull + client) * old
    if OFFSET:
        known += tl.load(offset + first + at, mask=at < n)
    new = tl.where(rate == 0.0, old, old - rate * known)
    tl.store(out + first + at, new.to(tl.bfloat16), mask=at < n)


def look_ahead(
    w: Tensor,
    v: Tensor,
    lr: Tensor,
    momentum: float,
    out: Tensor,
    pull: Tensor | None = None,
    offset: Tensor | None = None,
) -> None:
    """out = bfloat16(w - lr[k] (momentum v + pull[k] w + offset)): the weights after a step whose gradient is 0."""
    _check_shapes("look_ahead", w, v=v, out=out, offset=offset)
    n = w[0].numel()
    grid = (-(-n // SGD["BLOCK"]), len(w))
    added = lr if pull is None else pull, w if offset is None else offset
    flags = {"PULL": pull is not None, "OFFSET": offset is not None}
    _look_ahead[grid](w, v, out, *added, lr, momentum, n, **flags, **SGD)


def _check_shapes(kernel: str, w: Tensor, **others: Tensor | None) -> None:
    for name, x in {"w": w, **others}.items():
        if x is not None and (x.shape != w.shape or not x.is_contiguous()):
            raise ValueError(
                f"{kernel}: {name} must be contiguous and of w's shape {tuple(w.shape)}, got {tuple(x.shape)}"
            )


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
    CF: tl.constexpr,
    HF: tl.constexpr,
    WF: tl.constexpr,
    FRAME: tl.constexpr,
    MOVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of the output: (h, w, c)
    c, column, row = at % CF, at // CF % WF - FRAME, at // (CF * WF) - FRAME
    inner = (c < C) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    if MOVED:
        dy = tl.load(offsets + 3 * image)
        dx = tl.load(offsets + 3 * image + 1)
        flip = tl.load(offsets + 3 * image + 2)
        row += dy
        column = tl.where(flip != 0, W - 1 - column, column) + dx
    seen = inner & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    source = x + tl.load(index + image) * (C * H * W)
    value = tl.load(source + (c * H + row) * W + column, mask=seen, other=0).to(tl.int32)
    value = tl.load(table + c * 256 + value, mask=inner, other=0.0)
    tl.store(out + image * (HF * WF * CF) + at, value, mask=at < HF * WF * CF)


def images(x: Tensor, index: Tensor, offsets: Tensor | None, table: Tensor, frame: bool = False) -> Tensor:
    """out[k, b, h, w, c] = table[c, x[index[k, b], c, h + dy, w' + dx]], w' = W - 1 - w if flipped; black outside.

    x uint8 (N, C, H, W), index int64 (K, B), offsets int32 (K, B, 3) = (dy, dx, flip) or None, table (C, 256) from
    `levels`, in the dtype of the output. out (K, B, H, W, C), or with a frame of zeros (K, B, *framed(H, W)), in which
    the image begins at row and column 2.
    """
    c, h, w = x.shape[1:]
    height, width, channels = framed(h, w) if frame else (h, w, c)
    out = torch.empty(*index.shape, height, width, channels, dtype=table.dtype, device=x.device)
    grid = (index.numel(), -(-height * width * channels // IMAGES["BLOCK"]))
    _images[grid](
        x.contiguous(),
        index.contiguous(),
        index if offsets is None else offsets.contiguous(),
        table.contiguous(),
        out,
        C=c,
        H=h,
        W=w,
        CF=channels,
        HF=height,
        WF=width,
        FRAME=2 if frame else 0,
        MOVED=offsets is not None,
        **IMAGES,
    )
    return out


def framed(h: int, w: int) -> tuple[int, int, int]:
    """Height, width and channels of an image with its frame: in bfloat16, pairs of pixels begin at 16 bytes"""
    return h + 5, (w + 5) // 2 * 2, 4


def levels(data: Dataset, dtype: torch.dtype) -> Tensor:
    """Input of a model for each of the 256 values of a channel: (C, 256)"""
    values = torch.arange(256, dtype=torch.uint8, device=data.x.device).view(1, 256, 1)
    return data.inputs(values.expand(data.shape[0], 256, 1))[..., 0].to(dtype).contiguous()
