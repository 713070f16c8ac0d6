"""Frames built to be slow to decode, and the slowest honest ones: CPU seconds of `Mean.add` and of `unpack`.

python -m tests.slow_frames
"""

import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import constriction
import numpy as np
import torch
import zstandard

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
    Uniform,
    WireError,
    Zstd,
    pack,
    unpack,
)
from fedshift.codecs.base import Coder, Quantizer
from fedshift.codecs.bitpack import BitPack, bits_for
from fedshift.codecs.entropy import PLAIN, WHOLE, _frequency, _model, _scaled, _table
from fedshift.models import MLP, PaperCNN
from fedshift.wire.frame import Header, build, describe
from fedshift.wire.plan import layout, plan

Coded = Callable[[int, int], bytes]  # number of codes, their levels -> bytes of codes in a frame

RAW, RLE, COMPRESSED = 0, 1, 2  # blocks of Zstandard


def frame_of(like: Params, codec: Codec, coded: Coded, side: float = 1.0) -> bytes:
    """A frame with the codes `coded(n, levels)`, which its coder may never write."""
    made = plan(dict.fromkeys(like, codec), like)
    sides = [np.full(place.side // 4, side, "<f4").tobytes() for place in made.places]
    codes = [coded(buffer.total, buffer.levels) for buffer in made.buffers]
    lengths = made.lengths([len(data) for data in codes])
    return build(Header(lossy=made.lossy), describe(layout(like)), made.coding, [lengths, *sides, *codes])


def packed(n: int, levels: int) -> bytes:
    return bytes(BitPack().size(n, levels))


def zstd(content: int, blocks: Iterable[tuple[int, int, bytes]]) -> bytes:
    """A Zstandard frame of these blocks: (type, size in its header, bytes)."""
    frame = bytearray(b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", content))  # one segment, four bytes of content size
    end = bytearray()
    for kind, size, data in blocks:
        frame += end
        end = bytearray((size << 3 | kind << 1).to_bytes(3, "little") + data)
    end[0] |= 1  # the last block
    return bytes(frame + end)


def content(n: int, levels: int) -> int:
    return BitPack().size(n, levels if 8 % bits_for(levels) == 0 else 256)


def empty_blocks(n: int, levels: int, each: int = 16) -> bytes:
    """An empty block after every sixteen bytes."""
    size = content(n, levels)
    return zstd(size, ((RAW, len(b), b) for at in range(0, size, each) for b in (bytes(min(each, size - at)), b"")))


def short_blocks(n: int, levels: int, each: int = 1) -> bytes:
    """Blocks of `each` bytes."""
    size = content(n, levels)
    return zstd(size, ((RLE, min(each, size - at), b"\0") for at in range(0, size, each)))


def tables(n: int, levels: int) -> bytes:
    """Short compressed blocks, each with its Huffman and FSE tables."""
    size = content(n, levels)
    draw = np.random.default_rng(0)
    sample = bytes(draw.integers(0, 4, 600, np.uint8))
    best = zstandard.ZstdCompressor(level=19).compress(sample)
    head = 4 + 1 + 1 + (1 if len(sample) >= 256 else 0)
    kind, length = (best[head] >> 1) & 3, int.from_bytes(best[head : head + 3], "little") >> 3
    assert kind == COMPRESSED
    block = (COMPRESSED, length, best[head + 3 : head + 3 + length])
    whole, rest = divmod(size, len(sample))
    return zstd(size, [block] * whole + ([(RAW, rest, bytes(rest))] if rest or not whole else []))


def one_code(n: int, levels: int, step: int, others: int) -> bytes:
    """The same code repeatedly, coded one by one, with a table of these steps; as bytes, 0.747."""
    code = min(levels - 1, 0x3F)
    steps = np.full(levels, others)
    steps[code] = step
    stack = constriction.stream.stack.AnsCoder(np.array([WHOLE], np.uint32))
    stack.encode_reverse(np.full(n, code, np.int32), _model(_scaled(_frequency(steps))))
    return bytes([PLAIN]) + _table(steps) + bytes(stack.get_compressed().astype("<u4").tobytes()).rstrip(b"\0")


def rarest(n: int, levels: int) -> bytes:
    return one_code(n, levels, 1, 224)


def certain(n: int, levels: int) -> bytes:
    return one_code(n, levels, 224, 1)


def gaps(n: int, levels: int) -> bytes:
    """As many gaps as the range coder accepts, with every code in use."""
    codes = torch.full((n,), min(levels - 1, 0x3F), dtype=torch.uint8)
    codes[2::3] = torch.arange(len(codes[2::3])) % levels
    return Range().encode(codes, levels)


def denormal(n: int, levels: int) -> bytes:
    return np.full(n // 4, 1, "<u4").tobytes()


def hostile() -> dict[str, tuple[Codec, Coded]]:
    """Each kind of slow frame: its codec, and a function for its codes."""
    frames: dict[str, tuple[Codec, Coded]] = {}
    for quantizer in (Uniform(8), Uniform(1), KMeans(8), KMeans(1)):
        for n in (1, 2, 7, 16):
            frames[f"{quantizer}, blocks of {n}"] = Codec(quantizer, groups=PerBlock(n)), packed
    frames["Uniform(8), blocks of 1, range coder"] = Codec(Uniform(8), Range(), PerBlock(1)), gaps
    for name, codec in {"exact": Codec(Identity(), Zstd()), "Uniform(4)": Codec(Uniform(4), Zstd())}.items():
        frames[f"{name}, Zstd, an empty block every 16 bytes"] = codec, empty_blocks
        frames[f"{name}, Zstd, blocks of 1 byte"] = codec, short_blocks
        frames[f"{name}, Zstd, blocks of 5 bytes"] = codec, partial(short_blocks, each=5)
        frames[f"{name}, Zstd, tables every 600 bytes"] = codec, tables
    for codec in (Codec(Identity(), Range()), Codec(Uniform(8), Range()), Codec(Uniform(1), Range())):
        frames[f"{codec.quantizer}, range coder, the rarest code"] = codec, rarest
        frames[f"{codec.quantizer}, range coder, a certain code"] = codec, certain
        frames[f"{codec.quantizer}, range coder, gaps"] = codec, gaps
    frames["exact, denormal numbers"] = Codec(Identity()), denormal
    return frames


def honest() -> dict[str, Codec]:
    quantizers: list[Quantizer] = [Identity(), Cast("bfloat16"), KMeans(4), KMeans(8), Uniform(4), Uniform(8)]
    coders: list[Coder] = [BitPack(), Zstd(), Range()]
    codecs = [Codec(quantizer, coder) for quantizer in quantizers for coder in coders]
    grouped = [(quantizer, groups) for quantizer in quantizers[2:] for groups in (PerChannel(), PerBlock(64))]
    codecs += [Codec(quantizer, groups=groups) for quantizer, groups in grouped]
    return {f"{codec.quantizer}, {codec.coder}, {codec.groups}": codec for codec in codecs}


def seconds(work: Callable[[], object], least: int = 3) -> float:
    """Minimum CPU time of several repetitions."""
    best, spent = float("inf"), 0.0
    for _ in range(least):
        begin = time.process_time()
        work()
        took = time.process_time() - begin
        best, spent = min(best, took), spent + took
        if spent > 5:
            break
    return best


def measured(frame: bytes, like: Params) -> tuple[float, float, bool]:
    """CPU seconds of `Mean.add` and of `unpack`, and True if the frame was refused."""
    mean, refused = Mean(like, base=like), False
    mean.add(pack(Codec(Identity()), like))
    try:
        mean.add(frame)
    except WireError:
        refused = True

    def add() -> None:
        with suppress(WireError):
            mean.add(frame, 0.7)

    def read() -> None:
        with suppress(WireError):
            unpack(frame, like)

    return seconds(add), seconds(read), refused


def main() -> None:
    torch.set_num_threads(1)
    for title, model in (("paper-cnn", PaperCNN()), ("mlp on digits", MLP())):
        like = {name: x.detach() for name, x in model.state_dict().items()}
        frames = {f"honest: {name}": pack(codec, like) for name, codec in honest().items()}
        frames |= {f"hostile: {name}": frame_of(like, *made) for name, made in hostile().items()}
        base = 0.0
        for name, frame in frames.items():
            add, read, refused = measured(frame, like)
            base = base or add  # of an exact frame
            verdict = "refused" if refused else ""
            times = f"add {1e3 * add:8.2f} ms ({add / base:5.1f}x), unpack {1e3 * read:8.2f} ms"
            print(f"{title}: {name:62} {len(frame) / 1e6:7.3f} MB, {times} {verdict}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
