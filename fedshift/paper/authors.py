"""K-means as in the library that the paper's authors use: a search that stops early on small weights.

The rest of fedshift does not depend on this module. Settings name its codec as they name one of a user:
`codec = {name = "fedshift.paper.authors:kmeans", bits = 4}`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, FixedWidth, Side, any_order, chunks
from fedshift.codecs.codec import Codec
from fedshift.core import rng

MOST_STEPS = 100


@dataclass(frozen=True)
class EarlyKMeans(FixedWidth, number=127):
    """Lloyd's search from 2^bits random values of the row, which ends when sum_q (b'_q - b_q)^2 <= tolerance.

    b and b' are the means before and after a step. The tolerance is absolute, so that on small weights the search ends
    after one to three steps. As in fast-pytorch-kmeans, b' is sent with the assignment to b, and the mean of no values
    is 0.

    >>> codes, side = EarlyKMeans(1).encode(torch.tensor([[0.0, 1.0, 10.0, 12.0]]), torch.tensor([0]))
    >>> codes.tolist(), side.tolist()
    ([[0, 0, 1, 1]], [[0.5, 11.0]])
    """

    tolerance: float = 1e-4  # of the encoder, not sent
    random = True

    def width(self, n: int) -> int:
        return self.levels(n)

    def levels(self, n: int) -> int:
        return int(min(n, 2**self.bits))

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if key is None:
            raise ValueError(f"{self} is random and needs a key, for example rng.key(seed, 'upload')")
        if not x.isfinite().all():
            raise ValueError(NOT_FINITE)
        n = x.shape[1]
        drawn = rng.uniform(key, self.levels(n)).double().mul_(n).long()
        borders, means = search(x.sort(dim=1).values, x.gather(1, drawn), self.tolerance)
        codes = torch.empty_like(x, dtype=torch.uint8)
        for r, c in chunks(x):
            codes[r, c] = torch.searchsorted(borders[r], x[r, c].contiguous()).to(torch.uint8)
        return codes, means

    def table(self, side: Side) -> Tensor:
        return side


def search(x: Tensor, b: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Borders between the codes of each row before the last step, and the means after it.

    x: sorted values (rows, n); b: first means (rows, k) -> (rows, k - 1), (rows, k)
    """
    with any_order():
        sums = torch.nn.functional.pad(x.cumsum(1, dtype=torch.float64), (1, 0))  # of the i smallest values
    first = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
    borders, means = b[:, 1:], b
    done = torch.zeros_like(first, dtype=torch.bool)
    for _ in range(MOST_STEPS):
        b = means.sort(dim=1).values
        marked = b.clone()
        marked[:, 1:][b[:, 1:] == b[:, :-1]] = torch.inf  # of equal means, the first gets the values
        marked, order = marked.sort(dim=1)
        between = marked[:, :-1] / 2 + marked[:, 1:] / 2
        ends = torch.cat([first, torch.searchsorted(x, between, right=True), first + x.shape[1]], dim=1)
        size = ends.diff(dim=1)
        mean = torch.where(size > 0, sums.gather(1, ends).diff(dim=1) / size, 0.0).float()
        moved = (mean.double() - b.gather(1, order)).square().sum(dim=1, keepdim=True)
        borders, means = torch.where(done, borders, between), torch.where(done, means, mean)
        done |= moved <= tolerance
        if done.all():
            break
    return borders.contiguous(), means.contiguous()


def kmeans(bits: int) -> Codec:
    """Codec with the K-means search of the authors' library."""
    return Codec(EarlyKMeans(bits))
