"""Device code of `convpool`: convolution, ReLU and pooling of many clients, forward and backward.

The kernels come in five groups. `narrow` ones are for fewer than 16 input channels: a row of the window is 6C numbers
in sequence, and the weights contain all four candidates, with zeros outside their windows. `wide` ones are for 16
channels or more: a product of C numbers for each of the 25 taps. `major` ones replace the `wide` backward kernels for
tf32, whose products read both factors along the sum: the axis that is summed over must be the contiguous one. For the
gradient of the inputs that is the output channel: the weights come as (K, 25, C, O). For the gradient of the weights it
is the position: `expand` and `border` make copies with the channels first. `quad` ones replace the `wide` backward
kernels for bfloat16: `unpool` writes the gradient of each conv position once, and neighbouring positions share a
product, so that fewer bytes are read per operation. `framed` ones replace the `narrow` ones for bfloat16: images have
four channels and a border of zeros, and a row of the window is 24 numbers in sequence at a multiple of 16 bytes. The
five rows of a conv position and its right neighbour are 120 numbers, padded to 128 with zero weights.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, E741 - constants of a kernel are in capitals

from __future__ import annotations

from fedshift.engines.gpu.kernels import AVAILABLE, jit

if AVAILABLE:
    import triton.language as tl


@jit
def winner(first, second, third, fourth, py, px, HC: tl.constexpr, WC: tl.constexpr):
    """max(0, candidates), and its index: the first of equal ones, 4 for none. NaN is the maximum, as in torch."""
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
def spread(w, out, C: tl.constexpr, O: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr):
    """out[k, u, (dy, dx, o), (v, c)] = w[k, o, c, u - dy, v - dx], or 0 if there is no such weight"""
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


@jit
def forward_wide(
    x,  # (K, B, H, W, C)
    w,  # (K, 25, O, C)
    out,  # (K, B, O, H2, W2)
    index,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
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
    c, o = tl.arange(0, C), tl.arange(0, O)
    total = tl.zeros((O, 4 * BLOCK), tl.float32)
    for tap in range(25):
        row, column = top + tap // 5, left + tap % 5
        seen = (b < B) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        near = at + (tap // 5 * W + tap % 5) * C
        tile = tl.load(x + near[:, None] + c[None, :], mask=seen[:, None], other=0.0)
        weight = tl.load(w + tap * (O * C) + o[:, None] * C + c[None, :])
        total = tl.dot(weight, tl.trans(tile), total, input_precision=PRECISION)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    py, px = (p // W2 % H2)[None, :], (p % W2)[None, :]
    pairs = tl.permute(tl.reshape(total, (O, 2, 2, BLOCK)), (0, 3, 1, 2))  # (O, BLOCK, dy, dx)
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    best, which = winner(first, second, third, fourth, py, px, H - 2, W - 2)
    to = client * B * (H2 * W2 * O) + (p // (H2 * W2) * (H2 * W2 * O) + p % (H2 * W2))[None, :] + o[:, None] * (H2 * W2)
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
    """Inputs (2a + ry, 2d + rx), ry and rx 0 or 1, are inputs of pooled (a + 1 - oy, d + 1 - ox), oy and ox 0, 1, 2"""
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
    """Four of the 25 taps; one product per step, because two with a common operand in registers gave wrong results."""
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
    """Gradient of conv position (b, i, j): that of its pooled position if it is the maximum, else 0"""
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
    """Four of the 25 taps; sums for taps above 24 of the last program are not used"""
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
    """Inputs (2a + ry, 2d + rx), ry and rx 0 or 1, are inputs of conv (2a + 2 - u, 2d + 2 - v), u and v 0 to 5"""
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


@jit
def unpool(
    grad,  # (K, B, O, H2, W2)
    index,
    out,  # (K, B, H - 2, 2 W2, O)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of conv position (b, i, j - 1): that of its pooled position if it is the maximum, else 0"""
    HC: tl.constexpr = H - 2
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    client = tl.program_id(1).to(tl.int64)
    grad += client * B * (H2 * W2 * O)
    index += client * B * (H2 * W2 * O)
    out += client * B * (HC * 2 * W2 * O)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o = tl.arange(0, O)
    b, py, px = p // (H2 * W2), p // W2 % H2, p % W2
    at = o[:, None] * (H2 * W2) + (b * (H2 * W2 * O) + p % (H2 * W2))[None, :]
    g = tl.trans(tl.load(grad + at, mask=(b < B)[None, :], other=0.0))
    which = tl.trans(tl.load(index + at, mask=(b < B)[None, :], other=4))
    for candidate in tl.static_range(4):
        i, j = 2 * py - 1 + candidate // 2, 2 * px + candidate % 2
        to = (((b * HC + i) * (2 * W2) + j) * O)[:, None] + o[None, :]
        held = (b < B) & (i >= 0) & (i < HC)
        tl.store(out + to, tl.where(which == candidate, g, 0.0).to(g.dtype), mask=held[:, None])


