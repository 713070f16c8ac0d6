"""QSGD: Alistarh et al., Communication-Efficient SGD via Gradient Quantization and Encoding, 2017.

    Q(v)_i = |v| sgn(v_i) xi_i,   xi_i = l / s or (l + 1) / s with l = floor(s |v_i| / |v|), so that E[Q(v)] = v
    code 0 for level 0, 2l - 1 for level l and v_i > 0, 2l for v_i < 0

With s levels per sign and the Euclidean norm, a vector of d values has at most s (s + sqrt(d)) non-zero values on
average: s = 1 is a sparse code, for which a range coder needs far less than one bit per value. With the largest
magnitude as norm, as in the experiments of the paper, it is not sparse. The buckets of the paper are `PerBlock(n)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from fedshift.codecs.base import NOT_FINITE, Lookup, Side, chunks, finite, require_integer
from fedshift.codecs.codec import Codec, PerBlock, PerTensor
from fedshift.codecs.entropy import Range
from fedshift.core import rng

MOST = 127  # levels per sign


@dataclass(frozen=True)
class QSGD(Lookup, number=8):
    """Unbiased rounding to s levels per sign between zero and a norm of the row, with draws from the keys.

    norm: "l2", or "max" for the largest magnitude.
    whole: use the norm over all tensors of a client instead of one norm per row, as FedPAQ does.

    >>> codes, side = QSGD(2, norm="max").encode(torch.tensor([[4.0, -2.0, 0.0]]), torch.tensor([7]))
    >>> codes.tolist(), side.tolist()
    ([[3, 2, 0]], [[4.0]])
    """

    s: int
    norm: Literal["l2", "max"] = "l2"
    whole: bool = False
    random = True
    expands = True

    def __post_init__(self) -> None:
        require_integer(self, s=self.s)
        if not 1 <= self.s <= MOST:
            raise ValueError(f"QSGD(s={self.s}): s, the levels per sign, must be between 1 and {MOST}")
        if self.norm not in ("l2", "max"):
            raise ValueError(f"QSGD(norm={self.norm!r}): norm must be 'l2' or 'max'")

    def parameters(self) -> bytes:
        return bytes([self.s])

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        if len(parameters) != 1:
            raise ValueError(f"QSGD has {len(parameters)} bytes of parameters instead of 1")
        return cls(parameters[0])

    def width(self, n: int) -> int:
        return 1

    def levels(self, n: int) -> int:
        return 2 * self.s + 1

    @property
    def prepares(self) -> bool:
        return self.whole

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norm over all tensors; 0 with NaN or infinity, which `encode` refuses in an error that names the tensor."""
        return self._norm(torch.stack([self._norm(x) for x in tensors], dim=1)).nan_to_num(nan=0.0, posinf=0.0)

    def _norm(self, x: Tensor) -> Tensor:
        """Norm of each row, float64 (rows,)."""
        norm: Tensor = torch.linalg.vector_norm(x, 2 if self.norm == "l2" else torch.inf, dim=1, dtype=torch.float64)
        return norm

    def table(self, side: Side) -> Tensor:
        return self._values(torch.arange(2 * self.s + 1, device=side.device), side)

    def reach(self, side: Side, highest: int) -> float:
        return float(self._values(torch.tensor(highest, device=side.device), side).abs().amax())

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """table[codes]; the table is only computed for rows with at least as many values as it has entries."""
        if codes.shape[1] > 2 * self.s:
            return super().decode(codes, side)
        return self._values(codes.int(), side)

    def _values(self, codes: Tensor, side: Side) -> Tensor:
        """+-|v| l / s, computed in float64 and rounded once"""
        size = side.double() * (((codes + 1) >> 1).double() / self.s)
        return torch.where(codes & 1 == 1, size, -size).float() + 0.0  # -0 + 0 = 0

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if key is None:
            raise ValueError("QSGD rounds at random and needs a key, for example rng.key(seed, 'upload')")
        if not finite(x):
            raise ValueError(NOT_FINITE)
        norm = (self._norm(x) if scale is None else scale).float()  # rounded, so that the order of summation is lost
        if not norm.isfinite().all():
            raise ValueError("has a norm beyond the range of float32, alone or with the other tensors")
        # a transform after `prepare` may have enlarged the largest magnitude
        side = torch.maximum(norm, torch.linalg.vector_norm(x, torch.inf, dim=1))[:, None]
        codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        for r, c in chunks(x):
            exact = torch.where(side[r] > 0, x[r, c].abs() / side[r], 0.0).mul_(self.s)
            level = exact.floor()
            level += rng.uniform(key[r], exact.shape[1], c.start) < exact - level
            codes[r, c] = torch.where(x[r, c] > 0, 2 * level - 1, 2 * level).clamp_(min=0).to(torch.uint8)
        return codes, side


def qsgd(s: int = 7, norm: Literal["l2", "max"] = "max", whole: bool = False, bucket: int = 512) -> Codec:
    """QSGD with s levels per sign, range-coded; per bucket of values, per tensor (0) or over all tensors (whole)."""
    return Codec(QSGD(s, norm, whole), Range(), PerBlock(bucket) if bucket else PerTensor())
