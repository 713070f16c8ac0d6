"""conv 5x5 pad 1, ReLU, maxpool 2x2 pad 1 as one Triton kernel for many clients, each with its own weights.

Pooled position (p, q) looks at conv positions (2p - 1 + dy, 2q - 1 + dx), dy and dx 0 or 1: its four candidates, which
see a window of 6x6 inputs that begins at (2p - 2, 2q - 2). Channels are last. Few channels, C < 16 (`narrow`): a row of
the window is 6C numbers in sequence, multiplied by weights that hold all four candidates, with zeros where one does not
reach. Many (`wide`): a product of C numbers for each of the 25 taps. The backward pass expands the pooled gradient as
it reads it: candidate i gets g where index == i.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, E741 - constants of a kernel are in capitals

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fedshift.engines.kernels import AVAILABLE, TUNED, jit

if AVAILABLE:
    import triton.language as tl


@jit
def _best(first, second, third, fourth, py, px, HC: tl.constexpr, WC: tl.constexpr):
    """max(0, candidates), and which it was: the first of equals, 4 for none. NaN wins, as it does in torch."""
    up, down, left, right = py > 0, 2 * py < HC, px > 0, 2 * px < WC
    best = tl.zeros_like(first)
    which = tl.full(first.shape, 4, tl.int32)
    take = ((first > best) | (first != first)) & (up & left)
    best, which = tl.where(take, first, best), tl.where(take, 0, which)
    take = ((second > best) | (second != second)) & (up & right)
    best, which = tl.where(take, second, best), tl.where(take, 1, which)
    take = ((third > best) | (third != third)) & (down & left)
    best, which = tl.where(take, third, best), tl.where(take, 2, which)
    take = ((fourth > best) | (fourth != fourth)) & (down & right)
    return tl.where(take, fourth, best), tl.where(take, 3, which).to(tl.uint8)


@jit
def _tap(x, w, inside, top, left, at, tap, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr):
    """The inputs (positions, C) under a tap of the kernel, and its weights (O, C)"""
    row, column = top + tap // 5, left + tap % 5
    seen = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    near = at + (tap // 5 * W + tap % 5) * C
    c, o = tl.arange(0, C), tl.arange(0, O)
    tile = tl.load(x + near[:, None] + c[None, :], mask=seen[:, None], other=0.0)
    return tile, tl.load(w + tap * (O * C) + o[:, None] * C + c[None, :])


@jit
def _forward_wide(
    x,  # (K, B, H, W, C)
    w,  # (K, 25, O, C)
    out,  # (K, B, H2, W2, O)
    index,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    client = tl.program_id(1).to(tl.int64)
    x += client * B * (H * W * C)
    w += client * (25 * O * C)
    n = tl.arange(0, 4 * BLOCK)  # (candidate, pooled position)
    p = tl.program_id(0) * BLOCK + n % BLOCK
    b, py, px = p // (H2 * W2), p // W2 % H2, p % W2
    top = 2 * py - 2 + n // (2 * BLOCK)
    left = 2 * px - 2 + n // BLOCK % 2
    at = ((b * H + top) * W + left) * C
    o = tl.arange(0, O)
    total = tl.zeros((O, 4 * BLOCK), tl.float32)
    if AHEAD:  # read a tap's numbers while the one before is multiplied
        tile, weight = _tap(x, w, b < B, top, left, at, 0, H, W, C, O)
        for tap in range(25):
            next_tile, next_weight = _tap(x, w, b < B, top, left, at, (tap + 1) % 25, H, W, C, O)
            total = tl.dot(weight, tl.trans(tile), total, input_precision=PRECISION)
            tile, weight = next_tile, next_weight
    else:
        for tap in range(25):
            tile, weight = _tap(x, w, b < B, top, left, at, tap, H, W, C, O)
            total = tl.dot(weight, tl.trans(tile), total, input_precision=PRECISION)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    py, px = (p // W2 % H2)[None, :], (p % W2)[None, :]
    pairs = tl.permute(tl.reshape(total, (O, 2, 2, BLOCK)), (0, 3, 1, 2))  # (O, BLOCK, dy, dx)
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    best, which = _best(first, second, third, fourth, py, px, H - 2, W - 2)
    to = client * B * (H2 * W2 * O) + p[None, :] * O + o[:, None]
    inside = (p < B * (H2 * W2))[None, :]
    tl.store(out + to, best.to(out.dtype.element_ty), mask=inside)
    tl.store(index + to, which, mask=inside)


@jit
def _forward_narrow(
    x,  # (K, B, H, W, C)
    w,  # (K, 6, 4 O, LINE)
    out,  # (K, B, H2, W2, O)
    index,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    LINE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    client = tl.program_id(1).to(tl.int64)
    x += client * B * (H * W * C)
    w += client * (24 * O * LINE)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, py, px = p // (H2 * W2), p // W2 % H2, p % W2
    top, left = 2 * py - 2, (px - 1) * (2 * C)
    j, n = tl.arange(0, LINE), tl.arange(0, 4 * O)  # of the window's row; (candidate, output channel)
    at = (b * H + top) * (W * C) + left
    e = left[:, None] + j[None, :]
    reach = (b < B)[:, None] & (j < 6 * C)[None, :] & (e >= 0) & (e < W * C)
    total = tl.zeros((BLOCK, 4 * O), tl.float32)
    for u in range(6):
        seen = reach & ((top + u >= 0) & (top + u < H))[:, None]
        tile = tl.load(x + (at + u * (W * C))[:, None] + j[None, :], mask=seen, other=0.0)
        weight = tl.load(w + u * (4 * O * LINE) + n[:, None] * LINE + j[None, :])
        total = tl.dot(tile, tl.trans(weight), total, input_precision=PRECISION)
    pairs = tl.permute(tl.reshape(total, (BLOCK, 2, 2, O)), (0, 3, 1, 2))  # (BLOCK, O, dy, dx)
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    best, which = _best(first, second, third, fourth, py[:, None], px[:, None], H - 2, W - 2)
    to = client * B * (H2 * W2 * O) + p[:, None] * O + tl.arange(0, O)[None, :]
    inside = (b < B)[:, None]
    tl.store(out + to, best.to(out.dtype.element_ty), mask=inside)
    tl.store(index + to, which, mask=inside)


@jit
def _input_wide(
    grad,  # (K, B, H2, W2, O)
    index,
    w,  # (K, 25, O, C)
    out,  # (K, B, H, W, C)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inputs (2a + ry, 2d + rx), ry and rx 0 or 1, were seen by pooled (a + 1 - oy, d + 1 - ox), oy and ox 0, 1, 2"""
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    HA: tl.constexpr = (H + 1) // 2
    WA: tl.constexpr = (W + 1) // 2
    client = tl.program_id(1).to(tl.int64)
    grad += client * B * (H2 * W2 * O)
    index += client * B * (H2 * W2 * O)
    w += client * (25 * O * C)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, a, d = p // (HA * WA), p // WA % HA, p % WA
    n, o = tl.arange(0, 4 * C), tl.arange(0, O)
    ry, rx, c = n // (2 * C), n // C % 2, n % C
    total = tl.zeros((BLOCK, 4 * C), tl.float32)
    for off in range(9):
        oy, ox = off // 3, off % 3
        py, px = a + 1 - oy, d + 1 - ox
        inside = (b < B) & (py >= 0) & (py < H2) & (px >= 0) & (px < W2)
        at = (((b * H2 + py) * W2 + px) * O)[:, None] + o[None, :]
        g = tl.load(grad + at, mask=inside[:, None], other=0.0)
        which = tl.load(index + at, mask=inside[:, None], other=4).to(tl.int32)
        for candidate in tl.static_range(4):
            ky, kx = 2 * oy + ry - candidate // 2, 2 * ox + rx - candidate % 2
            reach = (ky >= 0) & (ky < 5) & (kx >= 0) & (kx < 5)
            weight = tl.load(
                w + ((ky * 5 + kx) * (O * C) + c)[None, :] + o[:, None] * C, mask=reach[None, :], other=0.0
            )
            part = tl.where(which == candidate, g, 0.0).to(g.dtype)
            total = tl.dot(part, weight, total, input_precision=PRECISION)
    row, column = (2 * a)[:, None] + ry[None, :], (2 * d)[:, None] + rx[None, :]
    to = client * B * (H * W * C) + ((b[:, None] * H + row) * W + column) * C + c[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(b < B)[:, None] & (row < H) & (column < W))