@jit
def input_quad(
    grad,  # (K, B, H - 2, 2 W2, O), as `unpool` gives it
    w,  # (K, 25, O, C)
    out,  # (K, B, H, W, C)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inputs (2a + ry, 2d + rx), ry and rx 0 or 1, are inputs of conv (2a + 2 - u, 2d + 2 - v), u and v 0 to 5"""
    HC: tl.constexpr = H - 2
    WE: tl.constexpr = (W - 2) // 2 * 2 + 2
    HA: tl.constexpr = (H + 1) // 2
    WA: tl.constexpr = (W + 1) // 2
    client = tl.program_id(1).to(tl.int64)
    grad += client * B * (HC * WE * O)
    w += client * (25 * O * C)
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, a, d = p // (HA * WA), p // WA % HA, p % WA
    n, o = tl.arange(0, 4 * C), tl.arange(0, O)
    ry, rx, c = n // (2 * C), n // C % 2, n % C
    total = tl.zeros((4 * C, BLOCK), tl.float32)
    for step in range(36):
        u, v = step // 6, step % 6
        i, j = 2 * a + 2 - u, 2 * d + 3 - v
        inside = (b < B) & (i >= 0) & (i < HC) & (j >= 0) & (j < WE)
        at = ((b * HC + i) * WE + j) * O
        g = tl.load(grad + at[:, None] + o[None, :], mask=inside[:, None], other=0.0)
        ky, kx = ry - 1 + u, rx - 1 + v
        reach = (ky >= 0) & (ky < 5) & (kx >= 0) & (kx < 5)
        near = (ky * 5 + kx) * (O * C) + c
        weight = tl.load(w + near[None, :] + o[:, None] * C, mask=reach[None, :], other=0.0)
        total = tl.dot(tl.trans(weight), tl.trans(g), total)
    row, column = (2 * a)[None, :] + ry[:, None], (2 * d)[None, :] + rx[:, None]
    to = client * B * (H * W * C) + ((b[None, :] * H + row) * W + column) * C + c[:, None]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(b < B)[None, :] & (row < H) & (column < W))


