"""Parts of codecs with users' numbers, as another project would define them."""

import struct
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fedshift.codecs.base import Coder, Groups, Lookup, Quantizer, Shape, Side, Transform


@dataclass(frozen=True)
class Ends(Lookup, number=200):
    """The nearer of minimum and maximum, `times` as large."""

    times: int = 1

    def parameters(self) -> bytes:
        return struct.pack("<H", self.times)

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        return cls(*struct.unpack("<H", parameters))  # struct.error for any other length

    def width(self, n: int) -> int:
        return 2

    def levels(self, n: int) -> int:
        return 2

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        side = torch.stack(x.aminmax(dim=1), dim=1)
        return (x > side.mean(1, keepdim=True)).to(torch.uint8), side

    def table(self, side: Side) -> Tensor:
        return side * self.times

    def reach(self, side: Side, highest: int) -> float:
        return super().reach(side, highest) * self.times


@dataclass(frozen=True)
class Whole(Quantizer, number=201):
    """Whole numbers below `limit`, without side data and without a table."""

    limit: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= 256:
            raise ValueError(f"Whole(limit={self.limit}): limit must be between 1 and 256")

    def parameters(self) -> bytes:
        return bytes([self.limit - 1])

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        return cls(parameters[0] + 1)  # accepts further bytes, and raises IndexError for none

    def width(self, n: int) -> int:
        return 0

    def levels(self, n: int) -> int:
        return self.limit

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        return x.round().clamp(0, self.limit - 1).to(torch.uint8), x.new_zeros(len(x), 0)

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return codes.float()

    def reach(self, side: Side, highest: int) -> float:
        return float(highest)


@dataclass(frozen=True)
class Plain(Coder, number=200):
    """One byte per code; readers do not know that the size does not depend on the codes."""

    def encode(self, codes: Tensor, levels: int) -> bytes:
        return codes.cpu().numpy().tobytes()

    def decode(self, data: bytes | memoryview, n: int, levels: int) -> Tensor:
        codes = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.zeros(0, dtype=torch.uint8)
        if len(codes) != n or int(codes.max()) >= levels:
            raise ValueError(f"{len(codes)} bytes instead of {n}, or a code of {levels} or more")
        return codes

    def size(self, n: int, levels: int) -> None:
        return None

    def most(self, n: int, levels: int) -> int:
        return n


@dataclass(frozen=True)
class Pairs(Groups, number=200):
    """Rows of two values, and one of a single value."""

    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        n = torch.Size(shape).numel()
        return [(rows, width) for rows, width in ((n // 2, 2), (n % 2, 1)) if rows]


@dataclass(frozen=True)
class Mirror(Transform, number=200):
    """The values backwards, after a zero if their number is odd; negative if the seed is odd."""

    def length(self, n: int) -> int:
        return n + n % 2

    def encode(self, x: Tensor, seeds: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, x.shape[1] % 2))
        return padded.flip(1) * self._signs(seeds)

    def decode(self, y: Tensor, seeds: Tensor, n: int) -> Tensor:
        return (y * self._signs(seeds)).flip(1)[:, :n]

    def reach(self, largest: float, n: int) -> float:
        return largest

    def _signs(self, seeds: Tensor) -> Tensor:
        return (1.0 - 2.0 * (seeds % 2))[:, None]
