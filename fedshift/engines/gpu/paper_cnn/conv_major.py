"""The backward kernels of conv_wide.py and conv_narrow.py for tf32, whose products read both factors along the sum.

A tf32 product wants the axis that is summed over to be the contiguous one. For the gradient of the inputs that is the
output channel: the weights come as (K, 25, C, O). For the gradient of the weights it is the position: `expand` and
`border` make copies with the channels first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, E741 - constants of a kernel are in capitals

from __future__ import annotations

from fedshift.engines.gpu.paper_cnn.kernels import AVAILABLE, jit

if AVAILABLE:
    import triton.language as tl


@jit
def expand(
    grad,  # (K, B, H2, W2, O)
    index,
    out,  # (K, O, LENGTH) where FIRST, else (K, LENGTH, O)
    B,
    LENGTH,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of conv position (b, i, j): that of its pooled one if it won, else 0; 0 after the last position"""
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
    out += client * O * LENGTH
    if FIRST:
        tl.store(out + o[:, None] * LENGTH + r[None, :], tl.trans(g), mask=(r < LENGTH)[None, :])
    else:
        tl.store(out + r[:, None] * O + o[None, :], g, mask=(r < LENGTH)[:, None])


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
        near = tl.max_contiguous(near, BLOCK)  # not quite, but threads in sequence then read positions in sequence
        tile = tl.load(x + shift[:, None] + near[None, :])
        total = tl.dot(g, tl.trans(tile), total, input_precision=PRECISION)
    part += ((client * SPLIT + split) * 7 + four) * (O * 4 * C)
    tl.store(part + o[:, None] * (4 * C) + n[None, :], total)


@jit
def input_major(
    grad,  # (K, B, H - 2, W - 2, O), as `expand` gives it
    w,  # (K, 25, C, O)
    out,  # (K, B, H, W, C)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inputs (2a + ry, 2d + rx), ry and rx 0 or 1, were seen by conv (2a + 2 - u, 2d + 2 - v), u and v 0 to 5"""
    HC: tl.constexpr = H - 2
    WC: tl.constexpr = W - 2
    HA: tl.constexpr = (H + 1) // 2
    WA: tl.constexpr = (W + 1) // 2
    client = tl.program_id(1).to(tl.int64)
    grad += client * B * (HC * WC * O)
    w += client * (25 * O * C)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, a, d = p // (HA * WA), p // WA % HA, p % WA
    n, o = tl.arange(0, 4 * C), tl.arange(0, O)
    ry, rx, c = n // (2 * C), n // C % 2, n % C
    total = tl.zeros((BLOCK, 4 * C), tl.float32)
    for step in range(36):
        u, v = step // 6, step % 6
        i, j = 2 * a + 2 - u, 2 * d + 2 - v
        inside = (b < B) & (i >= 0) & (i < HC) & (j >= 0) & (j < WC)
        at = ((b * HC + i) * WC + j) * O
        g = tl.load(grad + at[:, None] + o[None, :], mask=inside[:, None], other=0.0)
        ky, kx = ry - 1 + u, rx - 1 + v
        reach = (ky >= 0) & (ky < 5) & (kx >= 0) & (kx < 5)
        near = ((ky * 5 + kx) * C + c) * O
        weight = tl.load(w + near[:, None] + o[None, :], mask=reach[:, None], other=0.0)
        total = tl.dot(g, tl.trans(weight), total, input_precision=PRECISION)
    row, column = (2 * a)[:, None] + ry[None, :], (2 * d)[:, None] + rx[None, :]
    to = client * B * (H * W * C) + ((b[:, None] * H + row) * W + column) * C + c[None, :]
    tl.store(out + to, total, mask=(b < B)[:, None] & (row < H) & (column < W))
