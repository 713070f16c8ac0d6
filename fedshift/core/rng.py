"""Counter-based randomness: a draw is a hash of its key and its position.

    u[r, i] = mix(key[r] + (i + 1) * golden) / 2^64

There is no generator state, so a client draws the same numbers alone, in a stack of K clients, on a
CPU and on a GPU. `mix` is the finaliser of SplitMix64
(Steele, Lea, Flood 2014) in the wrapping int64 arithmetic of torch.
"""

import zlib

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed 64-bit number
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
MASK = (1 << 64) - 1


def _shift(z: Tensor, bits: int) -> Tensor:
    """z >>> bits: torch shifts int64 arithmetically; the mask removes the sign bits."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64 finaliser, in place because memory passes dominate the cost of a draw."""
    z.bitwise_xor_(_shift(z, 30)).mul_(FIRST)
    z.bitwise_xor_(_shift(z, 27)).mul_(SECOND)
    return z.bitwise_xor_(_shift(z, 31))


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """Derive a key from each (key, number); arguments are broadcast."""
    if isinstance(number, int) and not key.ndim and key.device.type == "cpu":
        return torch.tensor(_fold_one(int(key), number))
    return _mix(key + (torch.as_tensor(number, device=key.device) + 1) * GOLDEN)


def _fold_one(key: int, number: int) -> int:
    """`fold` for one number, ten times faster than with tensors of one element."""
    z = (key + (number + 1) * GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * FIRST) & MASK
    z = ((z ^ (z >> 27)) * SECOND) & MASK
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def key(seed: int, purpose: str, *numbers: int | Tensor) -> Tensor:
    """Key of one purpose, for example `key(seed, "round", 3, clients)`, one per client.

    >>> key(0, "upload", 3, torch.tensor([7, 8])).shape
    torch.Size([2])
    >>> bool(key(0, "upload", 3, 7) == key(0, "upload", 3, torch.tensor([7, 8]))[0])
    True
    """
    k = fold(torch.tensor(seed & ((1 << 63) - 1)), zlib.crc32(purpose.encode()))
    for number in numbers:
        k = fold(k, number)
    return k


def uniform(key: Tensor, n: int, start: int = 0) -> Tensor:
    """Draws start .. start + n of every key (rows,): float32 (rows, n) in [0, 1), multiples of 2^-24."""
    return bits(key[:, None], torch.arange(start, start + n, device=key.device)).float() * 2**-24


def bits(key: Tensor, position: Tensor) -> Tensor:
    """24 random bits for each (key, position), the draws of `uniform` as integers; arguments are broadcast."""
    return _shift(fold(key, position), 40)
