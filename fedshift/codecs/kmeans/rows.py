"""Codes and codebooks of a stack of rows, on the device of the stack.

A long row is first counted into bins. The means are computed from the nonempty bins, about ten thousand,
and a table from bin to code then assigns every value. A short row, and one whose range is too narrow for
the bins, is sorted instead, and the means are computed from its distinct values.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fedshift.codecs.base import chunks
from fedshift.codecs.kmeans import bins, graphs
from fedshift.codecs.kmeans.arrays import Array, arange, cast, gather, module, runs, search, sort, totals

LONG = 8192  # number of values from which counting a row is faster than sorting it
MEMORY = 2 << 30  # approximate bytes of temporaries on a GPU
CACHED = 24 << 20  # the same on a CPU
FEW = 63  # number of borders up to which comparing all is faster than searching
BLOCK = 64  # rows compared at once
TABLE, NEAREST, SORT, LEFT = range(4)  # how a counted row gets its codes; LEFT: not here, since its means are not sure


def encode(x: Array, codes: Array, side: Array, exact: bool) -> list[int]:
    """Write codes uint8 (rows, n) and side float32 (rows, k) of x float32 (rows, n); return the rows left out.

    These are rows with NaN or infinity and, for tensors, rows whose result may differ from that of numpy arrays.
    """
    n = x.shape[1]
    with np.errstate(invalid="ignore"):  # bins of infinity
        if n < LONG:
            return _sorted(x, codes, side)
        size = 8 * n + 24 * bins.BINS + 200 * bins.MOST  # above CACHED / 2: one row at a time on a CPU
        return _in_parts(partial(_counted, exact=exact), size, x, codes, side)


def _in_parts(work: Callable[..., list[int]], size: int, *stack: Array) -> list[int]:
    """Call `work` with as many rows at a time as fit in memory at `size` bytes each; return the rows it left out."""
    most = max(1, (CACHED if isinstance(stack[0], np.ndarray) else MEMORY) // size)
    starts = range(0, len(stack[0]), most)
    if len(starts) > 1 and isinstance(stack[0], np.ndarray):
        np.empty(CACHED, np.uint8)  # once freed, glibc keeps this much for the next part, which saves page faults
    return [first + r for first in starts for r in work(*(a[first : first + most] for a in stack))]


def _sorted(x: Array, codes: Array, side: Array) -> list[int]:
    """Compute the means from the distinct values, and assign every value its nearest mean."""
    return _in_parts(_sorted_part, 200 * x.shape[1] + 1200 * side.shape[1], x, codes, side)


def _sorted_part(x: Array, codes: Array, side: Array) -> list[int]:
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


def borders(book: Array, number: Array) -> Array:
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
    if not isinstance(x, np.ndarray) or x.shape[1] < LONG:
        if not isinstance(x, np.ndarray) or border.shape[1] > FEW:
            codes[:] = search(border, x)
            return
        codes[:] = 0
        for first in range(0, len(x), BLOCK):
            block, limits, code = (a[first : first + BLOCK] for a in (x, border, codes))
            for j in range(border.shape[1]):
                code += block > limits[:, j : j + 1]
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
