"""The paper's non-uniform quantizer (its Algorithm 1): a codebook of 2^bits means, and indices.

A long row is counted into bins first. The means are found on the bins that hold something, some
ten thousand, and a table from bin to code then assigns every value. A short row, and one too
narrow for the bins, is sorted instead. This is done row after row, or, with the same result, for all
rows at once: `many`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.codecs import bins, many
from fedshift.codecs.base import NOT_FINITE, Lookup, Side, chunks
from fedshift.codecs.lloyd import Floats, kmeans
from fedshift.core import rng

Singles = NDArray[np.float32]

SHORT = 8192  # values below which sorting a row beats counting it
MANY, SMALL = 16, 2048  # on a CPU, rows of so few values and codes are encoded together if there are many


@dataclass(frozen=True)
class KMeans(Lookup):
    """Means of the row's values, and for each value the index of its mean; up to 2^bits distinct values are exact.

    By default values that lie near the border of two codes, under 1 %, may get the neighbouring one;
    `exact=True` gives every value its nearest mean.

    `random=True` rounds at random to one of the two neighbouring codes, up with probability equal to the part of the
    way passed, with draws from the keys, one for each row. The first and the last code are then the least and the
    largest value, so that E[DeQ(Q(w))] = w for every value.

    >>> codes, side = KMeans(1).encode(torch.tensor([[0.0, 1.0, 10.0, 12.0]]))
    >>> codes.tolist(), side.tolist()
    ([[0, 0, 1, 1]], [[0.5, 11.0]])
    """

    exact: bool = False
    random: bool = False

    def width(self, n: int) -> int:
        return self.levels(n)

    def levels(self, n: int) -> int:
        return int(min(n, 2**self.bits))

    def encode(self, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Side]:
        if not self.random:
            return self._nearest(x)
        if key is None:
            raise ValueError(f"{self} rounds at random and needs a key, for example rng.key(seed, 'upload')")
        codes, side = self._nearest(x)
        side[:, :1], side[:, -1:] = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        return rounded(x, side, key, codes), side

    def _nearest(self, x: Tensor) -> tuple[Tensor, Side]:
        rows, n = x.shape
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        side = torch.empty(rows, self.width(n), device=x.device)
        alone = many.encode(x, codes, side, sort=n < SHORT, exact=self.exact) if self._together(x) else range(rows)
        for r in alone:
            book = self._counted(x[r], codes[r]) if n >= SHORT else None
            if book is None:
                book = self._sorted(x[r], codes[r])
            side[r] = torch.from_numpy(np.pad(book, (0, self.width(n) - len(book)), mode="edge"))
        return codes, side

    def _together(self, x: Tensor) -> bool:
        """Whether all rows at once take less time: on a GPU, and for many short rows with few codes."""
        rows, n = x.shape
        return x.is_cuda or (x.device.type == "cpu" and rows >= MANY and n + 16 * self.levels(n) <= SMALL)

    def table(self, side: Side) -> Tensor:
        return side

    def _sorted(self, row: Tensor, codes: Tensor) -> Singles:
        """Fills in the codes and returns the codebook."""
        values = row.cpu().numpy()
        v = np.sort(values).astype(np.float64) + 0.0  # no negative zero
        if not np.isfinite(v[[0, -1]]).all():  # NaN sorts last
            raise ValueError(NOT_FINITE)
        first = np.flatnonzero(np.diff(v, prepend=-np.inf))
        weight = np.diff(first, append=len(v)).astype(np.float64)
        centres, _ = kmeans(v[first], weight, self.levels(len(v)))
        book = centres.astype(np.float32)
        codes.copy_(torch.from_numpy(borders(book).searchsorted(values).astype(np.uint8)))
        return book

    def _counted(self, row: Tensor, codes: Tensor) -> Singles | None:
        """The same by way of bins; None where they are too coarse for this row."""
        key = bins.keys(row)
        held, weight = bins.count(key)
        low, high = bins.edges(held)
        if not np.isfinite([low[0], high[-1]]).all():  # the bins of the largest numbers have no middle
            return None
        centres, error = kmeans(bins.middle(low, high), weight, self.levels(len(row)))
        blur = (weight * (high - low) ** 2).sum() / 12  # squared error of taking a bin's middle for its values
        if blur > bins.BLUR * error:
            return None
        book = centres.astype(np.float32)
        border = borders(book)
        at = bins.bin_of(border)
        if self.exact or _misplaced(border, at, held, weight) > bins.MISPLACED:
            _assign(row, key, border, at, codes)
        else:
            begins = np.maximum.accumulate(at + (bins.middle(*bins.edges(at)) <= border))
            torch.index_select(bins.table(begins).to(row.device), 0, key, out=codes)
        return book


def rounded(x: Tensor, book: Tensor, key: Tensor, codes: Tensor) -> Tensor:
    """Fills in codes: one of the two neighbours of each value in its row's book, which begins and ends with extremes.

    A value on a code keeps it, with certainty.
    """
    for r, c in chunks(x):
        own, values = book[r], x[r, c].contiguous()
        below = torch.searchsorted(own, values, right=True).sub_(1).clamp_(0, max(0, book.shape[1] - 2))
        above = (below + 1).clamp_(max=book.shape[1] - 1)
        low, high = (own.gather(1, place).double() for place in (below, above))
        part = torch.where(high > low, (values - low) / (high - low), 0.0)
        codes[r, c] = (below + (rng.uniform(key[r], values.shape[1], c.start) < part)).to(torch.uint8)
    return codes


def borders(book: Singles) -> Singles:
    """A value above border i is nearer to book[i + 1] than to book[i]: midpoints, rounded down to float32.

    Rounding down loses nothing: no float32 lies between the midpoint and the float32 below it.
    """
    wide = book.astype(np.float64)
    middle = (wide[1:] + wide[:-1]) * 0.5
    border = middle.astype(np.float32)
    return np.where(border > middle, np.nextafter(border, np.float32(-np.inf)), border)


def _misplaced(border: Singles, at: bins.Bins, held: bins.Bins, weight: Floats) -> float:
    """The share of values that lie on the lesser side of a border that divides their bin."""
    place = held.searchsorted(at).clip(max=len(held) - 1)
    divided = np.where(held[place] == at, weight[place], 0.0) / weight.sum()
    low, high = bins.edges(at)
    return float((divided * np.minimum(border - low, high - border) / (high - low)).sum())


def _assign(row: Tensor, key: Tensor, border: Singles, at: bins.Bins, codes: Tensor) -> None:
    """The nearest code of every value: the lowest in its bin, and one more for each border that it is above."""
    lowest = bins.table(at + 1).to(row.device)
    above = torch.from_numpy(np.append(border, np.float32(np.inf))).to(row.device)
    shared = int(np.unique(at, return_counts=True)[1].max(initial=0))
    for _, c in chunks(row[None]):
        code = lowest.index_select(0, key[c])
        for _ in range(shared):
            code += row[c] > above.index_select(0, code.int())
        codes[c] = code
