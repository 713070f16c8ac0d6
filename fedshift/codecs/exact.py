"""Exact values, and casts to 16 bits."""

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from fedshift.codecs.base import Side, Verbatim, finite
from fedshift.codecs.codec import Codec

CASTS: tuple[Literal["float16", "bfloat16"], ...] = "float16", "bfloat16"


@dataclass(frozen=True)
class Identity(Verbatim, number=0):
    """Exact values: codes are the bytes of the values.

    >>> codes, side = Identity().encode(torch.tensor([[1.0, 2.0]]))
    >>> codes.shape, Identity().decode(codes, side).tolist()
    (torch.Size([1, 8]), [[1.0, 2.0]])
    """

    lossy = False

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if not finite(x):
            raise ValueError("contains NaN or infinity")
        return _bytes(x)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return codes.view(torch.float32)


EXACT = Codec(Identity())


@dataclass(frozen=True)
class Cast(Verbatim, number=4):
    """Cast to a 16-bit float: float16 (11 significant bits, up to 65,504) or bfloat16 (8, up to 3.38e38).

    >>> Cast("bfloat16").decode(*Cast("bfloat16").encode(torch.tensor([[1.0, 3.14159]]))).tolist()
    [[1.0, 3.140625]]
    """

    to: Literal["float16", "bfloat16"]

    def __post_init__(self) -> None:
        if self.to not in ("float16", "bfloat16"):
            raise ValueError(f"Cast(to={self.to!r}): to must be 'float16' or 'bfloat16'")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.to == "float16" else torch.bfloat16

    @property
    def most(self) -> float:
        return torch.finfo(self.dtype).max

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def parameters(self) -> bytes:
        return bytes([CASTS.index(self.to)])

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        if len(parameters) != 1 or parameters[0] >= len(CASTS):
            raise ValueError(f"Cast has the parameters {parameters.hex()} instead of 00 or 01")
        return cls(CASTS[parameters[0]])

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        short = x.to(self.dtype)
        if not finite(short):
            raise ValueError(f"contains NaN, infinity or a value too large for {self.to}")
        return _bytes(short)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return codes.view(self.dtype).float()


def _bytes(x: Tensor) -> tuple[Tensor, Side]:
    return x.contiguous().view(torch.uint8), x.new_zeros(x.shape[0], 0, dtype=torch.float32)
