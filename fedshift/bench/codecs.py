"""Measurements of `fedshift bench codecs`: speed, size and memory of codecs on the paper's CNN, with targets."""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshift.bench.timing import in_process
from fedshift.codecs import BitPack, Codec, KMeans, Range, Uniform
from fedshift.codecs.base import Quantizer
from fedshift.core.memory import CLEAR, fresh_memory, reset_peak, resident
from fedshift.core.types import Params
from fedshift.wire.mean import Mean
from fedshift.wire.measure import Job, Tick, weights
from fedshift.wire.writer import pack, unpack

STEPS = {"1": 2.4, "0.2": 4.5}  # bits of entropy per code -> the step that gives them, in standard deviations


class Target(NamedTuple):
    """One measurement and its target."""

    what: str
    asked: str  # the target, "-" for none
    measured: float
    met: bool
    steady: float | None = None  # ratio to np.copyto, if the target is a ratio to np.copy


def targets(took: dict[str, float], params: Params) -> Iterator[Target]:
    """Targets of speed and size, most of them as ratios to np.copy of the model in the same process.

    The ratio to np.copyto, which copies into existing memory, is given as well: the time of np.copy varies threefold,
    because the C library returns new, large or cached pages.
    """

    def at_most(what: str, limit: float, names: list[str], base: str = "np.copy") -> Target:
        worst = max(took[name] for name in names)
        ratio, steady = worst / took[base], worst / took["np.copyto"] if base == "np.copy" else None
        return Target(what, f"<= {limit:g}x", ratio, ratio <= limit, steady)

    yield at_most("Uniform.encode, 4 and 8 bit / np.copy", 4, ["Uniform(4)", "Uniform(8)"])
    yield at_most("KMeans.encode, 8 bit / np.copy", 12, ["KMeans(8)"])
    yield at_most("KMeans.encode, 8 bit / 4 bit", 1.3, ["KMeans(8)"], "KMeans(4)")
    yield at_most("KMeans.encode, exact, 8 bit / np.copy", 18, ["KMeans(8, exact)"])
    yield at_most("BitPack.encode, 1..8 bit, slowest / np.copy", 5, [f"pack {b}" for b in range(1, 9)])
    for limit, widths in (4, (1, 2, 4)), (5, (8,)), (10, (3, 5, 6, 7)):
        listed = ", ".join(map(str, widths))
        yield at_most(f"unpack + dequantize, {listed} bit, slowest / np.copy", limit, [f"read {b}" for b in widths])
    for bits, part in (4, 0.2), (8, 0.3):
        what = f"mean of 10 uploads, streaming, {bits} bit / stack and mean"
        yield at_most(what, part, [f"streaming {bits}"], f"stacked {bits}")
    for rate, limit in ("1", 30), ("0.2", 15):
        for job in ("encode", "decode"):
            yield at_most(f"Range.{job}, codes of {rate} bit / np.copy", limit, [f"range {job} {rate}"])
        tensors = stepped(params, STEPS[rate])
        ratio = sum(map(len, ranged(tensors))) / sum(map(entropy, tensors))
        yield Target(f"bytes of range-coded codes of {rate} bit / entropy", "<= 1.01x", ratio, ratio <= 1.01)
    for bits, most in (4, 1_077_936 + 256 + 512), (8, 2_155_872 + 4_096 + 512):
        length = len(pack(Codec(KMeans(bits)), params))
        yield Target(f"bytes of a K-means upload, {bits} bit", f"<= {most:,}", length, length <= most)


