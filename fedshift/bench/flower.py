"""Measurement of `fedshift bench flower`: a round of a Flower app in one process, against a plain loop."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from fedshift.algorithms.fedshift import Shift, shift
from fedshift.bench.codecs import Target
from fedshift.codecs import Codec, KMeans
from fedshift.codecs.exact import EXACT
from fedshift.core.types import Params
from fedshift.flower.testing.bench import CLIENTS, Work, on_grid
from fedshift.wire.measure import Job, medians
from fedshift.wire.writer import pack, unpack

CODECS = {4: Codec(KMeans(4)), 32: EXACT}
Tick = Callable[[str], None]
Train = Callable[[Params, int], Params]


def idle(params: Params, client: int) -> Params:
    """Client that does not train, to measure the cost of everything else."""
    return params


def by_hand(start: Params, train: Train, codec: Codec) -> Params:
    """Plain loop over clients without Flower: train, encode, decode, average and shift."""
    uploads = (unpack(pack(codec, train(start, client), base=1), start) for client in range(CLIENTS))
    return averaged(uploads, start, codec)


def averaged(uploads: Iterator[Params], start: Params, codec: Codec) -> Params:
    total = {name: torch.zeros_like(w) for name, w in start.items()}
    for upload in uploads:
        for name, w in upload.items():
            total[name] += w / CLIENTS
    return shift(total, Shift().max_share if codec.quantizer.lossy else 0.0)


def overhead(repeats: int, tick: Tick) -> tuple[list[Target], list[tuple[str, ...]]]:
    """Time of a round on the grid divided by that of the plain loop, and a table of milliseconds per part."""
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
    targets = []
    for title, training, asked in ("round on the grid", "trained", "<= 2x"), ("the same without training", "idle", "-"):
        for bits in CODECS:
            ratio = took[f"grid, {training}, {bits}"] / took[f"plain, {training}, {bits}"]
            targets.append(Target(f"{title}, {bits} bit / plain loop", asked, ratio, asked == "-" or ratio <= 2))
    return targets, [(part, *(f"{1e3 * seconds:.0f}" for seconds in figures)) for part, figures in parts(took)]


def parts(took: dict[str, float]) -> Iterator[tuple[str, list[float]]]:
    """Parts of a round with their seconds, for each number of bits."""
    yield "local training", [took["train"]] * len(CODECS)
    for part, job in ("encoding", "encode"), ("decoding", "decode"), ("average and shift", "average"):
        yield part, [took[f"{job}, {bits}"] for bits in CODECS]
    plain, grid = ([took[f"{loop}, trained, {bits}"] for bits in CODECS] for loop in ("plain", "grid"))
    yield "round of the plain loop", plain
    yield "round on the grid", grid
    yield "added by Flower's records and messages", [g - p for g, p in zip(grid, plain, strict=True)]


def ten_times(job: Job) -> None:
    for _ in range(CLIENTS):
        job()


def average_ten(upload: Params, codec: Codec) -> None:
    averaged(iter([upload] * CLIENTS), upload, codec)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log lines of Flower."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