@jit
def _weight_wide(
    x,  # (K, B, H, W, C)
    grad,  # (K, B, H2, W2, O)
    index,
    part,  # (K, SPLIT, 7, O, 4, C)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Four of the 25 taps; one product a step, because two that share an operand in registers were seen to go wrong."""
    HC: tl.constexpr = H - 2
    WC: tl.constexpr = W - 2
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    split, four = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    client = tl.program_id(1).to(tl.int64)
    x += client * B * (H * W * C)
    grad += client * B * (H2 * W2 * O)
    index += client * B * (H2 * W2 * O)
    o, n = tl.arange(0, O), tl.arange(0, 4 * C)
    tap, c = four * 4 + n // C, n % C
    ky, kx = tap // 5, tap % 5
    total = tl.zeros((O, 4 * C), tl.float32)
    for block in range(STEPS):
        r = (split * STEPS + block) * BLOCK + tl.arange(0, BLOCK)  # conv positions
        b, i, j = r // (HC * WC), r // WC % HC, r % WC
        py, px = (i + 1) // 2, (j + 1) // 2
        at = (((b * H2 + py) * W2 + px) * O)[:, None] + o[None, :]
        g = tl.load(grad + at, mask=(b < B)[:, None], other=0.0)
        which = tl.load(index + at, mask=(b < B)[:, None], other=4).to(tl.int32)
        candidate = (i + 1) % 2 * 2 + (j + 1) % 2
        g = tl.trans(tl.where(which == candidate[:, None], g, 0.0).to(g.dtype))
        row, column = (i - 1)[:, None] + ky[None, :], (j - 1)[:, None] + kx[None, :]
        reach = (b < B)[:, None] & (tap < 25)[None, :] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        tile = tl.load(x + ((b[:, None] * H + row) * W + column) * C + c[None, :], mask=reach, other=0.0)
        total = tl.dot(g, tile, total, input_precision=PRECISION)
    part += ((client * SPLIT + split) * 7 + four) * (O * 4 * C)
    tl.store(part + o[:, None] * (4 * C) + n[None, :], total)


@jit
def _sum_wide(part, out, C: tl.constexpr, O: tl.constexpr, SPLIT: tl.constexpr):
    """out[k, o, c, tap] = sum over the split of part[k, s, tap // 4, o, tap % 4, c]"""
    o, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tap, c = tl.arange(0, 32), tl.arange(0, C)
    at = (tap // 4 * O + o) * (4 * C) + tap % 4 * C
    total = tl.zeros((32, C), tl.float32)
    for s in range(SPLIT):
        first = part + (client * SPLIT + s) * (28 * O * C)
        total += tl.load(first + at[:, None] + c[None, :], mask=(tap < 25)[:, None], other=0.0)
    to = (client * O + o) * (25 * C) + tap[:, None] + c[None, :] * 25
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(tap < 25)[:, None])


@jit
def _weight_narrow(
    x,  # (K, B, H, W, C)
    grad,  # (K, B, H2, W2, O)
    index,
    part,  # (K, SPLIT, 4 O, LINES, LINE)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    LINE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    split, group = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    client = tl.program_id(1).to(tl.int64)
    x += client * B * (H * W * C)
    grad += client * B * (H2 * W2 * O)
    index += client * B * (H2 * W2 * O)
    m, n = tl.arange(0, 4 * O), tl.arange(0, ROWS * LINE)
    o, candidate = m % O, m // O
    u, j = group * ROWS + n // LINE, n % LINE
    total = tl.zeros((4 * O, ROWS * LINE), tl.float32)
    for block in range(STEPS):
        p = (split * STEPS + block) * BLOCK + tl.arange(0, BLOCK)
        b, py, px = p // (H2 * W2), p // W2 % H2, p % W2
        at = (p * O)[:, None] + o[None, :]
        g = tl.load(grad + at, mask=(b < B)[:, None], other=0.0)
        which = tl.load(index + at, mask=(b < B)[:, None], other=4).to(tl.int32)
        g = tl.trans(tl.where(which == candidate[None, :], g, 0.0).to(g.dtype))
        top, left = 2 * py - 2, (px - 1) * (2 * C)
        row, e = top[:, None] + u[None, :], left[:, None] + j[None, :]
        reach = (b < B)[:, None] & (row >= 0) & (row < H) & ((j < 6 * C) & (u < 6))[None, :] & (e >= 0) & (e < W * C)
        near = ((b * H + top) * (W * C) + left)[:, None] + (u * (W * C) + j)[None, :]
        tile = tl.load(x + near, mask=reach, other=0.0)
        total = tl.dot(g, tile, total, input_precision=PRECISION)
    to = part + (client * SPLIT + split) * (4 * O * GROUPS * ROWS * LINE)
    to += m[:, None] * (GROUPS * ROWS * LINE) + group * (ROWS * LINE) + n[None, :]
    tl.store(to, total)


@jit
def _spread(w, out, C: tl.constexpr, O: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr):
    """out[k, u, (dy, dx, o), (v, c)] = w[k, o, c, u - dy, v - dx], or 0 where there is no such weight"""
    client, u = tl.program_id(1).to(tl.int64), tl.program_id(0)
    at = tl.arange(0, BLOCK)
    j, n = at % LINE, at // LINE
    o, candidate = n % O, n // O
    ky, kx, c = u - candidate // 2, j // C - candidate % 2, j % C
    held = (candidate < 4) & (ky >= 0) & (ky < 5) & (kx >= 0) & (kx < 5)
    value = tl.load(w + client * (25 * O * C) + (o * C + c) * 25 + ky * 5 + kx, mask=held, other=0.0)
    tl.store(out + (client * 6 + u) * (4 * O * LINE) + at, value, mask=at < 4 * O * LINE)


@jit
def _sum_narrow(
    part,
    out,
    C: tl.constexpr,
    O: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[k, o, c, ky, kx] = sum over the split and dy, dx of part[k, s, (dy, dx, o), ky + dy, (kx + dx, c)]"""
    o, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    c, ky, kx = at // 25, at // 5 % 5, at % 5
    total = tl.zeros((BLOCK,), tl.float32)
    for s in range(4 * SPLIT):
        dy, dx = s // 2 % 2, s % 2
        first = part + ((client * SPLIT + s // 4) * (4 * O) + s % 4 * O + o) * (LINES * LINE)
        total += tl.load(first + (ky + dy) * LINE + (kx + dx) * C + c, mask=at < 25 * C, other=0.0)
    tl.store(out + (client * O + o) * (25 * C) + at, total.to(out.dtype.element_ty), mask=at < 25 * C)


def fits(x: tuple[int, ...], w: tuple[int, ...]) -> bool:
    """Whether the kernels take x (K, B, H, W, C) and w (K, O, C, 5, 5) of these shapes"""
    if len(x) != 5 or len(w) != 5 or x[0] != w[0] or w[3:] != (5, 5) or x[4] != w[2] or min(x) < 1:
        return False
    k, b, height, width, c = x
    outputs = w[1] in (16, 32, 64)
    channels = c in (16, 32, 64) or (c <= 5 and w[1] <= 32)
    return outputs and channels and min(height, width) >= 4 and k <= 65535 and b * height * width * 64 < 2**31


def narrow(w: Tensor) -> bool:
    return w.shape[2] < 16


def line(channels: int) -> int:
    """6C, to the next power of two that a product takes"""
    return 16 if 6 * channels <= 16 else 32


def pooled(n: int) -> int:
    return (n - 2) // 2 + 1


def option(kernel: str, x: Tensor, precision: str) -> dict[str, Any]:
    """The tuned launch of a kernel, and how it multiplies"""
    name = "bf16" if x.dtype == torch.bfloat16 else precision
    return {"PRECISION": "ieee" if name == "fp32" else "tf32", **TUNED[kernel][name]}


def arranged(w: Tensor) -> Tensor:
    """w (K, O, C, 5, 5) as the kernels read it: (K, 6, 4 O, LINE) where narrow, else (K, 25, O, C)"""
    k, o, c = w.shape[:3]
    if not narrow(w):
        return w.permute(0, 3, 4, 1, 2).contiguous()
    out = torch.empty(k, 6, 4 * o, line(c), dtype=w.dtype, device=w.device)
    _spread[(6, k)](w, out, C=c, O=o, LINE=line(c), BLOCK=4 * o * line(c))
    return out


def forward(x: Tensor, ready: Tensor, outputs: int, precision: str) -> tuple[Tensor, Tensor]:
    """max(0, conv of x), pooled, and which candidate it was; `ready` are the weights as `arranged` gives them"""
    k, b, h, w, c = x.shape
    shape = (k, b, pooled(h), pooled(w), outputs)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    index = torch.empty(shape, dtype=torch.uint8, device=x.device)
    if c < 16:
        kernel, choice = _forward_narrow, option("forward_narrow", x, precision) | {"LINE": line(c)}
    else:
        kernel, choice = _forward_wide, option("forward_wide", x, precision)
    grid = (-(-b * shape[2] * shape[3] // choice["BLOCK"]), k)
    kernel[grid](x, ready, out, index, b, H=h, W=w, C=c, O=outputs, **choice)
    return out, index


def input_gradient(grad: Tensor, index: Tensor, ready: Tensor, shape: tuple[int, ...], precision: str) -> Tensor:
    k, b, h, w, c = shape
    out = torch.empty(shape, dtype=grad.dtype, device=grad.device)
    choice = option("input_wide", grad, precision)
    grid = (-(-b * ((h + 1) // 2) * ((w + 1) // 2) // choice["BLOCK"]), k)
    _input_wide[grid](grad, index, ready, out, b, H=h, W=w, C=c, O=grad.shape[4], **choice)
    return out


def weight_gradient(x: Tensor, grad: Tensor, index: Tensor, precision: str) -> Tensor:
    """(K, O, C, 5, 5), added up in float32 in a fixed order"""
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
        _weight_narrow[(groups * split, k)](
            x, grad, index, part, b, H=h, W=w, C=c, O=o, LINE=line(c), GROUPS=groups, **choice
        )
        _sum_narrow[(o, k)](part, out, C=c, O=o, LINE=line(c), LINES=lines, SPLIT=split, BLOCK=32 if c == 1 else 128)
    else:
        part = torch.empty(k, split, 7, o, 4, c, device=x.device)
        _weight_wide[(7 * split, k)](x, grad, index, part, b, H=h, W=w, C=c, O=o, **choice)
        _sum_wide[(o, k)](part, out, C=c, O=o, SPLIT=split)
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
    the sums are float32. Returns (K, B, H2, W2, O) in x's dtype. `fits` says which shapes there are kernels for.
    """
    return cast(Tensor, _ConvReluPool.apply(x, w, precision))  # type: ignore[no-untyped-call]
