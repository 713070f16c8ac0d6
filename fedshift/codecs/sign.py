"""Scaled signs: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019.

    Q(x) = mean|x| sgn(x), with sgn(0) = 1

It is a contraction: |x - Q(x)|^2 = (1 - mean|x|^2 / mean(x^2)) |x|^2. Intended for updates with error feedback.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, Lookup, Side, chunks, finite


@dataclass(frozen=True)
class Sign(Lookup, number=9):
    """One bit per value, and the mean magnitude of the row.

    >>> codes, side = Sign().encode(torch.tensor([[3.0, -1.0, 0.0, -4.0]]))
    >>> codes.tolist(), side.tolist(), Sign().decode(codes, side).tolist()
    ([[0, 1, 0, 1]], [[2.0]], [[2.0, -2.0, 2.0, -2.0]])
    """

    def width(self, n: int) -> int:
        return 1

    def levels(self, n: int) -> int:
        return 2

    def table(self, side: Side) -> Tensor:
        return torch.cat([side, -side], dim=1)

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if not finite(x):
            raise ValueError(NOT_FINITE)
        total = torch.zeros(len(x), 1, dtype=torch.float64, device=x.device)
        for r, c in chunks(x):
            total[r] += x[r, c].abs().sum(1, keepdim=True, dtype=torch.float64)
        return (x < 0).to(torch.uint8), (total / x.shape[1]).float()
