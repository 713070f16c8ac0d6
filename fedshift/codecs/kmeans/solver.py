"""K-means in one dimension, close to the optimum, for a stack of rows: one row is a stack of one.

In one dimension a cluster is an interval, so a clustering of sorted points v with weights w is a list
of edges 0 = e_0 < e_1 < ... < e_k = m: cluster i consists of points e_i .. e_{i+1} - 1. With prefix sums
of w and w v, the weight and the mean of any cluster take two look-ups, and a step of Lloyd's algorithm
takes k binary searches, for any number of points.

Lloyd's algorithm alone stops at a local optimum near its start. Three additions bring it near the global
one: a start that follows the cube root of the density (Panter and Dite 1951), as the codes of the optimal
quantizer do; exchanges, which merge two close clusters and split a wide one; and sweeps, which move each
edge to its best place within reach.

The points of a row are in its first columns; the last point is repeated, with weight zero, up to the
width of the stack and at least once. Edges are positions in the flattened stack. If a row has fewer than
k clusters, the missing ones are empty and at its end: their edges equal the end of the row, and their
means are NaN, which a search places last.

Numpy arrays and tensors use the same operations. For tensors, no operation depends on the data, so that
nothing waits for a GPU: the number of fills is fixed, and `sure` tells for which rows it was sufficient.
Weights are integers, so their sums are exact in any order. A GPU adds moments in another order than a
CPU; the sums are equal if they fit in 53 bits, as for values of similar magnitude. If magnitudes differ
widely, a mean halfway between two float32 numbers may be rounded to the other one.
"""

from bisect import bisect_left
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from fedshift.codecs.kmeans.arrays import (
    Array,
    arange,
    ascending,
    best,
    cast,
    constant,
    cube_root,
    cumsum,
    device,
    gather,
    known,
    module,
    prefix_sums,
    scatter,
    search,
    sort,
    spread,
    take,
    totals,
)

FILLS = (2, 1, 1, 0, 0)  # passes of fill for tensors: at the start, in each of three rounds, at the end
REACH = (1, 2, 3, 5, 16, 256, 4096)  # points an edge may move in a sweep
TRIED = 1 << 14  # places tried at once in a sweep of numpy arrays, so that they fit into the cache
EAGER = 0.7  # factor on costs: later steps increase the gain of an exchange
TIE = 1e-9  # relative difference of two errors below which another order of summation may swap them


class WeightedPoints(NamedTuple):
    """Points of a stack (rows, m), relative to the middle point of each row, and their prefix sums."""

    v: Array  # float64 (rows, m)
    w: Array  # float64 (rows, m), zero beyond the end
    first: Array  # int64 (rows, 1): position of the first point
    end: Array  # int64 (rows, 1): position beyond the last point
    number: Array  # int64 (rows, 1): of points
    sums: Array  # float64 (2, rows * m): weight and moment below each position

    def rows(self, index: Array) -> "WeightedPoints":
        """Some of the rows; positions remain those in the whole stack."""
        v, w, first, end, number, sums = self
        return WeightedPoints(v[index], w[index], first[index], end[index], number[index], sums)


class Means(NamedTuple):
    """At most k ascending centres per row, the last one repeated up to k."""

    centres: Array  # float64 (rows, k)
    number: Array  # int64 (rows, 1): of clusters
    error: Array  # float64 (rows, 1): sum of w (v - c)^2
    sure: Array  # bool (rows, 1): true if a numpy array certainly has the same result


def kmeans(v: Array, w: Array, number: Array, k: int) -> Means:
    """Means of points v, float64 (rows, m), with weights w, int64; row r has 1 <= number[r] < m points.

    A row with an infinite first or last point is not sure.
    """
    xp, m = module(v), v.shape[1]
    finite = xp.isfinite(v[:, :1]) & xp.isfinite(v[:, -1:])
    if not known(finite):
        v = xp.where(finite, v, 0.0)  # NaN would become an edge
    if m <= k + 1:
        return Means(v[:, arange(v, k).clip(max=m - 1)], number, xp.zeros_like(v[:, :1]), finite)
    with np.errstate(divide="ignore", invalid="ignore"):  # means of empty clusters
        found = _clusters(v, w, number, k)
    few = number <= k
    return Means(
        found.centres if known(~few) else xp.where(few, v[:, :k], found.centres),
        xp.where(few, number, found.number),
        xp.where(few, 0.0, found.error),
        finite & (few | found.sure),
    )


