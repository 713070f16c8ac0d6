"""Mutated frames: each is refused with a WireError, or gives finite tensors of the expected shapes.

python -m tests.fuzz --seconds 120 --seed 1
"""

import argparse
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

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
    RandomStep,
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
from fedshift.codecs import QSGD, FixedCode, Hadamard, Normal, Sign, TopK
from fedshift.codecs.base import Coder, Quantizer, varint
from fedshift.core import rng
from fedshift.wire.frame import Cursor, parse
from fedshift.wire.reader import Reader
from tests.own_codecs import Ends, Mirror, Pairs, Plain, Whole

NUMBERS = [0, 1, 2, 7, 8, 15, 16, 127, 128, 255, 256, 32767, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e30, 1e-45, -0.0, 65_505.0, 2.0**24 + 2]
KEY = rng.key(0, "fuzz")
T = TypeVar("T")


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
    quantizers += [Step(), Step(5), RandomStep(), RandomStep(4, rate=2.0), Ternary()]
    quantizers += [Identity(), Cast("float16"), Cast("bfloat16")]
    quantizers += [QSGD(1), QSGD(7, norm="max"), Sign(), Normal(2), FixedCode(4)]
    quantizers += [TopK(KMeans(2), 0.3), TopK(Uniform(4), 0.3), TopK(QSGD(3), 0.3)]
    quantizers += [Ends(), Whole(16), Whole(11)]
    frames = []
    for quantizer in quantizers:
        coders: list[Coder] = [Zstd(), Range(), Plain()]
        frames += [pack(Codec(quantizer, coder), params, key=KEY) for coder in coders]
        for groups in PerChannel(), PerBlock(7), Pairs():
            frames.append(pack(Codec(quantizer, groups=groups), params, described=True, key=KEY))
        everything = Codec(quantizer, min_axes=0, integers=True)
        frames.append(pack(everything, params, key=KEY, update=True, base=300, client=7, examples=600, run=1 << 60))
        if not quantizer.plain:
            frames.append(pack(Codec(quantizer, Range(), PerBlock(7), Mirror()), params, key=KEY))
            frames.append(pack(Codec(quantizer, transform=Hadamard()), params, key=KEY))
    mixed = {"a.*": Codec(Step(), Range(), min_axes=1), "half": Codec(KMeans(2), Zstd()), "b.*": Codec(Step(), Range())}
    frames += [pack(mixed, params, described=described, client=0) for described in (False, True)]
    return frames


class Field(NamedTuple):
    """One field of a frame."""

    section: str  # head, layout, codecs or rest
    kind: str  # varint, byte, floats or bytes
    data: bytes


def fields(frame: bytes, like: Params) -> list[Field]:
    """Fields of a valid frame, besides its checksum and the lengths of layout and codecs."""
    found: list[Field] = []

    def of(section: str, cursor: Cursor) -> Callable[[str, int], int]:
        def take(kind: str, count: int = 0) -> int:
            start = cursor.at
            number = (
                cursor.varint(section) if kind == "varint" else int.from_bytes(cursor.take(count, section), "little")
            )
            found.append(Field(section, kind, bytes(cursor.view[start : cursor.at])))
            return number

        return take

    parsed = parse(frame)
    head = of("head", Cursor(memoryview(frame), 0))
    for count in (4, 1, 1, 8):
        head("byte" if count == 1 else "bytes", count)
    for _ in range(3):
        head("varint", 0)
    if parsed.described is None:
        found.append(Field("layout", "bytes", parsed.digest))
    else:
        layout = of("layout", Cursor(memoryview(parsed.described), 0))
        for _ in range(layout("varint", 0)):
            layout("bytes", layout("varint", 0))
            layout("byte", 1)
            for _ in range(layout("byte", 1)):
                layout("varint", 0)
    cursor = Cursor(memoryview(parsed.coding), 0)
    codecs = of("codecs", cursor)
    for _ in range(codecs("varint", 0)):
        for _ in range(2):
            _part(codecs)
        flags = codecs("byte", 1)
        for flag in (1, 2):
            if flags & flag:
                _part(codecs)
    while cursor.at < len(parsed.coding):
        codecs("varint", 0)
    plan = Reader(like)._plan(parsed)
    rest = of("rest", Cursor(parsed.rest, 0))
    sizes = [rest("varint", 0) if buffer.size is None else buffer.size for buffer in plan.buffers]
    for place in plan.places:
        rest("bytes", place.seeds)
        rest("floats", place.side)
    for size in sizes:
        rest("bytes", size)
    assert join(found, parsed.described is not None) == frame
    return found


