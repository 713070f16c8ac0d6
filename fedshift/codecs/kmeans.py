"""The paper's non-uniform quantizer (its Algorithm 1): a codebook of 2^bits means, and indices.

A long row is first counted into bins. The means are computed from the nonempty bins, about ten
thousand, and a table from bin to code then assigns every value. A short row, and one whose range is too
narrow for the bins, is sorted instead. Rows are encoded one after another or, with the same result, all
at once: `many`.
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

SHORT = 8192  # number of values below which sorting a row is faster than counting it
MANY, SMALL = 16, 2048  # on a CPU, MANY or more rows with at most SMALL values and codes are encoded at once


@dataclass(frozen=True)
class KMeans(Lookup):
    """Means of the row's values, and for each value the index of its mean; up to 2^bits distinct values are exact.

    By default, values close to the border of two codes, less than 1 %, may get the neighbouring code;
    `exact=True` assigns every value its nearest mean.

    `random=True` rounds at random to one of the two neighbouring codes, up with a probability equal to the fraction of
    the distance, with draws from the keys, one per row. The first and the last code are then the minimum and the
    maximum, so that E[DeQ(Q(w))] = w for every value.

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
        """True if encoding all rows at once is faster: on a GPU, and for many short rows with few codes."""
        rows, n = x.shape
        return x.is_cuda or (x.device.type == "cpu" and rows >= MANY and n + 16 * self.levels(n) <= SMALL)

    def table(self, side: Side) -> Tensor:
        return side

    def _sorted(self, row: Tensor, codes: Tensor) -> Singles:
        """Write the codes and return the codebook."""
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
        """Write the codes and return the codebook, with bins; None if bins are too coarse for this row."""
        key = bins.keys(row)
        held, weight = bins.count(key)
        low, high = bins.edges(held)
        if not np.isfinite([low[0], high[-1]]).all():  # the bins of the largest numbers have no middle
            return None
        centres, error = kmeans(bins.middle(low, high), weight, self.levels(len(row)))
        blur = (weight * (high - low) ** 2).sum() / 12  # squared error of replacing values by the middle of their bin
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
    """Write into codes one of the two neighbours of each value in the row's book, which includes minimum and maximum.

    A value that equals an entry always gets its code.
    """
    for r, c in chunks(x):
        entries, values = book[r], x[r, c].contiguous()
        below = torch.searchsorted(entries, values, right=True).sub_(1).clamp_(0, max(0, book.shape[1] - 2))
        above = (below + 1).clamp_(max=book.shape[1] - 1)
        low, high = (entries.gather(1, place).double() for place in (below, above))
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
    """Share of values on the smaller side of a border that divides their bin."""
    place = held.searchsorted(at).clip(max=len(held) - 1)
    divided = np.where(held[place] == at, weight[place], 0.0) / weight.sum()
    low, high = bins.edges(at)
    return float((divided * np.minimum(border - low, high - border) / (high - low)).sum())


def _assign(row: Tensor, key: Tensor, border: Singles, at: bins.Bins, codes: Tensor) -> None:
    """Write the nearest code of every value: the lowest of its bin, plus one for each border below the value."""
    lowest = bins.table(at + 1).to(row.device)
    above = torch.from_numpy(np.append(border, np.float32(np.inf))).to(row.device)
    shared = int(np.unique(at, return_counts=True)[1].max(initial=0))
    for _, c in chunks(row[None]):
        code = lowest.index_select(0, key[c])
        for _ in range(shared):
            code += row[c] > above.index_select(0, code.int())
        codes[c] = code
