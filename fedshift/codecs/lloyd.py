"""The k means of a line, close to the best.

In one dimension a cluster is an interval, so a clustering of sorted points v with weights w is a
list of edges 0 = e_0 < e_1 < ... < e_k = m: cluster i holds points e_i .. e_{i+1} - 1. With prefix
sums of w and w v, the weight and the mean of any cluster take two look-ups, and a step of Lloyd's
algorithm takes k binary searches, however many points there are.

Lloyd's algorithm alone stops in whatever valley it starts in. Three things bring it near the
optimum: a start that follows the cube root of the density (Panter and Dite 1951), which is where
the best quantizer puts its codes; exchanges, which merge two clusters that are hardly apart and
split one that is too wide; and sweeps, which move each edge to its best place within reach.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Edges = NDArray[np.intp]

ROUNDS = 3  # of exchange, Lloyd and sweep
REACH = (1, 2, 3, 5, 16, 256, 4096)  # points an edge may move in a sweep
EAGER = 0.7  # an exchange settles with its neighbours, so it gains more than its first step shows


class Line(NamedTuple):
    """Sorted points and their weights (m,), and the prefix sums (m + 1,) of their weights and moments."""

    v: Floats
    w: Floats
    weight: Floats
    moment: Floats

    def within(self, e: Edges) -> tuple[Floats, Floats]:
        """Weight and moment of each cluster."""
        w, s = self.weight[e], self.moment[e]
        return w[1:] - w[:-1], s[1:] - s[:-1]

    def means(self, e: Edges) -> Floats:
        w, s = self.within(e)
        return _inside(self.v, e, s / w)


def kmeans(v: Floats, w: Floats, k: int) -> tuple[Floats, float]:
    """At most k sorted centres for the sorted distinct points v with weights w, and their squared error."""
    if len(v) <= k:
        return v, 0.0
    middle = v[len(v) // 2]
    line = measured(v - middle, w)
    e = fill(line, start(line, k), k)
    for _ in range(3):
        e = lloyd(line, means_of=e)
    for _ in range(ROUNDS):
        e = sweep(line, lloyd(line, means_of=exchange(line, e, k)))
    e = fill(line, lloyd(line, means_of=e), k)
    found = error(line, line.means(e))
    even = np.linspace(line.v[0], line.v[-1], k)
    if error(line, even) < found:  # never above the uniform grid
        e = sweep(line, lloyd(line, means_of=nearest(line, even)))
        found = error(line, line.means(e))
    return _inside(v, e, line.means(e) + middle), found


def measured(v: Floats, w: Floats) -> Line:
    """Sums that run outwards from the middle point, where v is zero: far points do not blur the near ones."""
    m = len(v) // 2
    moment = w * v
    left, right = np.cumsum(moment[:m][::-1])[::-1], np.cumsum(moment[m:])
    return Line(v, w, np.append(0.0, np.cumsum(w)), np.concatenate([-left, [0.0], right]))


def start(line: Line, k: int) -> Edges:
    """Edges at equal shares of the cube root of density: sum of (w gap^2)^(1/3)."""
    gap = line.v[1:] - line.v[:-1]
    share = np.cumsum(np.cbrt(line.w[1:] * gap * gap))
    return _edges(line, share.searchsorted(np.arange(1, k) * (share[-1] / k)) + 1)


def lloyd(line: Line, means_of: Edges) -> Edges:
    """One step: every point to the nearest of the means."""
    return nearest(line, line.means(means_of))


def nearest(line: Line, centres: Floats) -> Edges:
    return _edges(line, line.v.searchsorted((centres[1:] + centres[:-1]) * 0.5))


def sweep(line: Line, e: Edges) -> Edges:
    """Every second edge, then the others, to the best of the places within reach between its neighbours."""
    e, k = e.copy(), len(e) - 1
    reach = np.array([0, *REACH, *(-step for step in REACH)])[:, None]
    for first in (1, 2):
        here = e[first:k:2]
        left, right = e[first - 1 : k - 1 : 2], e[first + 1 :: 2]
        places = np.minimum(np.maximum(here + reach, left + 1), right - 1)  # (places, edges)
        w, s = line.weight[places], line.moment[places]
        before = (s - line.moment[left]) ** 2 / (w - line.weight[left])
        after = (line.moment[right] - s) ** 2 / (line.weight[right] - w)
        if len(here):  # the larger these squares over weights, the smaller the squared error
            e[first:k:2] = places[(before + after).argmax(0), np.arange(len(here))]
    return e


def exchange(line: Line, e: Edges, k: int) -> Edges:
    """Merge the neighbours that are least apart and split the clusters that gain the most, while that pays."""
    w, s = line.within(e)
    at, gain = halves(line, e, w, s)
    cost = apart(w[:-1], s[:-1], w[1:], s[1:]) * EAGER
    cost *= 1 + 1e-9 * (np.arange(len(cost)) * 0.618 % 1)  # makes minima in a run of equal costs
    lowest = np.ones(len(cost), bool)  # merges must not share a cluster, so only local minima count
    lowest[1:] &= cost[1:] < cost[:-1]
    lowest[:-1] &= cost[:-1] <= cost[1:]
    merge = np.flatnonzero(lowest)
    merge = merge[np.argsort(cost[merge], kind="stable")]
    split = np.argsort(-gain, kind="stable")
    wide = np.zeros(len(gain), bool)
    wide[split[: _paying(gain[split], cost[merge])]] = True
    merge = merge[~(wide[merge] | wide[merge + 1])]
    many = _paying(gain[split], cost[merge])
    if many:
        kept = np.ones(len(e), bool)
        kept[merge[:many] + 1] = False
        e = np.sort(np.concatenate([e[kept], at[split[:many]]]))
    return fill(line, e, k)


def fill(line: Line, e: Edges, k: int) -> Edges:
    """Split the widest clusters until there are k; as many points are distinct, so there is one to split."""
    while (missing := k + 1 - len(e)) > 0:
        at, gain = halves(line, e, *line.within(e))
        split = np.argsort(-gain, kind="stable")[:missing]
        e = np.sort(np.concatenate([e, at[split[gain[split] >= 0]]]))
    return e


def halves(line: Line, e: Edges, w: Floats, s: Floats) -> tuple[Edges, Floats]:
    """Where each cluster splits at its mean, and what that gains; a single point cannot split: -1."""
    at = np.minimum(np.maximum(line.v.searchsorted(s / w), e[:-1] + 1), np.maximum(e[1:] - 1, e[:-1] + 1))
    left_w, left_s = line.weight[at] - line.weight[e[:-1]], line.moment[at] - line.moment[e[:-1]]
    single = at == e[1:]
    gain = apart(left_w, left_s, np.where(single, 1.0, w - left_w), s - left_s)
    gain[single] = -1.0  # all others are numbers, zero or more: no weight is zero
    return at, gain


def apart(w1: Floats, s1: Floats, w2: Floats, s2: Floats) -> Floats:
    """What keeping two clusters apart saves in squared error: w1 w2 / (w1 + w2) (mean1 - mean2)^2."""
    d = s1 / w1 - s2 / w2
    gain: Floats = d * d * (w1 * w2 / (w1 + w2))
    return gain


def error(line: Line, centres: Floats) -> float:
    """Sum of w (v - c)^2, where c is the centre nearest to v."""
    cuts = line.v.searchsorted((centres[1:] + centres[:-1]) * 0.5)
    off = line.v - centres.repeat(np.diff(cuts, prepend=0, append=len(line.v)))
    return float((line.w * off * off).sum())  # a dot product would differ with the number of threads


def _paying(gains: Floats, costs: Floats) -> int:
    """How many of the best splits pay for as many of the cheapest merges; both are sorted."""
    many = min(len(gains), len(costs))
    return int(np.count_nonzero(gains[:many] > costs[:many]))


def _inside(v: Floats, e: Edges, means: Floats) -> Floats:
    """No mean leaves its cluster by rounding: they ascend, and a single point is its own mean."""
    return np.minimum(np.maximum(means, v[e[:-1]]), v[e[1:] - 1])


def _edges(line: Line, cuts: Edges) -> Edges:
    """The edges with these ascending cuts between them, less the empty clusters."""
    e = np.empty(len(cuts) + 2, np.intp)
    e[0], e[1:-1], e[-1] = 0, cuts, len(line.v)
    some = e[1:] > e[:-1]
    return e if some.all() else e[np.append(True, some)]
