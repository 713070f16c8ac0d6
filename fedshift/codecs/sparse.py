"""Top-k: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017.

    Q(x)_i = inner(x_kept)_i for the k = max(1, round(keep n)) largest magnitudes of a row, else 0
    code 0 for 0, 1 + the inner code for the others

With an entropy coder, the positions take H(k / n) bits per value instead of 32 bits each. `Codec(TopK(KMeans(2),
0.01), Range())` is FedZip (Malekijoo et al. 2021), `Codec(TopK(QSGD(s)), Range())` with error feedback is
Qsparse-local-SGD (Basu et al. 2019).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from fedshift.codecs.base import (
    MOST_LEVELS,
    MOST_PARAMETERS,
    NOT_FINITE,
    Numbered,
    Quantizer,
    Side,
    any_order,
    dequantized,
    finite,
    kept,
    kth_largest,
    quantized,
    require_number,
)
from fedshift.codecs.codec import Codec
from fedshift.codecs.entropy import Range
from fedshift.codecs.kmeans import KMeans
from fedshift.codecs.qsgd import QSGD

LONG = 1 << 16  # values of a row that is long enough for all codes


@dataclass(frozen=True)
class TopK(Quantizer, number=12):
    """Quantize exactly the k largest magnitudes of a row with another quantizer; all other values become zero.

    Of values with equal magnitudes, the first are kept. The inner quantizer needs at most 255 levels. Its side data for
    k values are padded to those for n values by repetition of the last number, so that a decoder need not know k: the
    padded side data must decode the same codes to the same values, as ranges, norms and codebooks do.

    >>> from fedshift import KMeans
    >>> codec = TopK(KMeans(1), keep=0.5)
    >>> codes, side = codec.encode(torch.tensor([[0.1, -4.0, 3.0, 0.2, 5.0, -0.5]]))
    >>> codes.tolist(), side.tolist(), codec.decode(codes, side).tolist()
    ([[0, 1, 2, 0, 2, 0]], [[-4.0, 4.0]], [[0.0, -4.0, 4.0, 0.0, 4.0, 0.0]])
    """

    inner: Quantizer
    keep: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Quantizer) or isinstance(self.inner, TopK) or self.inner.plain:
            raise ValueError(f"TopK(inner={self.inner}): inner must be a quantizer of 1 to 8 bits other than TopK")
        if self.levels(LONG) > MOST_LEVELS:
            raise ValueError(
                f"TopK(inner={self.inner}): inner has {self.inner.levels(LONG)} levels; at most {MOST_LEVELS - 1} are "
                "allowed, because zero is another one"
            )
        require_number(self, keep=self.keep)
        if not 0 < self.keep <= 1:
            raise ValueError(f"TopK(keep={self.keep}): keep must be above 0 and at most 1")

    def parameters(self) -> bytes:
        """Number of the inner quantizer, number of bytes of its parameters, and its parameters."""
        number, parameters = type(self.inner).number, self.inner.parameters()
        if number is None:
            raise ValueError(f"{self.inner} has no number in the wire format")
        if len(parameters) > MOST_PARAMETERS - 2:
            raise ValueError(
                f"{self.inner} has {len(parameters)} bytes of parameters; TopK allows at most {MOST_PARAMETERS - 2}"
            )
        return bytes([number, len(parameters)]) + parameters

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        if len(parameters) < 2 or len(parameters) != 2 + parameters[1]:
            raise ValueError(f"TopK has the parameters {parameters.hex()}, which do not have the length they state")
        inner = Quantizer.known.get(parameters[0])
        if inner is None or issubclass(inner, TopK):
            raise ValueError(f"quantizer {parameters[0]} in TopK is {'TopK itself' if inner else 'not known here'}")
        return cls(inner.read(parameters[2:]))

    @property
    def parts(self) -> tuple[Numbered, ...]:
        return (self, *self.inner.parts)

    @property
    def random(self) -> bool:  # type: ignore[override]
        return self.inner.random

    @property
    def expands(self) -> bool:  # type: ignore[override]
        """As the inner quantizer, except for Qsparse with s > 1: errors of QSGD are then at most max|x| / s."""
        bounded = isinstance(self.inner, QSGD) and self.inner.norm == "max" and self.inner.s > 1
        return self.inner.expands and not bounded

    @property
    def most(self) -> float:
        return self.inner.most

    @property
    def prepares(self) -> bool:
        return self.inner.prepares

    @property
    def across(self) -> bool:
        return self.inner.across

    @property
    def stack(self) -> Hashable:
        return type(self), self.inner.stack, self.keep

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        """Result of the inner quantizer for the values that are kept of each tensor."""
        numbers = [x.nan_to_num() for x in tensors]  # `encode` refuses NaN, and its error names the tensor
        return self.inner.prepare([x.gather(1, self._kept(x)) for x in numbers])

    def width(self, n: int) -> int:
        return self.inner.width(n)

    def levels(self, n: int) -> int:
        return self.inner.levels(n) + 1

    def table(self, side: Side) -> Tensor | None:
        """zero, and the table of the inner quantizer"""
        table = self.inner.table(side)
        return None if table is None else torch.nn.functional.pad(table, (1, 0))

    def reach(self, side: Side, highest: int) -> float:
        return self.inner.reach(side, max(0, highest - 1))

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if not finite(x):
            raise ValueError(NOT_FINITE)
        place = self._kept(x)
        inner, side = quantized(self.inner, x.gather(1, place), key, scale)
        codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device).scatter_(1, place, inner + 1)
        missing = self.width(x.shape[1]) - side.shape[1]
        return codes, torch.cat([side, side[:, -1:].expand(-1, missing)], dim=1) if missing else side

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        values = dequantized(self.inner, codes.clamp(min=1) - 1, side)
        return values.masked_fill_(codes == 0, 0.0)

    def _kept(self, x: Tensor) -> Tensor:
        """Positions of the kept values, ascending, int64 (rows, k)."""
        size, k = x.abs(), kept(self.keep, x.shape[1])
        least = kth_largest(size, k)
        above, equal = size > least, size == least
        with any_order():
            rank = equal.cumsum(1, dtype=torch.int32)
        chosen = above | (equal & (rank <= k - above.sum(1, keepdim=True)))
        return chosen.nonzero()[:, 1].view(len(x), k)


def fedzip(keep: float = 0.01, bits: int = 2) -> Codec:
    """FedZip: the largest values as 2^bits means, all others zero."""
    return Codec(TopK(KMeans(bits), keep), Range())


def qsparse(keep: float = 0.01, s: int = 4, norm: Literal["l2", "max"] = "max") -> Codec:
    """Qsparse: the largest values in QSGD's levels, all others zero; meant for feedback."""
    return Codec(TopK(QSGD(s, norm), keep), Range())