@jit
def weight_quad(
    x,  # (K, B, H, W, C)
    grad,  # (K, B, H - 2, W2, 2, O), as `unpool` gives it
    part,  # (K, SPLIT, 2 O, 16, 2 C)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    O: tl.constexpr,
    UNITS: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Conv positions (i, 2q - 1 + dx) and inputs (i - 1 + ky, 2q - 2 + 2 ox + rx); a unit is one of 15 (ky, ox)"""
    HC: tl.constexpr = H - 2
    W2: tl.constexpr = (W - 2) // 2 + 1
    split, group = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    client = tl.program_id(1).to(tl.int64)
    x += client * B * (H * W * C)
    grad += client * B * (HC * W2 * 2 * O)
    m, n = tl.arange(0, 2 * O), tl.arange(0, UNITS * 2 * C)
    unit, rx = group * UNITS + n // (2 * C), n // C % 2
    ky, ox = unit // 3, unit % 3
    shift = (ky * W + 2 * ox) * C + n % (2 * C)
    total = tl.zeros((2 * O, UNITS * 2 * C), tl.float32)
    for block in range(STEPS):
        r = (split * STEPS + block) * BLOCK + tl.arange(0, BLOCK)  # (b, i, q)
        b, i, q = r // (HC * W2), r // W2 % HC, r % W2
        g = tl.load(grad + (r * (2 * O))[:, None] + m[None, :], mask=(b < B)[:, None], other=0.0)
        row, column = (i - 1)[:, None] + ky[None, :], (2 * q - 2)[:, None] + (2 * ox + rx)[None, :]
        reach = (b < B)[:, None] & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        near = ((b * H + i - 1) * W + 2 * q - 2) * C
        tile = tl.load(x + near[:, None] + shift[None, :], mask=reach & (unit < 15)[None, :], other=0.0)
        total = tl.dot(tl.trans(g), tile, total)
    part += (client * SPLIT + split) * (2 * O * 32 * C) + group * (UNITS * 2 * C)
    tl.store(part + m[:, None] * (32 * C) + n[None, :], total)


@jit
def sum_quad(part, out, C: tl.constexpr, O: tl.constexpr, SPLIT: tl.constexpr):
    """out[k, o, c, ky, kx] = sum over the split and dx of part[k, s, (dx, o), (ky, ox), (rx, c)], 2 ox + rx = kx + dx.

    The pairs (ox, rx) of a row are six inputs in sequence.
    """
    o, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tap, c = tl.arange(0, 32), tl.arange(0, C)
    at = (tap // 5 * 6 + tap % 5) * C
    total = tl.zeros((32, C), tl.float32)
    for s in range(2 * SPLIT):
        first = part + ((client * SPLIT + s // 2) * 2 + s % 2) * (O * 32 * C) + o * (32 * C) + s % 2 * C
        total += tl.load(first + at[:, None] + c[None, :], mask=(tap < 25)[:, None], other=0.0)
    to = (client * O + o) * (25 * C) + tap[:, None] + c[None, :] * 25
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(tap < 25)[:, None])


@jit
def spread_framed(w, out, C: tl.constexpr, O: tl.constexpr):
    """out[k, m, (ky, v, c)] = w[k, o, c, ky, v - dx], or 0 if there is no such weight; m = (o // 8, dx, o % 8).

    In this order of rows, both candidates of a channel are in the same thread.
    """
    client = tl.program_id(0).to(tl.int64)
    m, j = tl.arange(0, 2 * O)[:, None], tl.arange(0, 128)[None, :]
    o, c, ky, kx = m // 16 * 8 + m % 8, j % 4, j // 24, j % 24 // 4 - m // 8 % 2
    held = (c < C) & (ky < 5) & (kx >= 0) & (kx < 5)
    value = tl.load(w + client * (25 * O * C) + (o * C + c) * 25 + ky * 5 + kx, mask=held, other=0.0)
    tl.store(out + client * (2 * O * 128) + m * 128 + j, value)


@jit
def forward_framed(
    x,  # (K, B, H + 5, WF, 4)
    w,  # (K, 2 O, 128), as `spread_framed` gives it
    out,  # (K, B, H2, W2, O)
    index,
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    WF: tl.constexpr,
    O: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    client = tl.program_id(1).to(tl.int64)
    x += client * B * ((H + 5) * WF * 4)
    out += client * B * (H2 * W2 * O)
    index += client * B * (H2 * W2 * O)
    j, m, o = tl.arange(0, 128), tl.arange(0, 2 * O), tl.arange(0, O)
    n = tl.arange(0, 2 * BLOCK)  # (dy, pooled position)
    window = j // 24 * (WF * 4) + j % 24
    weight = tl.load(w + client * (2 * O * 128) + m[:, None] * 128 + j[None, :])
    for block in range(STEPS):
        first = (tl.program_id(0) * STEPS + block) * BLOCK
        p = tl.minimum(first + n % BLOCK, B * (H2 * W2) - 1)
        b, py, px = p // (H2 * W2), p // W2 % H2, p % W2
        at = (b * (H + 5) + 2 * py + n // BLOCK) * (WF * 4) + px * 8
        tile = tl.load(x + at[:, None] + window[None, :])
        total = tl.dot(weight, tl.trans(tile))
        parts = tl.permute(tl.reshape(total, (O // 8, 2, 8, 2, BLOCK)), (0, 2, 4, 3, 1))
        even, odd = tl.split(tl.reshape(parts, (O, BLOCK, 2, 2)))  # (O, BLOCK, dy)
        upper, lower = tl.split(even)
        upper_right, lower_right = tl.split(odd)
        p = first + tl.arange(0, BLOCK)
        py, px = (p // W2 % H2)[None, :], (p % W2)[None, :]
        best, which = winner(upper, upper_right, lower, lower_right, py, px, H - 2, W - 2)
        to = p[None, :] * O + o[:, None]
        inside = (p < B * (H2 * W2))[None, :]
        tl.store(out + to, best.to(out.dtype.element_ty), mask=inside)
        tl.store(index + to, which, mask=inside)


@jit
def weight_framed(
    x,  # (K, B, H + 5, WF, 4)
    grad,  # (K, B, H2, W2, O)
    index,
    part,  # (K, SPLIT, 2 O, 128)
    B,
    H: tl.constexpr,
    W: tl.constexpr,
    WF: tl.constexpr,
    O: tl.constexpr,
    SPLIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    H2: tl.constexpr = (H - 2) // 2 + 1
    W2: tl.constexpr = (W - 2) // 2 + 1
    split, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x += client * B * ((H + 5) * WF * 4)
    grad += client * B * (H2 * W2 * O)
    index += client * B * (H2 * W2 * O)
    j, m, o = tl.arange(0, 128), tl.arange(0, 2 * O), tl.arange(0, O)
    window = j // 24 * (WF * 4) + j % 24
    right = tl.arange(0, 2)[None, :, None]  # dx
    total = tl.zeros((2 * O, 128), tl.float32)
    for block in range(STEPS):
        p = (split * STEPS + block) * BLOCK + tl.arange(0, BLOCK)
        inside = (p < B * (H2 * W2))[:, None]
        g = tl.load(grad + (p * O)[:, None] + o[None, :], mask=inside, other=0.0)
        which = tl.load(index + (p * O)[:, None] + o[None, :], mask=inside, other=4).to(tl.int32)
        q = tl.minimum(p, B * (H2 * W2) - 1)
        b, py, px = q // (H2 * W2), q // W2 % H2, q % W2
        at = (b * (H + 5) + 2 * py) * (WF * 4) + px * 8
        for dy in tl.static_range(2):
            slopes = tl.where(which[:, None, :] == 2 * dy + right, g[:, None, :], 0.0).to(g.dtype)
            slopes = tl.reshape(slopes, (BLOCK, 2 * O))  # (dx, o)
            tile = tl.load(x + at[:, None] + (dy * WF * 4 + window)[None, :])
            total = tl.dot(tl.trans(slopes), tile, total)
    tl.store(part + (client * SPLIT + split) * (2 * O * 128) + m[:, None] * 128 + j[None, :], total)


@jit
def sum_framed(part, out, C: tl.constexpr, O: tl.constexpr, SPLIT: tl.constexpr):
    """out[k, o, c, ky, kx] = sum over the split and dx of part[k, s, (dx, o), (ky, kx + dx, c)]"""
    o, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, 128)
    c, ky, kx = at // 25, at // 5 % 5, at % 5
    total = tl.zeros((128,), tl.float32)
    for s in range(2 * SPLIT):
        first = part + ((client * SPLIT + s // 2) * (2 * O) + s % 2 * O + o) * 128
        total += tl.load(first + ky * 24 + (kx + s % 2) * 4 + c, mask=at < 25 * C, other=0.0)
    tl.store(out + (client * O + o) * (25 * C) + at, total.to(out.dtype.element_ty), mask=at < 25 * C)
