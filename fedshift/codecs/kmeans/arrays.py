"""Array operations with different names in numpy and torch, so that one implementation works for both.

Rows in main memory are numpy arrays, since a small operation of numpy takes about a tenth of the time of one of torch.
Rows on a GPU are tensors; no operation waits for the GPU. Arrays are (rows, columns).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift.codecs.base import chunks

Array = Any  # a numpy array or a tensor
MANY = 500  # number of values from which a search of all at once is faster than one after another


def module(x: Array) -> Any:
    """The library of x, for operations with the same name in both."""
    return np if isinstance(x, np.ndarray) else torch


def known(flag: Array) -> bool:
    """True if all of flag is true; always False for a tensor, since reading it would wait for the GPU."""
    return isinstance(flag, np.ndarray) and bool(flag.all())


def arange(like: Array, *limits: int) -> Array:
    """Integers on the device of `like`."""
    return np.arange(*limits) if isinstance(like, np.ndarray) else torch.arange(*limits, device=like.device)


def device(x: Array) -> torch.device | None:
    """The device of a tensor; None for a numpy array."""
    return None if isinstance(x, np.ndarray) else x.device


def constant(x: NDArray[Any], where: torch.device | None) -> Array:
    """Return x on a `device`."""
    return x if where is None else torch.from_numpy(x).to(where)


def cast(x: Array, dtype: str) -> Array:
    return x.astype(dtype) if isinstance(x, np.ndarray) else x.to(getattr(torch, dtype))


def take(table: Array, index: Array) -> Array:
    """out[c, ...] = table[c, index[...]]."""
    if isinstance(table, np.ndarray):
        return table.take(index, axis=1)
    return table.index_select(1, index.flatten()).view(len(table), *index.shape)


def gather(x: Array, index: Array) -> Array:
    """out[r, i] = x[r, index[r, i]]."""
    if not isinstance(x, np.ndarray):
        return x.gather(1, index)
    return x.take(index + np.arange(0, x.size, x.shape[1])[:, None])


def scatter(x: Array, index: Array, values: Array) -> Array:
    """A copy of x in which out[r, index[r, i]] = values[r, i]."""
    if not isinstance(x, np.ndarray):
        return x.scatter(1, index, values)
    out = x.copy()
    out[np.arange(len(x))[:, None], index] = values
    return out


def search(rows: Array, values: Array) -> Array:
    """Number of entries of ascending row r that are less than values[r, i]; all of them for NaN."""
    if not isinstance(rows, np.ndarray):
        return torch.searchsorted(rows, values)
    if len(rows) == 1:
        return rows[0].searchsorted(values[0])[None]
    if values.size < MANY:
        return torch.searchsorted(torch.from_numpy(rows), torch.from_numpy(values)).numpy()
    return _search(rows, values, np.arange(0, rows.size, rows.shape[1])[:, None])


def search_down(rows: Array, values: Array) -> Array:
    """Number of entries of ascending row r that are less than values[i, r]; all of them for NaN."""
    if isinstance(rows, np.ndarray) and len(rows) > 1 and values.size >= MANY:
        return _search(rows, values, np.arange(0, rows.size, rows.shape[1]))
    return transposed(search(rows, transposed(values)))


def _search(rows: Array, values: Array, first: Array) -> Array:
    """Binary search of all values at once, without branches, which a CPU would mispredict."""
    table, at, left = rows.ravel(), first + np.zeros(values.shape, first.dtype), rows.shape[1]
    entry, step, above = np.empty(values.shape, rows.dtype), np.empty_like(at), np.empty(values.shape, np.bool_)
    while left:
        half = (left + 1) // 2
        table[half - 1 :].take(at, out=entry, mode="wrap")  # no index is outside, and other modes copy
        np.greater_equal(entry, values, out=above)
        np.multiply(~above, half, out=step)
        at += step
        left -= half
    return at - first


def transposed(x: Array) -> Array:
    """out[i, j] = x[j, i], contiguous."""
    return np.ascontiguousarray(x.T) if isinstance(x, np.ndarray) else x.T.contiguous()


def sort(x: Array) -> Array:
    """Each row in ascending order, NaN last."""
    return np.sort(x, 1) if isinstance(x, np.ndarray) else x.sort(1).values


def ascending(x: Array) -> tuple[Array, Array]:
    """Each row in ascending order, and the original columns of its values; the sort is stable."""
    if not isinstance(x, np.ndarray):
        values, order = x.sort(dim=1, stable=True)
        return values, order
    order = x.argsort(1, kind="stable")
    return gather(x, order), order


def spread(values: Array, cuts: Array, n: int) -> Array:
    """out[r, j] = values[r, number of cuts[r] that are at most j] for all j < n; cuts are ascending."""
    if not isinstance(values, np.ndarray):
        columns = torch.arange(n, dtype=cuts.dtype, device=cuts.device).repeat(len(cuts), 1)
        return values.gather(1, torch.searchsorted(cuts, columns, right=True))
    edges = np.empty((len(cuts), cuts.shape[1] + 2), np.intp)
    edges[:, 0], edges[:, 1:-1], edges[:, -1] = 0, cuts, n
    return values.repeat((edges[:, 1:] - edges[:, :-1]).ravel()).reshape(len(values), n)


def totals(x: Array, end: Array) -> Array:
    """Sum of the first end[r] columns of each row r, beyond which x is zero: (rows, 1).

    The order of summation in numpy depends on the number of summands, so columns beyond the end are left out.
    """
    if not isinstance(x, np.ndarray):
        return x.sum(1, keepdim=True)
    most = end.max()
    out = x[:, :most].sum(1, keepdims=True)
    for r in np.flatnonzero(end != most):
        out[r] = x[r, : end[r, 0]].sum()
    return out


def cumsum(x: Array, out: Array | None = None) -> Array:
    """Sums of the first columns of each row, added from left to right."""
    if not isinstance(x, np.ndarray):
        return x.cumsum(1)
    out = np.empty_like(x) if out is None else out
    torch.cumsum(torch.from_numpy(x), 1, out=torch.from_numpy(out))  # takes a third of the time of numpy
    return out


def rounded_sums(x: Array, start: Array, large: Array) -> Array:
    """out[r, j] = sum of (x + start - large)[r, .. j - 1], float64: (rows, n) -> (rows, n + 1)."""
    if not isinstance(x, np.ndarray):
        return torch.nn.functional.pad((x + start - large).cumsum(1), (1, 0))
    out, rows = np.empty((len(x), x.shape[1] + 1)), torch.from_numpy(x)
    out[:, 0] = 0
    for r, _ in chunks(rows):  # torch broadcasts in half of the time of numpy
        wide = rows[r].double().add_(torch.from_numpy(start[r])).sub_(torch.from_numpy(large[r]))
        torch.cumsum(wide, 1, out=torch.from_numpy(out[r, 1:]))
    return out


def prefix_sums(w: Array, x: Array, middle: Array) -> Array:
    """Sums of w from the first column, and of x from the middle of each row: (2, rows * columns).

    out[0, r, j] = sum of w[r, .. j - 1]; out[1, r, j] = sum of x[r, middle .. j - 1] or, left of the middle, minus the
    sum of x[r, j .. middle - 1].
    """
    if not isinstance(x, np.ndarray):
        right = torch.where(torch.arange(x.shape[1], device=x.device) < middle, 0.0, x)
        left = (x - right).flip(1).cumsum(1).flip(1)
        outwards = torch.nn.functional.pad(right[:, :-1].cumsum(1), (1, 0)) - left
        return torch.cat([w.cumsum(1) - w, outwards]).view(2, -1)
    out = np.empty((2, *x.shape))
    out[0, :, 0] = 0
    cumsum(w[:, :-1], out[0, :, 1:])
    usual = middle.max()  # that of all rows without equal values
    others = np.flatnonzero(middle != usual).tolist()
    for r, i in [(slice(None), usual), *((slice(r, r + 1), middle[r, 0]) for r in others)]:
        total, part = out[1, r], x[r]
        total[:, i] = 0
        cumsum(part[:, i:-1], total[:, i + 1 :])
        np.negative(cumsum(part[:, :i][:, ::-1].copy())[:, ::-1], out=total[:, :i])
    return out.reshape(2, -1)


def running_max(x: Array) -> Array:
    """out[i, r] = greatest of x[.. i, r]."""
    return np.maximum.accumulate(x, 0) if isinstance(x, np.ndarray) else x.cummax(0).values


def cube_root(x: Array) -> Array:
    """Cube root of nonnegative numbers."""
    if isinstance(x, np.ndarray):
        return np.cbrt(x)
    root = x.pow(1 / 3)
    return torch.where(x > 0, root - (root - x / (root * root)) / 3, 0.0)  # one step of Newton's method


def places(flag: Array, most: int, beyond: int) -> tuple[Array, Array]:
    """Columns that are true in each row, in order, then `beyond`; and their number: (rows, 1).

    The width of the first result is the largest number plus one; for tensors it is most + 1.
    """
    rows, n = flag.shape
    if not isinstance(flag, np.ndarray):
        run = flag.flatten().cumsum(0, dtype=torch.int32).view(flag.shape)  # over all rows: one fast scan
        before = torch.nn.functional.pad(run[:-1, -1:], (0, 0, 1, 0))
        wanted = before + torch.arange(1, most + 2, dtype=torch.int32, device=flag.device)
        return torch.searchsorted(run, wanted).clamp_(max=beyond), (run[:, -1:] - before).long()
    index = np.flatnonzero(flag)
    first = index.searchsorted(np.arange(rows + 1) * n)
    number = first[1:] - first[:-1]
    out = np.full((rows, number.max() + 1), beyond)
    if rows == 1:
        out[0, :-1] = index
    else:
        row = np.arange(rows).repeat(number)
        out[row, np.arange(len(index)) - first[row]] = index - row * n
    return out, number[:, None]


def runs(x: Array) -> tuple[Array, Array, Array]:
    """Value and length of each run of equal values in ascending rows x, and the number of runs: (rows, 1).

    The last value of a row is repeated, with length zero, up to the common width and at least once.
    """
    xp, (rows, n) = module(x), x.shape
    ends = xp.ones_like(x, dtype=np.bool_ if xp is np else torch.bool)
    xp.not_equal(x[:, 1:], x[:, :-1], out=ends[:, :-1])
    if xp is np and rows > 1 and (distinct := ends.all(1)).any():
        value, length, number = (
            np.concatenate([x, x[:, -1:]], 1),
            np.ones((rows, n + 1), np.intp),
            np.full((rows, 1), n),
        )
        length[:, -1] = 0
        if len(equal := np.flatnonzero(~distinct)):
            some, lengths, number[equal] = runs(x[equal])
            value[equal] = np.pad(some, ((0, 0), (0, n + 1 - some.shape[1])), "edge")
            length[equal] = np.pad(lengths, ((0, 0), (0, n + 1 - some.shape[1])))
        return value, length, number
    last, number = places(ends, n, n - 1)
    length = last + 1
    length[:, 1:] -= last[:, :-1] + 1
    return gather(x, last), length, number


def best(score: Array, choices: Array) -> Array:
    """out[...] = choices[i, ...] where score[i, ...] is the greatest, the first of equal ones; scores are not NaN."""
    if not isinstance(score, np.ndarray):
        return choices.gather(0, score.argmax(0, keepdim=True))[0]
    return choices.take(score.argmax(0) * score[0].size + np.arange(score[0].size).reshape(score.shape[1:]))
