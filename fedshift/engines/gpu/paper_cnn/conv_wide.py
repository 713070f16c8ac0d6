"""Kernels of convpool.py for 16 channels or more: a product of C numbers for each of the 25 taps."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, E741 - constants of a kernel are in capitals

from __future__ import annotations

from fedshift.engines.gpu.paper_cnn.kernels import AVAILABLE, jit

if AVAILABLE:
    import triton.language as tl


@jit
def winner(first, second, third, fourth, py, px, HC: tl.constexpr, WC: tl.constexpr):
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
def under(x, w, inside, top, left, at, tap, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, O: tl.constexpr):
    """The inputs (positions, C) under a tap of the kernel, and its weights (O, C)"""
    row, column = top + tap // 5, left + tap % 5
    seen = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    near = at + (tap // 5 * W + tap % 5) * C
    c, o = tl.arange(0, C), tl.arange(0, O)
    tile = tl.load(x + near[:, None] + c[None, :], mask=seen[:, None], other=0.0)
    return tile, tl.load(w + tap * (O * C) + o[:, None] * C + c[None, :])


@jit
def forward_wide(
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
        tile, weight = under(x, w, b < B, top, left, at, 0, H, W, C, O)
        for tap in range(25):
            next_tile, next_weight = under(x, w, b < B, top, left, at, (tap + 1) % 25, H, W, C, O)
            total = tl.dot(weight, tl.trans(tile), total, input_precision=PRECISION)
            tile, weight = next_tile, next_weight
    else:
        for tap in range(25):
            tile, weight = under(x, w, b < B, top, left, at, tap, H, W, C, O)
            total = tl.dot(weight, tl.trans(tile), total, input_precision=PRECISION)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    py, px = (p // W2 % H2)[None, :], (p % W2)[None, :]
    pairs = tl.permute(tl.reshape(total, (O, 2, 2, BLOCK)), (0, 3, 1, 2))  # (O, BLOCK, dy, dx)
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    best, which = winner(first, second, third, fourth, py, px, H - 2, W - 2)
    to = client * B * (H2 * W2 * O) + p[None, :] * O + o[:, None]
    inside = (p < B * (H2 * W2))[None, :]
    tl.store(out + to, best.to(out.dtype.element_ty), mask=inside)
    tl.store(index + to, which, mask=inside)


@jit
def input_wide(
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
def weight_wide(
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
def sum_wide(part, out, C: tl.constexpr, O: tl.constexpr, SPLIT: tl.constexpr):
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
