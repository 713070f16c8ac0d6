"""K-means in one dimension for rows with many values per mean, by dynamic programming over all edges at once.

In a sorted row a cluster is an interval, so a clustering is a list of edges 0 = e_0 < e_1 < ... < e_k = n, as in
`solver`. Here every value is a point of weight one, so the weight of a cluster is the difference of its edges. The
squared error is the sum of all squares minus

    sum_i (S(e_{i+1}) - S(e_i))^2 / (e_{i+1} - e_i),        S(j) = sum of the first j values.

From a start that follows the cube root of the density, a move offers three places to each edge and takes the best of
all 3^(k - 1) combinations: clusters are joined in pairs, and for each pair of outer places the best inner place is
kept. Lloyd's algorithm, and sweeps over single edges, need many more steps to move all edges in one direction.

The result is used only if a merge of two clusters and the split of another one would gain little, no two means are
nearly equal, and the uniform grid is worse. Rows with gaps, heaps, outliers or few distinct values often fail; `solver`
handles them.

Values are rounded to 39 bits, and shares of the start to integers, so that all sums are exact. All other operations
are elementwise, so that numpy arrays and tensors have equal results, to the last bit.
"""

from typing import NamedTuple

import numpy as np

from fedshift.codecs.kmeans.arrays import (
    Array,
    arange,
    cast,
    cube_root,
    cumsum,
    known,
    module,
    rounded_sums,
    running_max,
    search_down,
    transposed,
)
from fedshift.codecs.kmeans.solver import EAGER, apart

LONGEST = 1 << 14  # sums of this many values are exact
FEWEST, MOST = 8, 64  # means: an edge between fewer may be far from its start, and among more, an exchange often pays
PER_MEAN = 40  # least number of values per mean
SAMPLES = 12  # per mean: the least number of values that the start looks at
MOVES = (2, 3)  # an edge moves by 2^-2, then by 2^-3 of a neighbouring cluster
BITS = 39  # of a value
SHARE = 2.0**30  # unit of the shares of the start
LITTLE = 0.02  # share of the error, about, that an exchange may gain
CLOSE = 2.0**-20  # least distance of two means, in units of the range, for which sums are exact enough
MARGIN = 2.0**-36  # mean squared error, in units of the squared range, by which the grid must be worse


class Points(NamedTuple):
    """Ascending rows and their prefix sums. The rows of the stack are the last axis of all other arrays."""

    x: Array  # float32 (rows, n)
    middle: Array  # float64 (rows,): middle value, rounded to the unit of the row
    sums: Array  # float64 (rows, n + 1): S(j) of x - middle, rounded to the unit of the row

    def cuts(self, y: Array) -> Array:
        """Number of values of each row below middle + y: (..., rows) -> (..., rows)."""
        return search_down(self.x, cast(y + self.middle, "float32"))

    def below(self, at: Array) -> Array:
        """S(at): (..., rows) -> (..., rows)."""
        return self.sums.take(at + arange(at, 0, self.sums.shape[0] * self.sums.shape[1], self.sums.shape[1]))

    def clusters(self, e: Array) -> tuple[Array, Array]:
        """Sum and number of the values of each cluster, float64 (k, rows)."""
        s, at = self.below(e), cast(e, "float64")
        return s[1:] - s[:-1], at[1:] - at[:-1]


def suits(n: int, k: int) -> bool:
    """True if rows of n values have enough values for k means, a power of two, and not too many for exact sums."""
    return FEWEST <= k <= MOST and k & (k - 1) == 0 and PER_MEAN * k <= n <= LONGEST