def jobs(params: Params) -> dict[str, Job]:
    """Jobs whose times `targets` compares."""
    arrays = [x.numpy() for x in params.values()]
    copies = [np.copy(a) for a in arrays]
    todo: dict[str, Job] = {
        "np.copy": lambda: [np.copy(a) for a in arrays],
        "np.copyto": lambda: list(map(np.copyto, copies, arrays)),
    }
    for quantizer in Uniform(4), Uniform(8), KMeans(4), KMeans(8):
        todo[f"{type(quantizer).__name__}({quantizer.bits})"] = partial(encode, quantizer, params)
    todo["KMeans(8, exact)"] = partial(encode, KMeans(8, exact=True), params)
    for bits in range(1, 9):
        codes = [codes[0] for codes, _ in encode(Uniform(bits), params)]
        todo[f"pack {bits}"] = partial(packed, codes, bits)
        todo[f"read {bits}"] = partial(unpack, pack(Codec(Uniform(bits)), params), params)
    for rate, step in STEPS.items():
        tensors = stepped(params, step)
        todo[f"range encode {rate}"] = partial(ranged, tensors)
        todo[f"range decode {rate}"] = partial(unranged, ranged(tensors), tensors)
    for bits in (4, 8):
        todo[f"stacked {bits}"] = partial(stacked, encode(KMeans(bits), params))
        todo[f"streaming {bits}"] = partial(streamed, [pack(Codec(KMeans(bits)), params)] * 10, params)
    return todo


def encode(quantizer: Quantizer, params: Params) -> list[tuple[Tensor, Tensor]]:
    return [quantizer.encode(x.reshape(1, -1)) for x in params.values()]


def packed(tensors: list[Tensor], bits: int) -> list[bytes]:
    return [BitPack().encode(codes, 1 << bits) for codes in tensors]


def stepped(params: Params, step: float) -> list[Tensor]:
    """8-bit codes of the nearest multiples of a step, in standard deviations of each tensor; 128 is zero."""
    return [(x / (step * x.std())).round().clamp(-128, 127).add(128).byte().flatten() for x in params.values()]


def entropy(codes: Tensor) -> float:
    """Order-0 entropy of codes in bytes."""
    counts = torch.bincount(codes).double()
    return float(-torch.xlogy(counts, counts / len(codes)).sum()) / math.log(2) / 8


def ranged(tensors: list[Tensor]) -> list[bytes]:
    return [Range().encode(codes, 256) for codes in tensors]


def unranged(coded: list[bytes], like: list[Tensor]) -> list[Tensor]:
    return [Range().decode(data, len(codes), 256) for data, codes in zip(coded, like, strict=True)]


def stacked(coded: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Average of ten uploads by stacking decoded tensors."""
    return [torch.stack([book[0][codes[0].long()] for _ in range(10)]).mean(0) for codes, book in coded]


def streamed(uploads: list[bytes], like: Params) -> Params:
    """Average of uploads by `Mean`, one upload at a time."""
    mean = Mean(like)
    for upload in uploads:
        mean.add(upload)
    return mean.result()


def memory(tick: Tick) -> Iterator[Target]:
    """Memory of averaging in addition to the frame, in sizes of the model, in separate processes (Linux only)."""
    if not CLEAR.exists():
        return
    extra = {}
    for uploads in (10, 100):
        tick(f"memory of {uploads} uploads")
        # other activity of the process only adds
        extra[uploads] = min(in_process("fedshift.bench.codecs", "peak", uploads)[0] for _ in range(3))
        yield Target(f"extra memory, mean of {uploads} uploads / model", "<= 2x", extra[uploads], extra[uploads] <= 2)
    growth = extra[100] / extra[10]
    yield Target("extra memory, 100 uploads / 10 uploads", "<= 1.05x", growth, growth <= 1.05)


def peak(uploads: int) -> float:
    """Increase of resident memory at the peak of averaging, in sizes of the model."""
    fresh_memory()  # so that freed memory is returned and allocations are counted
    torch.set_num_threads(1)
    params = weights()
    frame = pack(Codec(KMeans(4)), params)
    before = reset_peak()
    streamed([frame] * uploads, params)
    return (resident("VmHWM") - before) / sum(4 * x.numel() for x in params.values())
