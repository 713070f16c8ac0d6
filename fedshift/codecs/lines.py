"""`lloyd.kmeans` for many lines at once, on any device: the same steps, formula by formula.

A row holds its points in its first columns; the last point is repeated, with no weight, up to the
width of the longest row and at least once. Clusters that a row lacks stand at its end, empty: their
edges are all m, and their means NaN, which no search comes across. So every row has k + 1 edges,
and a step takes the same operations whatever is in the rows: nothing waits for the device.

What depends on the data is bounded instead: a GPU fills a set number of times, and the uniform grid is
compared with, not taken. `sure` says which rows that was enough for; the others are for `lloyd.kmeans`.

Weights are whole numbers, so their sums are exact in any order. Those of moments are the same to the
last bit on a CPU, where both solvers add one after the other. A GPU adds in another order, which is the
same where sums fit 53 bits, as those of values of one scale do; where values are of all scales, a mean
that lies halfway between two float32 numbers may be rounded to the other.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshift.codecs.lloyd import EAGER, REACH, ROUNDS

PASSES = (2, *(1, 1, 0)[:ROUNDS], 0)  # of the fills, where nothing waits: at the start, in each exchange, at the end
ASKED = ("cpu",)  # devices that say at once whether a row still lacks clusters: there, as many as it takes
TIE = 1e-9  # errors this close, as a share, are left to the solver of one line


class Lines(NamedTuple):
    """Points (rows, m) and weights, and what an edge is looked up in."""

    v: Tensor  # float64 (rows, m), less the middle point
    w: Tensor  # float64 (rows, m), zero beyond the end
    end: Tensor  # int64 (rows, 1): points of the row
    ahead: Tensor  # int64 (rows, 2): -1 and 0, which stand before all cuts
    twice: Tensor  # 2 v: where the sum of two means falls, their midpoint does
    table: Tensor  # float64 (4, rows, m): at each edge the weight and moment below it, the points above and below it
    share: Tensor  # float64 (rows, m): sum of (w gap^2)^(1/3) up to each point, gap being that below it

    def sums(self, e: Tensor) -> Tensor:
        """Weight and moment below each edge: (rows, edges) -> (2, rows, edges)."""
        return self.table[:2].gather(2, e.expand(2, -1, -1))

    def means(self, e: Tensor) -> Tensor:
        """No mean leaves its cluster by rounding."""
        at = self.table.gather(2, e.expand(4, -1, -1))
        within = at[:2, :, 1:] - at[:2, :, :-1]
        return torch.clamp(within[1] / within[0], at[2, :, :-1], at[3, :, 1:])


class Means(NamedTuple):
    """For each row at most k sorted centres, the last repeated; how many; their squared error; whether to trust it."""

    centres: Tensor  # float64 (rows, k)
    number: Tensor  # int64 (rows, 1)
    error: Tensor  # float64 (rows,)
    sure: Tensor  # bool (rows,)


def kmeans(v: Tensor, w: Tensor, end: Tensor, k: int) -> Means:
    """v, w float64 (rows, m), with 1 <= end < m points in a row, and k < m; a row that is not finite is not sure."""
    finite = v.isfinite().all(1)
    v = torch.where(finite[:, None], v, 0.0)  # NaN would end up among the edges
    if k + 1 == v.shape[1]:
        return Means(v[:, :k], end, v.new_zeros(len(v)), finite)
    few = (end <= k)[:, 0]
    middle = v.gather(1, end // 2)
    lines = measured(v - middle, w, end)
    first, *rounds, last = PASSES
    e = fill(lines, start(lines, k), first)
    filled = [e]
    for _ in range(3):
        e = lloyd(lines, e)
    for passes in rounds:
        filled.append(e := fill(lines, exchange(lines, e), passes))
        e = sweep(lines, lloyd(lines, e))
    filled.append(e := fill(lines, lloyd(lines, e), last))
    means = lines.means(e)
    found, even = error(lines, means), error(lines, grid(lines, k))
    full = torch.cat([e[:, -2:-1] for e in filled], dim=1) < end
    sure = full.all(1) & ~(even < found * (1 + TIE))
    centres = torch.clamp(means + middle, v.gather(1, e[:, :-1]), v.gather(1, e[:, 1:] - 1))
    return Means(
        torch.where(few[:, None], v[:, :k], centres),
        end.clamp(max=k),
        found.masked_fill(few, 0.0),
        finite & (few | sure),
    )


def measured(v: Tensor, w: Tensor, end: Tensor) -> Lines:
    """Sums that run outwards from the middle point, where v is zero."""
    rows, m = v.shape
    table = v.new_zeros(4, rows, m)
    table[2], table[3, :, 0], table[3, :, 1:] = v, v[:, 0], v[:, :-1]
    gap = v - table[3]
    moment = w * v
    right = torch.where(torch.arange(m, device=v.device) < end // 2, 0.0, moment)
    left = (moment - right).flip(1)
    runs = torch.cat([w, right, left, cube_root(w * gap * gap)]).cumsum(1).view(4, rows, m)
    table[:2, :, 1:] = runs[:2, :, :-1]
    table[1] -= runs[2].flip(1)
    ahead = torch.arange(-1, 1, device=v.device).expand(rows, 2)
    return Lines(table[2], w, end, ahead, 2 * v, table, runs[3])


def start(lines: Lines, k: int) -> Tensor:
    """Edges at equal shares of the cube root of density: sum of (w gap^2)^(1/3)."""
    target = torch.arange(1, k, device=lines.v.device) * (lines.share[:, -1:] / k)
    return _edges(lines, torch.searchsorted(lines.share, target))


def cube_root(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return torch.from_numpy(np.cbrt(x.numpy()))
    root = x.pow(1 / 3)
    return torch.where(x > 0, root - (root - x / (root * root)) / 3, 0.0)  # a step of Newton's for the last digit


def lloyd(lines: Lines, means_of: Tensor) -> Tensor:
    """One step: every point to the nearest of the means."""
    centres = lines.means(means_of)
    return _edges(lines, torch.searchsorted(lines.twice, centres[:, 1:] + centres[:, :-1]))


def sweep(lines: Lines, e: Tensor) -> Tensor:
    """Every second edge, then the others, to the best of the places within reach between its neighbours."""
    e, k = e.clone(), e.shape[1] - 1
    for first in range(1, min(k, 3)):
        here, left, right = e[:, first:k:2], e[:, first - 1 : k - 1 : 2], e[:, first + 1 :: 2]  # (rows, edges)
        places = torch.clamp(here[:, None] + _reach(e.device), (left + 1)[:, None], (right - 1)[:, None])
        below = lines.sums(places.flatten(1)).view(2, *places.shape)  # (2, rows, places, edges)
        beside = lines.sums(e)[..., first - 1 :].unfold(2, 3, 2)[..., ::2]  # (2, rows, edges, left and right)
        within = below - beside.movedim(3, 0)[:, :, :, None]  # less than nothing at the right
        squares = within[:, 1].square() / within[:, 0]  # the larger, the smaller the squared error
        best = (squares[0] - squares[1]).argmax(1, keepdim=True)
        e[:, first:k:2] = torch.where(here < lines.end, places.gather(1, best)[:, 0], here)
    return e


def exchange(lines: Lines, e: Tensor) -> Tensor:
    """Merge the neighbours that are least apart and split the clusters that gain the most, while that pays."""
    at, gain, w, mean = halves(lines, e)
    w1, w2 = w[:, :-1], w[:, 1:]
    cost = apart(w1, mean[:, :-1], w2, mean[:, 1:], w1 + w2) * EAGER * _uneven(w1.shape[1], e.device)
    cost.masked_fill_(e[:, 1:-1] == lines.end, torch.inf)
    edged = torch.nn.functional.pad(cost, (1, 2), value=torch.inf)
    cost = edged[:, 1:-1]  # (rows, k), the last of them no merge
    cost = cost.masked_fill((cost >= edged[:, :-2]) | (cost > edged[:, 2:]), torch.inf)  # so that none share a cluster
    (cheapest, loss), (_, split) = torch.stack([cost, -gain]).sort(dim=2, stable=True)
    gain = -loss
    wide = torch.zeros_like(gain, dtype=torch.bool).scatter_(1, split, gain > cheapest)
    cost[:, :-1].masked_fill_(wide[:, :-1] | wide[:, 1:], torch.inf)
    cheapest, merge = cost[:, :-1].sort(dim=1, stable=True)
    merged = merge + 1  # the edge that goes
    new = torch.where(gain[:, :-1] > cheapest, at.gather(1, split[:, :-1]), e.gather(1, merged))
    return e.scatter(1, merged, new).sort(1).values


def fill(lines: Lines, e: Tensor, passes: int) -> Tensor:
    """Split the widest clusters until there are k; each pass splits any cluster once."""
    while _lacking(lines, e) if e.device.type in ASKED else passes > 0:
        at, gain, _, _ = halves(lines, e)
        gain, split = gain.sort(dim=1, descending=True, stable=True)
        cut = torch.where(gain >= 0, at.gather(1, split), lines.end).flip(1)  # the best comes last, where edges lack
        lack = e[:, :-1] == lines.end  # of edges 1 .. k
        e = torch.cat([e[:, :1], torch.where(lack, cut, e[:, 1:])], dim=1).sort(1).values
        passes -= 1
    return e


def _lacking(lines: Lines, e: Tensor) -> bool:
    return bool(((e[:, -2:-1] == lines.end) & (lines.end >= e.shape[1])).any())


def halves(lines: Lines, e: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where each cluster splits at its mean, what that gains (-1 where it cannot), its weight and its mean."""
    below = lines.sums(e)
    within = below[..., 1:] - below[..., :-1]
    w, mean = within[0], within[1] / within[0]
    at = torch.clamp(torch.searchsorted(lines.v, mean), e[:, :-1] + 1, e[:, 1:] - 1)  # e or less where it cannot
    left = lines.sums(at) - below[..., :-1]
    right = within - left
    gain = apart(left[0], left[1] / left[0], right[0], right[1] / right[0], w)
    return at, gain.masked_fill_(at <= e[:, :-1], -1.0), w, mean


