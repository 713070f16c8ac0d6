"""Kernels of convpool.py for a few channels: a row of the window is 6C numbers in sequence.

The weights hold all four candidates, with zeros where one does not reach.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, E741 - constants of a kernel are in capitals

from __future__ import annotations

from fedshift.engines.gpu.paper_cnn.conv_wide import winner
from fedshift.engines.gpu.paper_cnn.kernels import AVAILABLE, jit

if AVAILABLE:
    import triton.language as tl


@jit
def spread(w, out, C: tl.constexpr, O: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr):
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
def forward_narrow(
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
    best, which = winner(first, second, third, fourth, py[:, None], px[:, None], H - 2, W - 2)
    to = client * B * (H2 * W2 * O) + p[:, None] * O + tl.arange(0, O)[None, :]
    inside = (b < B)[:, None]
    tl.store(out + to, best.to(out.dtype.element_ty), mask=inside)
    tl.store(index + to, which, mask=inside)


@jit
def weight_narrow(
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
def sum_narrow(
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