def kmeans(x: Array, k: int) -> tuple[Array, Array]:
    """Means of ascending rows x, float32 (rows, n), as float64 (rows, k), and if they are good, bool (rows, 1).

    n and k must suit. Rows that contain NaN or infinity are not good.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # in rows that are not good
        p = measure(x)
        e = start(p, k)
        for part in MOVES:
            e = move(p, e, part)
        e = lloyd(p, lloyd(p, e))
        s, w = p.clusters(e)
        c = s / w
        first = arange(e, 0, x.shape[0] * x.shape[1], x.shape[1])
        low, high = x.take(e[:-1] + first), x.take(e[1:] - 1 + first)  # first and last value of each cluster
        whole = (low[1:] > high[:-1]).all(0)  # equal values are in one cluster
        means = (c + p.middle).clip(low, high) + 0.0  # no negative zero
        return transposed(means), (whole & good(p, e, s, w, c))[:, None]


def measure(x: Array) -> Points:
    """Sums of the values relative to the middle one, rounded to a unit such that all have at most 39 bits.

    Adding a number of 53 bits in this unit, and subtracting it, rounds.
    """
    xp, middle = module(x), cast(x[:, x.shape[1] // 2], "float64")
    largest = xp.maximum(middle - x[:, 0], x[:, -1] - middle)
    exponent = (largest.view(xp.int64) >> 52).clip(BITS, 2046)  # of the largest magnitude, plus 1023
    large = 1.5 * 2.0**52 * ((exponent - BITS + 1) << 52).view(xp.float64)
    start = large - middle
    return Points(x, large - start, rounded_sums(x, start[:, None], large[:, None]))


def start(p: Points, k: int) -> Array:
    """Edges at equal shares of the cube root of the density: sum of (w gap^2)^(1/3), over every few values."""
    xp, n = module(p.x), p.x.shape[1]
    every = max(1, n // (SAMPLES * k))
    some = cast(xp.concatenate([p.x[:, ::every], p.x[:, -1:]], 1), "float64")  # the last gap has fewer values
    gap = some[:, 1:] - some[:, :-1]
    gap /= some[:, -1:] - some[:, :1]
    gap *= gap
    gap[:, -1] *= (n - 1) % every / every
    share = cube_root(gap)
    share *= SHARE
    share = cumsum(xp.round(share, out=share))
    cuts = search_down(share, arange(share, 1, k)[:, None] * (share[:, -1] / k))  # exact: k is a power of two
    return edges(p, cuts * every + (every + 1) // 2)


def edges(p: Points, cuts: Array) -> Array:
    """Edges with these cuts (k - 1, rows) between the first and the last one, shifted so that no cluster is empty."""
    xp, (n, k), first = module(cuts), (p.x.shape[1], len(cuts) + 1), 0 * cuts[:1]
    e = xp.concatenate([first, cuts, first + n], 0)
    if known(e[1:] > e[:-1]):
        return e
    inner = arange(cuts, 1, k)[:, None]
    return xp.concatenate([first, running_max(cuts - inner).clip(0, n - k) + inner, first + n], 0)


def lloyd(p: Points, e: Array) -> Array:
    """Assign every value to the nearest of the means."""
    s, w = p.clusters(e)
    c = s / w
    return edges(p, p.cuts((c[1:] + c[:-1]) * 0.5))


def move(p: Points, e: Array, part: int) -> Array:
    """Move all edges by 2^-part of a neighbouring cluster, to either side or not at all, to the best places.

    Edges remain ascending, since none moves half of the way to the next one.
    """
    xp, (edges, rows) = module(e), e.shape
    size = e[1:] - e[:-1]
    step = xp.minimum((size >> part) + 1, (size - 1) >> 1)
    places = xp.stack([e, e, e])  # (3, k + 1, rows)
    places[1, 1:-1] -= step[:-1]
    places[2, 1:-1] += step[1:]
    s, at = p.below(places), cast(places, "float64")
    gain = s[:, None, 1:] - s[:, :-1]  # (right place, left place, clusters, rows)
    gain *= gain
    gain /= at[:, None, 1:] - at[:, :-1]
    gain = cast(gain - gain[0, 0], "float32")  # a difference needs fewer bits
    inner = []
    while gain.shape[2] > 1:
        gain, place = _join(gain)
        inner.append(place)
    chosen = xp.zeros_like(e[:2])  # of the first and the last edge, whose places are equal
    for place in inner[::-1]:
        plane = place.shape[2] * rows
        pairs = (chosen[1:] * len(places) + chosen[:-1]) * plane + arange(e, plane).reshape(-1, rows)
        between = xp.stack([chosen[:-1], cast(place.take(pairs), "int64")], 1)
        chosen = xp.concatenate([between.reshape(-1, rows), chosen[-1:]], 0)
    return places.take(chosen * (edges * rows) + arange(e, edges * rows).reshape(edges, rows))


def _join(gain: Array) -> tuple[Array, Array]:
    """Gains of pairs of neighbouring clusters, and the best place between them, uint8 (right, left, pairs, rows)."""
    xp, left, right = module(gain), gain[:, :, ::2], gain[:, :, 1::2]
    stay, lower, higher = (left[inner] + right[:, inner, None] for inner in range(3))
    best = xp.maximum(stay, lower)
    place = xp.maximum(cast(lower > stay, "uint8"), cast(higher > best, "uint8") * 2)
    return xp.maximum(best, higher), place


def good(p: Points, e: Array, s: Array, w: Array, c: Array) -> Array:
    """True for rows with clusters of sums s, weights w and means c that pass all checks: (rows,).

    A merge and a split together would gain little, no two means are nearly equal, and the uniform grid is worse.
    """
    xp, n, k = module(e), p.x.shape[1], len(c)
    low, high = p.sums[:, 1], p.sums[:, -1] - p.sums[:, -2]  # first and last value
    span = high - low
    grid = low + arange(e, k)[:, None] * (span / (k - 1))
    cuts = p.cuts(xp.concatenate([(grid[1:] + grid[:-1]) * 0.5, c], 0))
    at = cuts[k - 1 :].clip(e[:-1] + 1, e[1:] - 1)  # splits at the means; not above e if there is none
    left, number = p.below(at) - p.below(e[:-1]), cast(at - e[:-1], "float64")
    gain = apart(number, left / number, w - number, (s - left) / (w - number), w)
    gain = xp.where(number > 0, gain, 0.0)
    cost = apart(w[:-1], c[:-1], w[1:], c[1:], w[:-1] + w[1:])
    end = xp.zeros_like(cuts[:1])
    grid_s, grid_w = p.clusters(xp.concatenate([end, cuts[: k - 1], end + n], 0))
    better = s * c - grid * (2 * grid_s - grid * grid_w)
    return (
        (xp.amax(gain, 0) - EAGER * xp.amin(cost, 0) <= LITTLE * _sum(gain))
        & (xp.amin(c[1:] - c[:-1], 0) >= CLOSE * span)
        & (_sum(better) >= MARGIN * n * (span * span))
    )


def _sum(x: Array) -> Array:
    """Sum over the first axis, in the same order for numpy arrays and tensors: (k, rows) -> (rows,)."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]