def _part(take: Callable[[str, int], int]) -> None:
    take("byte", 1)
    take("bytes", take("byte", 1))


def join(found: list[Field], described: bool) -> bytes:
    """Frame of these fields; lengths of layout and codecs, and the checksum, are computed."""
    head, layout, codecs, rest = (
        b"".join(field.data for field in found if field.section == section)
        for section in ("head", "layout", "codecs", "rest")
    )
    layout = varint(len(layout)) + layout if described else layout
    return mend(head + layout + varint(len(codecs)) + codecs + rest + bytes(4))


def mutate_fields(found: list[Field], others: list[list[Field]], draw: random.Random) -> bytes:
    """Change some fields, each in a way that suits it."""
    found = list(found)
    described = bool(found[2].data[0] & 8)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        at = draw.randrange(len(found))
        match draw.randrange(12):
            case 0:
                del found[at]
            case 1:
                found.insert(at, found[at])
            case 2 | 3:
                other = draw.choice(others)
                alike = [field for field in other if field[:2] == found[at][:2]]
                found[at] = draw.choice(alike or [found[at]])
            case 4:
                section = found[at].section
                found = [field for field in found if field.section != section]
                found += [field for field in draw.choice(others) if field.section == section]
            case _:
                found[at] = found[at]._replace(data=changed(found[at], draw))
        if not found:
            break
    return join(found, described)


def changed(field: Field, draw: random.Random) -> bytes:
    data = bytearray(field.data)
    if field.kind == "varint":
        number = int.from_bytes(data[:4], "little")
        near = [max(0, number - 1), number + 1, 2 * number, number ^ 1 << draw.randrange(12)]
        some = varint(draw.choice(NUMBERS + near))
        longer = some[:-1] + bytes([some[-1] | 128, 0])
        return draw.choice([some, some, some, longer, some[:-1] + bytes([some[-1] | 128]), b"\xff" * 10])
    if field.kind == "floats" and len(data) >= 4 and draw.random() < 0.5:
        at = 4 * draw.randrange(len(data) // 4)
        data[at : at + 4] = struct.pack("<f", draw.choice(FLOATS))
    elif data and draw.random() < 0.8:
        at = draw.randrange(len(data))
        data[at] = draw.choice([data[at] ^ 1 << draw.randrange(8), draw.randrange(256), draw.randrange(4), 200])
    else:
        data = bytearray(draw.randbytes(draw.choice([0, 1, len(data), len(data) + 1, 300])))
    return bytes(data)


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


def refused(work: Callable[[], T]) -> tuple[str, T | None]:
    """Message of a WireError, or the result."""
    try:
        return "", work()
    except WireError as error:
        return str(error), None


def check(data: bytes, like: Params) -> str:
    """'refused', 'overflow' (of the mean) or 'read'; anything else is a failure."""
    refusal, params = refused(lambda: unpack(data, like))
    assert len(refusal.splitlines()) <= 1, refusal
    if params is None:
        return "refused"
    mean = Mean(like, base=like)
    refusal, _ = refused(lambda: mean.add(data))
    assert not refusal or "overflow the sum" in refusal or "too large to be averaged" in refusal, refusal
    if refusal:
        return "overflow"
    for read in params, mean.result():
        assert list(read) == list(like)
        for name, x in like.items():
            assert read[name].shape == x.shape, name
            assert read[name].dtype == x.dtype, name
            assert read[name].isfinite().all(), name
    return "read"


def mutations_of(frames: list[bytes], like: Params, draw: random.Random) -> Iterator[bytes]:
    """Mutations of bytes, as they are and with the right checksum, and of fields."""
    divided = [fields(frame, like) for frame in frames]
    while True:
        mutated = mutate(draw.choice(frames), frames, draw)
        yield mutated
        yield mend(mutated)
        for _ in range(3):
            yield mutate_fields(draw.choice(divided), divided, draw)


def run(seed: int, mutations: int | None = None, seconds: float = float("inf")) -> Counter[str]:
    """Check every mutation; return the numbers of refused and decoded frames."""
    draw, like = random.Random(seed), model()
    seen, end = Counter[str](), time.monotonic() + seconds
    for data in mutations_of(seeds(like), like, draw):
        if (mutations is not None and seen.total() >= mutations) or time.monotonic() >= end:
            break
        try:
            seen[check(data, like)] += 1
        except BaseException:
            print(f"seed {seed}, after {seen.total()} mutations: {data.hex()}")  # noqa: T201
            raise
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--mutations", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(dict(run(arguments.seed, arguments.mutations, arguments.seconds)))  # noqa: T201
