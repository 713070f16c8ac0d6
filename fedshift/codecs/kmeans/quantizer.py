"""The paper's non-uniform quantizer (its Algorithm 1): a codebook of 2^bits means, and indices."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, FixedWidth, Side, any_order, chunks
from fedshift.codecs.kmeans.rows import encode
from fedshift.core import rng


@dataclass(frozen=True)
class KMeans(FixedWidth, number=2):
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

    @property
    def encoders(self) -> tuple["KMeans", ...]:
        return replace(self, random=True), replace(self, random=False)

    @property
    def expands(self) -> bool:  # type: ignore[override]
        """Random codes of one bit are the minimum and the maximum."""
        return self.random and self.bits == 1

    def width(self, n: int) -> int:
        return self.levels(n)

    def levels(self, n: int) -> int:
        return int(min(n, 2**self.bits))

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if not self.random:
            return self._nearest(x)
        if key is None:
            raise ValueError(f"{self} rounds at random and needs a key, for example rng.key(seed, 'upload')")
        codes, side = self._nearest(x)
        side[:, :1], side[:, -1:] = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        return rounded(x, side, key, codes), side

    def _nearest(self, x: Tensor) -> tuple[Tensor, Side]:
        if not x.is_cuda:
            codes, side = self._on_cpu(x.cpu())
            return codes.to(x.device), side.to(x.device)
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        side = torch.empty(len(x), self.width(x.shape[1]), device=x.device)
        with any_order():
            left = encode(x.contiguous(), codes, side, self.exact)
        if left:
            codes[left], side[left] = (part.to(x.device) for part in self._on_cpu(x[left].cpu()))
        return codes, side

    def _on_cpu(self, x: Tensor) -> tuple[Tensor, Side]:
        codes, side = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), self.width(x.shape[1]))
        if encode(x.contiguous().numpy(), codes.numpy(), side.numpy(), self.exact):
            raise ValueError(NOT_FINITE)
        return codes, side

    def table(self, side: Side) -> Tensor:
        return side


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