def _clusters(v: Array, w: Array, number: Array, k: int) -> Means:
    """`kmeans` for rows with more than k points."""
    xp = module(v)
    middle = gather(v, number // 2)
    p = measure(v - middle, w, number)
    begin, *rounds, last = FILLS
    filled = [fill(p, start(p, k), begin)]
    e = lloyd(p, lloyd(p, lloyd(p, filled[0])))
    for passes in rounds:
        filled.append(fill(p, exchange(p, e), passes))
        e = sweep(p, lloyd(p, filled[-1]))
    filled.append(e := fill(p, lloyd(p, e), last))
    centres, even = means(p, e), grid(p, k)
    found, other = error(p, centres), error(p, even)
    sure = found >= 0 if xp is np else abs(other - found) > TIE * found
    if not known(other >= found):  # never above the uniform grid
        better = other < found
        e = xp.where(better, sweep(p, lloyd(p, nearest(p, even))), e)
        centres = means(p, e)
        found = xp.where(better, error(p, centres), found)
    centres = (centres + middle).clip(v.take(e[:, :-1]), v.take(e[:, 1:] - 1))
    clusters = (e[:, :-1] < p.end).sum(1)[:, None]
    if not known(clusters == k):
        centres = gather(centres, xp.minimum(arange(v, k)[None], clusters - 1))
    if xp is torch:
        sure &= torch.cat([e[:, -2:-1] for e in filled], dim=1).amax(1, keepdim=True) < p.end
    return Means(centres, clusters, found, sure)


def measure(v: Array, w: Array, number: Array) -> WeightedPoints:
    """Sum moments outwards from the middle point, where v is zero, so that far points do not blur near ones."""
    rows, m = v.shape
    first = arange(v, 0, rows * m, m)[:, None]
    weight = cast(w, "float64")
    sums = prefix_sums(weight, weight * v, number // 2)
    return WeightedPoints(v, weight, first, first + number, number, sums)


def start(p: WeightedPoints, k: int) -> Array:
    """Edges at equal shares of the cube root of the density: sum of (w gap^2)^(1/3)."""
    gap = p.v[:, 1:] - p.v[:, :-1]
    share = p.w[:, 1:] * gap
    share *= gap
    share = cumsum(cube_root(share))
    return edges(p, search(share, arange(share, 1, k) * (share[:, -1:] / k)) + 1)


def means(p: WeightedPoints, e: Array) -> Array:
    """Mean of each cluster, which rounding must not move out of the cluster."""
    below = take(p.sums, e)
    within = below[..., 1:] - below[..., :-1]
    return (within[1] / within[0]).clip(p.v.take(e[:, :-1]), p.v.take(e[:, 1:] - 1))


def lloyd(p: WeightedPoints, e: Array) -> Array:
    """One step: assign every point to the nearest of the means."""
    return nearest(p, means(p, e))


def nearest(p: WeightedPoints, centres: Array) -> Array:
    """Edges between the points nearest to each of the ascending centres."""
    return edges(p, cuts(p, centres))


def cuts(p: WeightedPoints, centres: Array) -> Array:
    """Columns of the first points that are nearer to the next of the ascending centres: (rows, k) -> (rows, k - 1)."""
    return search(p.v, (centres[:, 1:] + centres[:, :-1]) * 0.5)


def edges(p: WeightedPoints, cuts: Array) -> Array:
    """Edges with these ascending cuts (rows, k - 1) between them, and empty clusters last."""
    xp = module(cuts)
    e = xp.concatenate([p.first, xp.minimum(p.first + cuts, p.end), p.end], 1)
    rises = e[:, 1:] > e[:, :-1]
    if known(rises):
        return e
    empty = xp.concatenate([p.first, p.end + 0 * cuts, p.end], 1)
    return scatter(empty, rises.cumsum(1), e[:, 1:])  # equal edges have the same column


def sweep(p: WeightedPoints, e: Array) -> Array:
    """Move every second edge, then the others, to the best of the places within reach between its neighbours."""
    xp, k, (step, far) = module(e), e.shape[1] - 1, (len(e), len(REACH))
    if xp is np and k > 1:
        widest = int((e[:, 2:] - e[:, :-2]).max())
        far = min(far, bisect_left(REACH, widest) + 1)  # longer steps all lead to the same place
        step = max(1, TRIED // (far * k))
    e, shifts = e + 0, _shifts(far, device(e))
    for r in range(0, len(e), step):
        rows, end = e[r : r + step], p.end[r : r + step]
        for i in range(1, min(k, 3)):
            at, left, right = rows[:, i:k:2], rows[:, i - 1 : k - 1 : 2], rows[:, i + 1 :: 2]
            places = (at + shifts).clip(left + 1, right - 1)  # (places, rows, edges)
            below, low, high = (take(p.sums, place) for place in (places, left[None], right[None]))
            lower, upper = below - low, high - below  # weight and moment of the clusters on both sides
            for sums in (lower, upper):
                sums[1] *= sums[1]
                sums[1] /= sums[0]
            score = lower[1] + upper[1]  # the larger these squares, the smaller the squared error
            rows[:, i:k:2] = xp.where(at < end, best(score, places), end)
    return e


def exchange(p: WeightedPoints, e: Array) -> Array:
    """Merge the closest neighbours and split the clusters with the largest gains, as long as the error decreases."""
    xp, k = module(e), e.shape[1] - 1
    at, gain, w, mean = halves(p, e)
    w1, w2 = w[:, :-1], w[:, 1:]
    cost = apart(w1, mean[:, :-1], w2, mean[:, 1:], w1 + w2) * EAGER * _uneven(k - 1, device(e))
    cost = xp.where(e[:, 1:-1] < p.end, cost, np.inf)
    if k == 1:
        return e
    if xp is torch:
        return _exchanged(e, at, gain, cost)
    some = np.flatnonzero(gain.max(1) > cost.min(1))  # other rows would not change
    if not len(some):
        return e
    e = e.copy()
    e[some] = _exchanged(e[some], at[some], gain[some], cost[some])
    return e


def _exchanged(e: Array, at: Array, gain: Array, cost: Array) -> Array:
    """Edges after the exchanges that pay: splits at `at` have these gains, merges of neighbours these costs."""
    xp = module(e)
    none = xp.full_like(gain[:, :1], np.inf)
    cost = xp.concatenate([none, cost, none, none], 1)
    lowest = (cost[:, 1:-1] < cost[:, :-2]) & (cost[:, 1:-1] <= cost[:, 2:])  # so that merges have no cluster in common
    cost = xp.where(lowest, cost[:, 1:-1], np.inf)  # (rows, k); the last column is no merge
    loss, split = ascending(-gain)
    wide = scatter(gain > np.inf, split, -loss > sort(cost))
    cheapest, merge = ascending(xp.where(wide[:, :-1] | wide[:, 1:], np.inf, cost[:, :-1]))
    pays = -loss[:, :-1] > cheapest
    new = xp.where(pays, gather(at, split[:, :-1]), gather(e, merge + 1))
    return sort(scatter(e, merge + 1, new))


def fill(p: WeightedPoints, e: Array, passes: int) -> Array:
    """Split the clusters with the largest gains until there are k, each at most once per pass."""
    xp, k = module(e), e.shape[1] - 1
    if xp is torch:
        for _ in range(passes):
            e = _filled(p, e)
        return e
    while len(some := np.flatnonzero((e[:, -2] == p.end[:, 0]) & (p.number[:, 0] > k))):
        e = e.copy()
        e[some] = _filled(p.rows(some), e[some])
    return e


def _filled(p: WeightedPoints, e: Array) -> Array:
    """Edges after one pass of `fill`."""
    xp = module(e)
    at, gain, _, _ = halves(p, e)
    loss, split = ascending(-gain)
    cut = xp.flip(xp.where(loss <= 0, gather(at, split), p.end), (1,))  # the best last, where edges are missing
    return sort(xp.concatenate([e[:, :1], xp.where(e[:, :-1] == p.end, cut, e[:, 1:])], 1))


def halves(p: WeightedPoints, e: Array) -> tuple[Array, Array, Array, Array]:
    """Split of each cluster at its mean, its gain (-1 for a single point), and the weight and mean of the cluster."""
    below = take(p.sums, e)
    within = below[..., 1:] - below[..., :-1]
    w, mean = within[0], within[1] / within[0]
    at = (p.first + search(p.v, mean)).clip(e[:, :-1] + 1, e[:, 1:] - 1)  # not above e if there is no split
    left = take(p.sums, at) - below[..., :-1]
    right = within - left
    gain = apart(left[0], left[1] / left[0], right[0], right[1] / right[0], w)
    return at, module(e).where(at > e[:, :-1], gain, -1.0), w, mean


def apart(w1: Array, mean1: Array, w2: Array, mean2: Array, w: Array) -> Array:
    """Increase in squared error if two clusters are merged: w1 w2 / w (mean1 - mean2)^2, where w = w1 + w2."""
    d = mean1 - mean2
    return d * d * (w1 * w2 / w)


def grid(p: WeightedPoints, k: int) -> Array:
    """Uniform grid (rows, k) from the first to the last point."""
    low, high = p.v[:, :1], p.v[:, -1:]
    inner = low + arange(p.v, k - 1) * ((high - low) / max(1, k - 1))
    return module(low).concatenate([inner, high], 1)


def error(p: WeightedPoints, centres: Array) -> Array:
    """Sum of w (v - c)^2, where c is the centre nearest to v: (rows, 1)."""
    off = p.v - spread(centres, cuts(p, centres), p.v.shape[1])
    square = p.w * off
    square *= off
    return totals(square, p.number)


@cache
def _shifts(far: int, where: torch.device | None) -> Array:
    """Distances that a sweep tries for each edge, with the first `far` steps: (places, 1, 1)."""
    return constant(np.array([0, *REACH[:far], *(-step for step in REACH[:far])])[:, None, None], where)


@cache
def _uneven(merges: int, where: torch.device | None) -> Array:
    """Factors that create local minima in a run of equal costs."""
    return constant(1 + 1e-9 * (np.arange(merges) * 0.618 % 1), where)
