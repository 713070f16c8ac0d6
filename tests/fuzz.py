"""Mutated frames: each is refused with a WireError, or gives finite tensors of the expected shapes.

python -m tests.fuzz --seconds 120 --seed 1
"""

import argparse
import random
import struct
import time
import zlib
from collections import Counter

import torch

from fedshift import (
    Cast,
    Codec,
    Identity,
    KMeans,
    Mean,
    Params,
    PerBlock,
    PerChannel,
    Range,
    Step,
    Stochastic,
    Ternary,
    Uniform,
    WireError,
    Zstd,
    pack,
    unpack,
)
from fedshift.codecs.base import Coder, Quantizer
from fedshift.core import rng

NUMBERS = [0, 1, 2, 7, 8, 15, 16, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def model() -> Params:
    g = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(4, 3, 5, generator=g),
        "a.bias": torch.randn(4, generator=g),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(3, 3, generator=g).half(),
        "wide": torch.randn(2, 2, generator=g).double(),
        "empty": torch.zeros(0, 4),
        "b.weight": torch.randn(6, 20, generator=g),
    }


def seeds(params: Params) -> list[bytes]:
    """One valid frame of each kind."""
    quantizers: list[Quantizer] = [Uniform(1), Uniform(4), Uniform(8), KMeans(2), KMeans(4), KMeans(8), Stochastic(3)]
    quantizers += [Step(), Step(5), Ternary()]
    quantizers += [Identity(), Cast("float16"), Cast("bfloat16")]
    frames = []
    for quantizer in quantizers:
        coders: list[Coder] = [Zstd(), Range()]
        frames += [pack(Codec(quantizer, coder), params, key=rng.key(0, "fuzz")) for coder in coders]
        for groups in PerChannel(), PerBlock(7):
            frames.append(pack(Codec(quantizer, groups=groups), params, key=rng.key(0, "fuzz")))
        frames.append(pack(Codec(quantizer, min_axes=0, integers=True), params, key=rng.key(0, "fuzz"), update=True))
    return frames


def mutate(frame: bytes, frames: list[bytes], draw: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at = draw.randrange(len(data) or 1)
        match draw.randrange(8):
            case 0 | 1 if data:
                data[at] ^= 1 << draw.randrange(8)
            case 2 if data:
                data[at] = draw.randrange(256)
            case 3:
                form = draw.choice(["<B", "<H", "<I", "<Q"])
                word = struct.pack(form, draw.choice(NUMBERS) % (1 << 8 * struct.calcsize(form)))
                data[at : at + len(word)] = word
            case 4:
                data = data[:at]
            case 5:
                data[at:at] = draw.randbytes(draw.randrange(1, 20))
            case 6:
                del data[at : at + draw.randrange(1, 20)]
            case 7:
                other = draw.choice(frames)
                data = data[:at] + other[draw.randrange(len(other)) :]
    return bytes(data)


def mend(data: bytes) -> bytes:
    """The same bytes with the right checksum, so that later checks are reached."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def check(data: bytes, like: Params) -> str:
    """'refused' or 'read'; anything else is a failure."""
    try:
        params = unpack(data, like)
    except WireError:
        return "refused"
    mean = Mean(like, base=like)
    mean.add(data)
    for read in params, mean.result():
        assert list(read) == list(like)
        for name, x in like.items():
            assert read[name].shape == x.shape, name
            assert read[name].dtype == x.dtype, name
            assert read[name].isfinite().all(), name
    return "read"


def run(seed: int, mutations: int | None = None, seconds: float = float("inf")) -> Counter[str]:
    """Check every mutation, as it is and with the right checksum; return the numbers of refused and decoded frames."""
    draw, like = random.Random(seed), model()
    frames, seen, end = seeds(like), Counter[str](), time.monotonic() + seconds
    while (mutations is None or seen.total() < mutations) and time.monotonic() < end:
        mutated = mutate(draw.choice(frames), frames, draw)
        for data in mutated, mend(mutated):
            try:
                seen[check(data, like)] += 1
            except BaseException:
                print(f"seed {seed}, after {seen.total()} mutations: {data.hex()}")  # noqa: T201
                raise
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(dict(run(arguments.seed, seconds=arguments.seconds)))  # noqa: T201
