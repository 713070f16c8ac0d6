"""The backward kernels of conv_wide.py and conv_narrow.py for tf32, whose products read both factors along the sum.

A tf32 product wants the axis that is summed over to be the contiguous one. For the gradient of the inputs that is the
output channel: the weights come as (K, 25, C, O). For the gradient of the weights it is the position: `expand` and
`border` make copies with the channels first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, E741 - constants of a kernel are in capitals

from __future__ import annotations

from fedshift.engines.kernels import AVAILABLE, jit

if AVAILABLE:
    import triton.language as tl


@jit
def expand(
    grad,  # (K, B, H2, W2, O)
    index,
    out,  # (K, O, LENGTH)
    B,
    LENGTH,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[k, o, (b, i, j)]: the gradient of conv position (i, j), that of its pooled one if it won; 0 after the last"""
    HC: tl.constexpr = H - 2
    WC: tl.constexpr = W - 2
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    client = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.arange(0, O)
    b, i, j = r // (HC * WC), r // WC % HC, r % WC
    at = (((b * H2 + (i + 1) // 2) * W2 + (j + 1) // 2) * O)[:, None] + o[None, :]
    first = client * B * (H2 * W2 * O)
    g = tl.load(grad + first + at, mask=(b < B)[:, None], other=0.0)
    which = tl.load(index + first + at, mask=(b < B)[:, None], other=4).to(tl.int32)
    candidate = (i + 1) % 2 * 2 + (j + 1) % 2
    g = tl.where(which == candidate[:, None], g, 0.0)
    tl.store(out + client * O * LENGTH + o[:, None] * LENGTH + r[None, :], tl.trans(g), mask=(r < LENGTH)[None, :])


@jit
def border(
    x,  # (K, B, H, W, C)
    out,  # (K, C, LENGTH)
    B,
    LENGTH,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[k, c, (b, i, j)] = x[k, b, i - 1, j - 1, c], i < H + 2 and j < W + 2, and 0 around it"""
    client = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    b, i, j = r // ((H + 2) * (W + 2)), r // (W + 2) % (H + 2) - 1, r % (W + 2) - 1
    seen = (b < B) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    at = (((b * H + i) * W + j) * C)[:, None] + c[None, :]
    value = tl.load(x + client * B * (H * W * C) + at, mask=seen[:, None], other=0.0)
    to = client * C * LENGTH + c[:, None] * LENGTH + r[None, :]
    tl.store(out + to, tl.trans(value), mask=(r < LENGTH)[None, :])


@jit
def weight_major(
    x,  # (K, C, PITCH), as `border` gives it
    grad,  # (K, O, LENGTH), as `expand` gives it; LENGTH is SPLIT STEPS BLOCK
    part,  # (K, SPLIT, 7, O, 4, C)
    B,
    PITCH,
    LENGTH,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Four of the 25 taps; what it adds for the last program's taps above 24 is not read"""
    HC: tl.constexpr = H - 2
    WC: tl.constexpr = W - 2
    split, four = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    client = tl.program_id(1).to(tl.int64)
    x += client * C * PITCH
    grad += client * O * LENGTH
    o, n = tl.arange(0, O), tl.arange(0, 4 * C)
    tap = tl.minimum(four * 4 + n // C, 24)
    shift = n % C * PITCH + tap // 5 * (W + 2) + tap % 5
    total = tl.zeros((O, 4 * C), tl.float32)
    for block in range(STEPS):
        r = (split * STEPS + block) * BLOCK + tl.arange(0, BLOCK)  # conv positions
        g = tl.load(grad + o[:, None] * LENGTH + r[None, :])
        r = tl.minimum(r, B * (HC * WC) - 1)  # g is 0 after the last
        near = r // (HC * WC) * ((H + 2) * (W + 2)) + r // WC % HC * (W + 2) + r % WC
        tile = tl.load(x + shift[:, None] + near[None, :])
        total = tl.dot(g, tl.trans(tile), total, input_precision=PRECISION)
    part += ((client * SPLIT + split) * 7 + four) * (O * 4 * C)
    tl.store(part + o[:, None] * (4 * C) + n[None, :], total)


@jit
def input_major(
    grad,  # (K, B, H2, W2, O)
    index,
    w,  # (K, 25, C, O)
    out,  # (K, B, H, W, C)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
):
    """As conv_wide.input_wide, but one product a step; KEEP reads the gradient in the first of an offset's four."""
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
    g = tl.zeros((BLOCK, O), tl.float32)
    which = tl.full((BLOCK, O), 4, tl.uint8)
    for step in range(36):
        off, candidate = step // 4, step % 4
        oy, ox = off // 3, off % 3
        py, px = a + 1 - oy, d + 1 - ox
        inside = (b < B) & (py >= 0) & (py < H2) & (px >= 0) & (px < W2)
        at = (((b * H2 + py) * W2 + px) * O)[:, None] + o[None, :]
        if KEEP:
            if candidate == 0:
                g = tl.load(grad + at, mask=inside[:, None], other=0.0)
                which = tl.load(index + at, mask=inside[:, None], other=4)
        else:
            g = tl.load(grad + at, mask=inside[:, None], other=0.0)
            which = tl.load(index + at, mask=inside[:, None], other=4)
        ky, kx = 2 * oy + ry - candidate // 2, 2 * ox + rx - candidate % 2
        reach = (ky >= 0) & (ky < 5) & (kx >= 0) & (kx < 5)
        near = ((ky * 5 + kx) * C + c) * O
        weight = tl.load(w + near[:, None] + o[None, :], mask=reach[:, None], other=0.0)
        part = tl.where(which == candidate.to(tl.uint8), g, 0.0)
        total = tl.dot(part, tl.trans(weight), total, input_precision=PRECISION)
    row, column = (2 * a)[:, None] + ry[None, :], (2 * d)[:, None] + rx[None, :]
    to = client * B * (H * W * C) + ((b[:, None] * H + row) * W + column) * C + c[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(b < B)[:, None] & (row < H) & (column < W))