def apart(w1: Tensor, mean1: Tensor, w2: Tensor, mean2: Tensor, w: Tensor) -> Tensor:
    """What keeping two clusters apart saves in squared error: w1 w2 / w (mean1 - mean2)^2, where w = w1 + w2."""
    d = mean1 - mean2
    return d * d * (w1 * w2 / w)


def grid(lines: Lines, k: int) -> Tensor:
    """The uniform grid (rows, k) from the least to the greatest point."""
    low, high = lines.v[:, :1], lines.v[:, -1:]
    return low + torch.arange(k, device=low.device) * ((high - low) / (k - 1))


def error(lines: Lines, centres: Tensor) -> Tensor:
    """Sum of w (v - c)^2, where c is the centre nearest to v: (rows,)."""
    border = (centres[:, 1:] + centres[:, :-1]).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    off = lines.v - centres.gather(1, torch.searchsorted(border, lines.twice, right=True))
    return (lines.w * off * off).sum(1)


def _edges(lines: Lines, cuts: Tensor) -> Tensor:
    """The edges with these ascending cuts (rows, k - 1) between them, the empty clusters moved to the end."""
    e = torch.cat([lines.ahead, torch.minimum(cuts, lines.end), lines.end], dim=1)
    rank = (e[:, 1:] > e[:, :-1]).cumsum(1)  # equal edges share one
    return lines.end.expand(e.shape).scatter(1, rank, e[:, 1:])[:, 1:]


@cache
def _reach(device: torch.device) -> Tensor:
    """What a sweep adds to an edge: (places, 1)."""
    return torch.tensor([0, *REACH, *(-step for step in REACH)], device=device)[:, None]


@cache
def _uneven(merges: int, device: torch.device) -> Tensor:
    return torch.from_numpy(1 + 1e-9 * (np.arange(merges) * 0.618 % 1)).to(device)
