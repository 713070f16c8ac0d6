"""The K-means codes of many rows at once, on the device that holds them: those that `KMeans` gives each row alone.

Nothing waits for the device until all is done. Then one answer says which rows need something else.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedshift.codecs import bins, replay
from fedshift.codecs.base import any_order

ROOM = 1 << 15  # bins that a row may fill; millions of weights of one scale fill half of them
MEMORY = 2 << 30  # bytes of temporaries, about
CACHED = 16 << 20  # the same on a CPU
DONE, NEAREST, SORT, ALONE = range(4)  # what is left to do for a row: nothing, its codes, all, all of it alone


def encode(x: Tensor, codes: Tensor, side: Tensor, sort: bool, exact: bool = False) -> list[int]:
    """Fills in codes uint8 (rows, n) and side float32 (rows, k) for x float32 (rows, n); returns the rows left out."""
    n, k = x.shape[1], side.shape[1]
    left = []
    with any_order():
        for part in _parts(x, 200 * n + 1200 * k if sort else 8 * n + 24 * bins.BINS + 200 * ROOM):
            rows = x[part].contiguous(), codes[part], side[part]
            left += [part.start + r for r in (sorted_(*rows) if sort else counted(*rows, exact))]
    return left


def _parts(x: Tensor, bytes_a_row: int) -> Iterator[slice]:
    """The rows of x, as many at a time as the memory takes."""
    tall = max(1, (CACHED if x.device.type == "cpu" else MEMORY) // bytes_a_row)
    for first in range(0, len(x), tall):
        yield slice(first, min(first + tall, len(x)))


def sorted_(x: Tensor, codes: Tensor, side: Tensor) -> list[int]:
    """As `KMeans._sorted`."""
    ascending = torch.from_numpy(np.sort(x.numpy(), axis=1)) if x.device.type == "cpu" else x.sort(1).values
    first, end = places(torch.nn.functional.pad(ascending[:, 1:] != ascending[:, :-1], (1, 0), value=True), x.shape[1])
    weight = torch.nn.functional.pad(first, (0, 1), value=x.shape[1]).diff(dim=1).double()
    v = ascending.gather(1, first.clamp(max=x.shape[1] - 1)).double() + 0.0  # no negative zero
    found = replay.kmeans(v, weight, end, side.shape[1])
    side.copy_(found.centres)
    codes.copy_(torch.searchsorted(borders(side, found.number), x, out_int32=True))
    return [r for r, sure in enumerate(found.sure.tolist()) if not sure]


def counted(x: Tensor, codes: Tensor, side: Tensor, exact: bool) -> list[int]:
    """As `KMeans._counted`, and the rows that the bins are too coarse for as `_sorted`."""
    slot = bins.slots(x)
    counts = bins.counts(slot)
    held, end = places(counts != 0, min(x.shape[1], ROOM))
    column = torch.arange(held.shape[1], device=x.device)
    held = torch.minimum(held, held.gather(1, (end - 1).clamp(max=len(column) - 1)))
    weight = torch.where(column < end, counts.gather(1, held), 0).double()
    v, near, far = bins.spans(held)
    found = replay.kmeans(v, weight, end.clamp(max=len(column) - 1), side.shape[1])
    side.copy_(found.centres)
    border = borders(side, found.number)
    begins, misplaced = begin(border, counts, x.shape[1])
    if exact:
        codes.copy_(torch.searchsorted(border, x, out_int32=True))
    else:
        torch.index_select(bins.tables(begins).flatten(), 0, slot.flatten(), out=codes.view(-1))
    blur = (weight * (far - near).square()).sum(1) / 12
    state = torch.where(misplaced > bins.MISPLACED, DONE if exact else NEAREST, DONE)
    state = torch.where(blur <= bins.BLUR * found.error, state, SORT)
    state = torch.where(found.sure & (end < len(column))[:, 0], state, ALONE)
    return _finish(x, codes, side, border, state.tolist())


def _finish(x: Tensor, codes: Tensor, side: Tensor, border: Tensor, state: list[int]) -> list[int]:
    nearest, sort, left = ([r for r, todo in enumerate(state) if todo == what] for what in (NEAREST, SORT, ALONE))
    if nearest:
        codes[nearest] = torch.searchsorted(border[nearest], x[nearest], out_int32=True).to(torch.uint8)
    if sort:
        its_codes, its_side = codes[sort], side[sort]
        left += [sort[i] for i in encode(x[sort], its_codes, its_side, sort=True)]
        codes[sort], side[sort] = its_codes, its_side
    return left


def places(flag: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The columns set in each row, int64 (rows, room + 1), the width beyond the last; and how many are, (rows, 1)."""
    run = flag.flatten().cumsum(0, dtype=torch.int32).view(flag.shape)  # on through all rows: one fast scan
    before = torch.nn.functional.pad(run[:-1, -1:], (0, 0, 1, 0))
    wanted = before + torch.arange(1, room + 2, dtype=torch.int32, device=flag.device)
    return torch.searchsorted(run, wanted), (run[:, -1:] - before).long()


def borders(book: Tensor, number: Tensor) -> Tensor:
    """Midpoints of the codes, rounded down to float32, and infinity beyond the last: (rows, k) -> (rows, k - 1)."""
    wide = book.double()
    middle = (wide[:, 1:] + wide[:, :-1]) * 0.5
    border = middle.float()
    border = torch.where(border > middle, border.nextafter(border.new_full((), -torch.inf)), border)
    return torch.where(torch.arange(1, book.shape[1], device=book.device) < number, border, torch.inf)


def begin(border: Tensor, counts: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The bin in which each code but the first begins, int32 (rows, k - 1), and the share of values this misplaces."""
    at = bins.bins_of(border)
    middle, near, far = bins.spans(at)
    size, real = border.double().abs(), border.isfinite()
    divided = counts.gather(1, at.long()).double() / n
    wrong = divided * torch.minimum(size - near, far - size) / (far - near)
    begins = torch.where(real, at + (middle <= border), bins.BINS).cummax(1).values
    return begins, torch.where(real, wrong, 0.0).sum(1)
