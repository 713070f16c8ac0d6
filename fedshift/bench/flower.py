"""A figure of `fedshift bench flower`: a round of a Flower app in one process, against a plain loop."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from fedshift.algorithms.fedshift import Shift, shift
from fedshift.bench.codecs import Bar
from fedshift.codecs import Codec, KMeans
from fedshift.core.types import Params
from fedshift.flower.testing.bench import CLIENTS, Work, on_grid
from fedshift.wire.measure import Job, medians
from fedshift.wire.writer import EXACT, pack, unpack

CODECS = {4: Codec(KMeans(4)), 32: EXACT}
Tick = Callable[[str], None]
Train = Callable[[Params, int], Params]


def idle(params: Params, client: int) -> Params:
    """A client that costs nothing, so that what is left is the cost of everything else."""
    return params


def by_hand(start: Params, train: Train, codec: Codec) -> Params:
    """Train, encode, decode, average and shift, client after client, as one would write it without Flower."""
    uploads = (unpack(pack(codec, train(start, client), base=1), start) for client in range(CLIENTS))
    return averaged(uploads, start, codec)


def averaged(uploads: Iterator[Params], start: Params, codec: Codec) -> Params:
    total = {name: torch.zeros_like(w) for name, w in start.items()}
    for upload in uploads:
        for name, w in upload.items():
            total[name] += w / CLIENTS
    return shift(total, Shift().max_share if codec.quantizer.lossy else 0.0)


def overhead(repeats: int, tick: Tick) -> tuple[list[Bar], list[tuple[str, ...]]]:
    """A round on the grid over the plain loop, and where the time goes in milliseconds."""
    work = Work()
    jobs: dict[str, Job] = {"train": lambda: [work.train(work.start, client) for client in range(CLIENTS)]}
    for bits, codec in CODECS.items():
        frame = pack(codec, work.start, base=1)
        jobs[f"encode, {bits}"] = partial(ten_times, partial(pack, codec, work.start, base=1))
        jobs[f"decode, {bits}"] = partial(ten_times, partial(unpack, frame, work.start))
        jobs[f"average, {bits}"] = partial(average_ten, work.start, codec)
        for training, train in ("trained", work.train), ("idle", idle):
            jobs[f"grid, {training}, {bits}"] = on_grid(work.start, train, codec, CLIENTS)
            jobs[f"plain, {training}, {bits}"] = partial(by_hand, work.start, train, codec)
    with quiet():
        took = medians(jobs, repeats, tick)
    bars = []
    for what, training, asked in ("round on the grid", "trained", "<= 2x"), ("the same without training", "idle", "-"):
        for bits in CODECS:
            ratio = took[f"grid, {training}, {bits}"] / took[f"plain, {training}, {bits}"]
            bars.append(Bar(f"{what}, {bits} bit / plain loop", asked, ratio, asked == "-" or ratio <= 2))
    return bars, [(what, *(f"{1e3 * seconds:.0f}" for seconds in figures)) for what, figures in parts(took)]


def parts(took: dict[str, float]) -> Iterator[tuple[str, list[float]]]:
    """Seconds for each number of bits."""
    yield "local training", [took["train"]] * len(CODECS)
    for what, job in ("encoding", "encode"), ("decoding", "decode"), ("average and shift", "average"):
        yield what, [took[f"{job}, {bits}"] for bits in CODECS]
    plain, grid = ([took[f"{way}, trained, {bits}"] for bits in CODECS] for way in ("plain", "grid"))
    yield "round of the plain loop", plain
    yield "round on the grid", grid
    yield "what Flower's records and messages add", [g - p for g, p in zip(grid, plain, strict=True)]


def ten_times(job: Job) -> None:
    for _ in range(CLIENTS):
        job()


def average_ten(upload: Params, codec: Codec) -> None:
    averaged(iter([upload] * CLIENTS), upload, codec)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what Flower says of every round."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
