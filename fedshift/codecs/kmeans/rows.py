"""Codes and codebooks of a stack of rows, on the device of the stack.

A long row is first counted into bins. The means are computed from the nonempty bins, about ten thousand,
and a table from bin to code then assigns every value. A short row, and one whose range is too narrow for
the bins, is sorted instead. The means of a short row with many values per mean are computed by dynamic
programming, and those of other rows, or where its result may not be good, from the distinct values.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fedshift.codecs.base import CHUNK, chunks
from fedshift.codecs.kmeans import bins, graphs, joint
from fedshift.codecs.kmeans.arrays import Array, arange, cast, gather, module, runs, search, sort, spread, totals

LONG = 1 << 14  # number of values from which counting a row is faster than sorting it
MEMORY = 2 << 30  # approximate bytes of temporaries on a GPU
CACHED = 24 << 20  # the same on a CPU
FEW, MANY = 8, 63  # borders: from FEW on, buckets are faster than comparing all; up to MANY, comparing than searching
BUCKETS = 16  # per border
BLOCK = 128  # rows compared at once
TABLE, NEAREST, SORT, LEFT = range(4)  # how a counted row gets its codes; LEFT: not here, since its means are not sure


def encode(x: Array, codes: Array, side: Array, exact: bool) -> list[int]:
    """Write codes uint8 (rows, n) and side float32 (rows, k) of x float32 (rows, n); return the rows left out.

    These are rows with NaN or infinity and, for tensors, rows whose result may differ from that of numpy arrays.
    """
    n = x.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):  # infinity and means that are not used
        if n < LONG:
            return _sorted(x, codes, side)
        size = 8 * n + 24 * bins.BINS + 200 * bins.MOST  # above CACHED / 2: one row at a time on a CPU
        return _in_parts(partial(_counted, exact=exact), size, x, codes, side)


def _in_parts(work: Callable[..., list[int]], size: int, *stack: Array) -> list[int]:
    """Call `work` with as many rows at a time as fit in memory at `size` bytes each; return the rows it left out."""
    most = max(1, (CACHED if isinstance(stack[0], np.ndarray) else MEMORY) // size)
    most = -(-len(stack[0]) // -(-len(stack[0]) // most))  # parts of equal size
    starts = range(0, len(stack[0]), most)
    if len(stack[0]) > 1 and isinstance(stack[0], np.ndarray):
        np.empty(CACHED, np.uint8)  # once freed, glibc keeps this much for the next part, which saves page faults
    return [first + r for first in starts for r in work(*(a[first : first + most] for a in stack))]


def _sorted(x: Array, codes: Array, side: Array) -> list[int]:
    """Compute the means from the sorted values, and assign every value its nearest mean."""
    n, k = x.shape[1], side.shape[1]
    solve = partial(_in_parts, _solved, 200 * n + 1200 * k)
    if not joint.suits(n, k):
        return solve(x, codes, side)
    left = _in_parts(_joined, 32 * n + 450 * k, x, codes, side)
    if not left:
        return []
    rows = left if isinstance(x, np.ndarray) else list(range(len(x)))  # on a GPU, all: recorded shapes should recur
    other_codes, other_side = codes[rows], side[rows]
    unsure = {rows[i] for i in solve(x[rows], other_codes, other_side)}
    wanted = set(left)
    index = [i for i, r in enumerate(rows) if r in wanted]
    codes[left], side[left] = other_codes[index], other_side[index]
    return [r for r in left if r in unsure]


def _joined(x: Array, codes: Array, side: Array) -> list[int]:
    """Compute the means by dynamic programming; return the rows for which they may not be good."""
    side[:], good = graphs.joint_kmeans(sort(x), side.shape[1])
    _nearest(x, borders(side, side.shape[1]), codes)
    return [r for r, (good,) in enumerate(good.tolist()) if not good]


def _solved(x: Array, codes: Array, side: Array) -> list[int]:
    """Compute the means from the distinct values."""
    v, weight, number = runs(sort(x))
    found = graphs.kmeans(cast(v, "float64") + 0.0, weight, number, side.shape[1])  # no negative zero
    side[:] = found.centres
    _nearest(x, borders(side, found.number), codes)
    return [r for r, (sure,) in enumerate(found.sure.tolist()) if not sure]


def _counted(x: Array, codes: Array, side: Array, exact: bool) -> list[int]:
    """Compute the means from the nonempty bins."""
    xp, n = module(x), x.shape[1]
    key = bins.keys(x)
    nonempty, weight, number = bins.count(key)
    v, near, far = bins.spans(nonempty)
    last = nonempty.shape[1] - 1
    found = graphs.kmeans(v, weight, number.clip(max=last), side.shape[1])
    side[:] = found.centres
    border = borders(side, found.number)
    at = bins.bins_of(border)
    middle, low, high = bins.spans(at)
    real, size = xp.isfinite(border), abs(cast(border, "float64"))
    place = search(nonempty, at).clip(max=last)
    divided = real & (gather(nonempty, place) == at)
    wrong = gather(weight, place) / n * xp.minimum(size - low, high - size) / (high - low)
    misplaced = xp.where(divided, wrong, 0.0).sum(1)[:, None]  # share of values on the smaller side of a border
    begins = xp.where(real, at + (middle <= border), bins.BINS)
    blur = totals(weight * (far - near) ** 2, number) / 12  # squared error of replacing values by middles of bins
    state = xp.where(misplaced > bins.MISPLACED, NEAREST, NEAREST if exact else TABLE)
    state = xp.where(blur <= bins.BLUR * found.error, state, SORT)
    state = xp.where(found.sure & (number <= last), state, SORT if xp is np else LEFT)
    states, left = [state for (state,) in state.tolist()], []
    for state in sorted(set(states)):
        index = [r for r, other in enumerate(states) if other == state]
        part = slice(None) if len(index) == len(x) else index
        part_codes, part_side = codes[part], side[part]
        if state == TABLE:
            _look_up(bins.table(begins[part]), key[part], part_codes)
        elif state == NEAREST:
            _nearest(x[part], border[part], part_codes, key[part])
        elif state == SORT:
            key = None  # frees the memory that sorting needs
            left += [index[i] for i in _sorted(x[part], part_codes, part_side)]
        else:
            left += index
        if part is index:  # the parts are copies
            codes[part], side[part] = part_codes, part_side
    return left


def borders(book: Array, number: Array | int) -> Array:
    """A value above border i is nearer to book[i + 1] than to book[i]: (rows, k) -> (rows, k - 1).

    Borders are midpoints, rounded down to float32, which loses nothing: no float32 lies between the midpoint and the
    float32 below it. They are infinite beyond the given number of codes.
    """
    xp, wide = module(book), cast(book, "float64")
    middle = (wide[:, 1:] + wide[:, :-1]) * 0.5
    border = cast(middle, "float32")
    border = xp.where(border > middle, xp.nextafter(border, xp.full_like(border, -np.inf)), border)
    return xp.where(arange(book, 1, book.shape[1]) < number, border, np.inf)


def _look_up(table: Array, key: Array, codes: Array) -> None:
    """codes[r, i] = table[r, key[r, i]]."""
    if len(key) > 1:
        key = key + cast(arange(key, len(key)), "int32")[:, None] * bins.BINS
    table, key, codes = (torch.as_tensor(a).view(-1) for a in (table, key, codes))
    torch.index_select(table, 0, key, out=codes)


def _nearest(x: Array, border: Array, codes: Array, key: Array | None = None) -> None:
    """Write the number of borders below each value; keys of x that are not given are computed if they are needed."""
    if not isinstance(x, np.ndarray):
        codes[:] = search(border, x)
        return
    if x.shape[1] < LONG:
        _nearest_short(x, border, codes)
        return
    at = bins.bins_of(border)  # a table counts the borders in lower bins; the few in the bin of a value are searched
    lowest = torch.from_numpy(bins.table(at + 1)[0])
    shared = int(np.unique(at[np.isfinite(border)], return_counts=True)[1].max(initial=0))
    above = torch.from_numpy(np.append(border, np.full(shared + 1, np.float32(np.inf))))
    for r, c in chunks(torch.from_numpy(x)):
        part = bins.keys(x[r, c]) if key is None else key[r, c]
        values, code = torch.from_numpy(x[0, c]), lowest.index_select(0, torch.from_numpy(part[0]))
        step = 1 << shared.bit_length()
        while step := step >> 1:  # binary search of all values at once
            place = code.int() if step == 1 else code.int() + (step - 1)
            code.add_((values > above.index_select(0, place)).view(torch.uint8), alpha=step)
        codes[0, c] = code.numpy()


def _nearest_short(x: Array, border: Array, codes: Array) -> None:
    """`_nearest` for short numpy rows."""
    (rows, n), number = x.shape, border.shape[1]
    others = np.arange(rows)
    if number >= FEW and BUCKETS * number <= 4 * n:
        with np.errstate(all="ignore"):  # rows with infinite or equal borders
            scale = (BUCKETS * number - 1) / (border[:, -1:] - border[:, :1])
            at = ((border - border[:, :1]) * scale).clip(0, BUCKETS * number - 1).astype(np.int32)
        single = np.isfinite(scale[:, 0]) & (at[:, 1:] > at[:, :-1]).all(1)  # at most one border per bucket
        others = np.flatnonzero(~single)
        if not len(others):
            _in_buckets(x, border, scale, at, codes)
            return
        some = np.flatnonzero(single)
        part = codes[some]
        _in_buckets(x[some], border[some], scale[some], at[some], part)
        codes[some] = part
    for first in range(0, len(others), BLOCK):
        index = others[first : first + BLOCK]
        codes[index] = _compared(x[index], border[index])


def _compared(x: Array, border: Array) -> Array:
    """Number of borders below each value, uint8, by comparisons with all of them or by a search."""
    if border.shape[1] > MANY:
        return search(border, x).astype(np.uint8)
    code, above = np.zeros(x.shape, np.uint8), np.empty(x.shape, np.bool_)
    for j in range(border.shape[1]):
        np.greater(x, border[:, j : j + 1], out=above)
        code += above.view(np.uint8)
    return code


def _in_buckets(x: Array, border: Array, scale: Array, at: Array, codes: Array) -> None:
    """Write the number of borders below each value, from its bucket and a comparison with the border in the bucket.

    A value below border j is not in a higher bucket than the border, and one above it not in a lower one, since
    rounding keeps the order. Buckets have equal widths; at[r, j] is the one of border j.
    """
    rows, number = border.shape
    width = BUCKETS * number
    lower = spread(np.tile(np.arange(number + 1, dtype=np.uint8), (rows, 1)), at + 1, width)
    limit = np.full((rows, width), np.float32(np.inf))
    limit.reshape(-1)[at + np.arange(0, rows * width, width)[:, None]] = border
    values, written, zero, scales = map(torch.from_numpy, (x, codes, border[:, :1], scale))
    counts, limits = torch.from_numpy(lower), torch.from_numpy(limit)
    step = max(1, 2 * CHUNK // x.shape[1])
    first = torch.arange(0, step * width, width, dtype=torch.int32)[:, None]
    shape = min(rows, step), x.shape[1]
    place, at_most, above = torch.empty(shape, dtype=torch.int32), torch.empty(shape), np.empty(shape, np.bool_)
    for r in range(0, rows, step):  # parts that stay in the cache
        part = slice(r, r + step)
        size = len(x[part])
        bucket, limit_of, flag = place[:size], at_most[:size], above[:size]
        torch.sub(values[part], zero[part], out=limit_of).mul_(scales[part]).clamp_(0, width - 1)
        bucket.copy_(limit_of).add_(first[:size])
        torch.index_select(counts[part].view(-1), 0, bucket.view(-1), out=written[part].view(-1))
        torch.index_select(limits[part].view(-1), 0, bucket.view(-1), out=limit_of.view(-1))
        np.greater(x[part], limit_of.numpy(), out=flag)  # a fifth of the time of torch
        codes[part] += flag.view(np.uint8)
