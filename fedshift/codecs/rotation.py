"""Random rotation: Suresh et al., Distributed Mean Estimation with Limited Communication, 2017.

    y = H D x / sqrt(B),  D: random signs, H: the Walsh-Hadamard matrix of B x B entries +-1, on each block of B values

After a rotation, the values of any row are almost normally distributed, so that fixed levels suit them, and their
error does not depend on the row. `Codec(Normal(bits), transform=Hadamard())` is EDEN (Vargaftik et al. 2022), with
one bit DRIVE (2021).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.codecs.base import Transform, chunks
from fedshift.core import rng

LARGEST = 1 << 15  # values per block; it divides the values of a chunk
PADDING = 16  # a block is so small that padding adds at most 1 / PADDING of the values


@dataclass(frozen=True)
class Hadamard(Transform, number=1):
    """Random signs, then an orthonormal Walsh-Hadamard transform of blocks of B values.

    B is the largest power of two up to 2^15 for which the padding of n values to a multiple of B adds at most n / 16
    values. A row of n < 16 values is not padded, so B is then the largest power of two that divides n; if n is odd,
    only signs change.

    >>> x, seeds = torch.tensor([[3.0, 1.0, 2.0, 4.0]]), torch.tensor([1])
    >>> y = Hadamard().encode(x, seeds)
    >>> y.tolist(), Hadamard().decode(y, seeds, 4).tolist()
    ([[-1.0, -4.0, -3.0, 2.0]], [[3.0, 1.0, 2.0, 4.0]])
    """

    def length(self, n: int) -> int:
        return n + -n % block(n)

    def encode(self, x: Tensor, seeds: Tensor) -> Tensor:
        n = x.shape[1]
        y, size = torch.nn.functional.pad(x, (0, self.length(n) - n)), block(n)
        for r, c in chunks(y):
            y[r, c] = _transformed(y[r, c] * _signs(seeds[r], c), size)
        return y

    def decode(self, y: Tensor, seeds: Tensor, n: int) -> Tensor:
        x, size = torch.empty_like(y), block(n)
        for r, c in chunks(y):
            x[r, c] = _transformed(y[r, c], size) * _signs(seeds[r], c)
        return x[:, :n]

    def reach(self, largest: float, n: int) -> float:
        """sqrt(B) largest, and the rounding errors of log2(B) sums"""
        size = block(n)
        return largest * math.sqrt(size) * (1 + 2.0**-22 * math.log2(size))


def block(n: int) -> int:
    """Values per block of a row of n values.

    >>> [block(n) for n in (7, 12, 100, 1000, 100_000, 2_000_000)]
    [1, 4, 8, 1024, 4096, 32768]
    """
    size = LARGEST
    while -n % size * PADDING > n:
        size //= 2
    return size


def _signs(seeds: Tensor, columns: slice) -> Tensor:
    """1 or -1 for these columns of each row, determined by its seed."""
    position = torch.arange(columns.start, columns.stop, device=seeds.device)
    return torch.where(rng.fold(seeds[:, None], position) < 0, -1.0, 1.0)


def _transformed(y: Tensor, size: int) -> Tensor:
    """Walsh-Hadamard transform of each block of the rows.

    Values are scaled first, so that no sum exceeds the largest possible result. Only sums and differences of two
    values are computed, which are the same on every device.
    """
    inner = 1 << (size.bit_length() - 1) // 2
    blocks = _butterflies((y * size**-0.5).view(-1, size // inner, inner))
    blocks = _butterflies(blocks.transpose(1, 2).contiguous())  # transposed, so that runs of neighbours are long
    return blocks.transpose(1, 2).reshape(y.shape)


def _butterflies(y: Tensor) -> Tensor:
    """Transform (blocks, size, inner) along its second axis, in place: a, b -> a + b, a - b."""
    blocks, size, inner = y.shape
    half = 1
    while half < size:
        a, b = y.view(blocks, size // (2 * half), 2, half, inner).unbind(2)
        difference = a - b
        a += b
        b.copy_(difference)
        half *= 2
    return y
