"""Bytes, time and error of a codec on the tensors of a model."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.codecs import Cast, Codec, Identity, KMeans, Range, Stochastic, Uniform, Zstd
from fedshift.core.rng import key
from fedshift.core.types import Params
from fedshift.models import PaperCNN
from fedshift.wire.writer import pack, unpack

Job = Callable[[], object]
Tick = Callable[[str], None]


class CodecRow(NamedTuple):
    """One codec on the whole model."""

    codec: str
    bits: float  # sent per weight
    bytes: int
    encode_ms: float  # tensors to bytes, CPU time
    decode_ms: float
    snr_db: float | None  # signal-to-noise ratio, None if nothing was lost


def weights(seed: int = 0, of: Params | None = None) -> Params:
    """Tensors with values like trained weights: normal, one in a hundred Laplace (default shapes: the paper's CNN)."""
    g = torch.Generator().manual_seed(seed)
    params = {}
    for name, like in (PaperCNN().state_dict() if of is None else of).items():
        n = like.numel()
        normal = torch.randn(n, generator=g)
        laplace = _laplace(n, g)
        tail = torch.rand(n, generator=g) < 0.01
        fan_in = n // like.shape[0]
        params[name] = (torch.where(tail, laplace, normal) * math.sqrt(2 / fan_in)).view(like.shape)
    return params


def transformer(layers: int = 12, width: int = 768) -> Params:
    """Shapes of a transformer's layers, without values: 85 million weights by default."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for norm in ("norm1", "norm2"):
            shapes |= {f"{layer}.{norm}.weight": (width,), f"{layer}.{norm}.bias": (width,)}
        for linear, n, m in ("qkv", 3, 1), ("proj", 1, 1), ("fc1", 4, 1), ("fc2", 1, 4):
            shapes |= {f"{layer}.{linear}.weight": (n * width, m * width), f"{layer}.{linear}.bias": (n * width,)}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def updates(of: Params, seed: int = 0) -> Params:
    """Tensors of these shapes with values like those of a client's update: Laplace, variance one."""
    g = torch.Generator().manual_seed(seed)
    return {name: _laplace(like.numel(), g).view(like.shape) for name, like in of.items()}


def _laplace(n: int, g: torch.Generator) -> Tensor:
    """Independent values of variance one."""
    sign = torch.where(torch.rand(n, generator=g) < 0.5, -1.0, 1.0)
    return sign * torch.empty(n).exponential_(math.sqrt(2), generator=g)


def codecs() -> dict[str, Codec]:
    """Codecs of the table, by name."""
    table = {
        "Identity": Codec(Identity()),
        "Cast(float16)": Codec(Cast("float16")),
        "Cast(bfloat16)": Codec(Cast("bfloat16")),
    }
    for bits in (8, 6, 4, 2):
        table[f"KMeans({bits})"] = Codec(KMeans(bits))
    for bits in (8, 6, 5, 4):
        table[f"Uniform({bits})"] = Codec(Uniform(bits))
        table[f"Uniform({bits}) + Zstd"] = Codec(Uniform(bits), Zstd())
        table[f"Uniform({bits}) + Range"] = Codec(Uniform(bits), Range())
    table["KMeans(4) + Zstd"] = Codec(KMeans(4), Zstd())
    table["Stochastic(4)"] = Codec(Stochastic(4))
    return table


def rows(params: Params, repeats: int, tick: Tick) -> Iterator[CodecRow]:
    """Rows of the table, one codec at a time."""
    for name, codec in codecs().items():
        tick(name)
        yield row(name, codec, params, repeats)


def row(name: str, codec: Codec, params: Params, repeats: int) -> CodecRow:
    """Measure one codec on these tensors."""
    frame = pack(codec, params, key=key(0, "bench"))
    jobs: dict[str, Job] = {
        "encode": partial(pack, codec, params, key=key(0, "bench")),
        "decode": partial(unpack, frame, params),
    }
    took = medians(jobs, repeats)
    return CodecRow(
        name,
        8 * len(frame) / sum(x.numel() for x in params.values()),
        len(frame),
        1e3 * took["encode"],
        1e3 * took["decode"],
        snr(params, unpack(frame, params)),
    )


def snr(params: Params, decoded: Params) -> float | None:
    """10 log10(sum w^2 / sum (w - w')^2), None if nothing was lost."""
    error = sum(squared(params[name], decoded[name]) for name in params)
    signal = sum(squared(x, torch.zeros(1)) for x in params.values())
    return 10 * math.log10(signal / error) if error else None


def squared(a: Tensor, b: Tensor) -> float:
    return float(((a.double() - b.double()) ** 2).sum())


def medians(jobs: Mapping[str, Job], repeats: int, tick: Callable[[str], None] = lambda name: None) -> dict[str, float]:
    """Median CPU seconds of each job; each repetition runs all jobs, and the first is not measured."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            tick(name)
            start = time.process_time()
            job()
            if repeat:
                times[name].append(time.process_time() - start)
    return {name: median(seconds) for name, seconds in times.items()}
