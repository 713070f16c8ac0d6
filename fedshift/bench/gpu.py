"""Measurements of `fedshift bench engines` on a GPU: packed runs against one model, and against one client at a time.

All use the paper's experiment (its CNN, 10 of 100 clients per round with 1,000 images each, ten epochs, batch 50, crop
and flip) on random noise with the shape of CIFAR-10, in this process, with synchronized device time.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.bench.codecs import Target
from fedshift.bench.engines import folder, images
from fedshift.data.augment import draws
from fedshift.data.datasets import Dataset
from fedshift.engines import Engine, Sequential
from fedshift.engines.gpu import kernels
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import merge
from fedshift.models import PaperCNN
from fedshift.rounds.engine import arithmetic
from fedshift.rounds.loop import run_rounds
from fedshift.runs.packs import Seat
from fedshift.runs.run import Run

Tick = Callable[[str], None]
BASELINE = {"bf16": 1.55, "tf32": 2.05}  # us per sample; a slower centralised training is no valid baseline
AMORTISED = {"bf16": 125, "tf32": 165}  # seconds per run of 800 rounds
ALONE = 40.0  # us per sample; a slower sequential engine is no valid baseline
LR = 1e-4  # small, because runs on noise diverge at the paper's rate, and rounds with NaN would be timed
WARM = 4  # warm-up rounds: kernels are compiled and graphs are recorded
CURVE = (1, 2, 4, 8, 10, 12)
ROUNDS, SAMPLES = 800, 100_000  # rounds of a run of the paper, samples of one of its rounds


class Packed(NamedTuple):
    """Measurements of a pack of runs, medians over rounds."""

    runs: int
    train: float  # seconds per round, local training
    total: float  # seconds per round, everything
    memory: int  # peak bytes

    @property
    def sample(self) -> float:
        """us of local training per sample."""
        return 1e6 * self.train / (self.runs * SAMPLES)


def measure(rounds: int, tick: Tick) -> tuple[list[Target], list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Targets, the table of precisions, and the curve over numbers of runs."""
    data = images(50_000, 10_000).to("cuda")
    targets: list[Target] = []
    table: list[tuple[str, ...]] = []
    curve: list[tuple[str, ...]] = []
    for precision in BASELINE:
        tick(f"one client at a time, {precision}")
        alone = one_at_a_time(data, precision)
        tick(f"centralised training, {precision}")
        central = centralised(data, precision)
        points = []
        for runs in CURVE:
            tick(f"pack of {runs} runs, {precision}")
            points.append(packed(data, runs, precision, rounds))
        ten = points[CURVE.index(10)]
        targets += pack_targets(precision, central, alone, ten)
        rise = max(after.sample / before.sample for before, after in pairwise(points))
        targets.append(
            Target(f"{precision}: time per sample, 1 to 12 runs, largest rise", "<= 1.01x", rise, rise <= 1.01)
        )
        figures = (central, alone, ten.sample, ten.total, ten.total / 10 * ROUNDS)
        table.append((precision, *(f"{figure:.3g}" for figure in figures)))
        curve.append((precision, *(f"{point.sample:.3f}" for point in points)))
    return targets, table, curve


def pack_targets(precision: str, central: float, alone: float, ten: Packed) -> list[Target]:
    """Targets for a precision; ratios to a baseline that is too slow are not met."""
    ratio, gain, run = ten.sample / central, alone / ten.sample, ten.total / 10 * ROUNDS
    rest, most = (ten.total - ten.train) / ten.total, AMORTISED[precision]
    central_valid, alone_valid = central <= BASELINE[precision], alone <= ALONE
    return [
        Target(
            f"{precision}: time per sample, 10 runs x 10 clients / centralised",
            "<= 1x",
            ratio,
            central_valid and ratio <= 1,
        ),
        Target(
            f"{precision}: time per sample, one client at a time / 10 runs", ">= 18x", gain, alone_valid and gain >= 18
        ),
        Target(f"{precision}: seconds per run of 800 rounds, pack of ten", f"<= {most}", run, run <= most),
        Target(f"{precision}: outside local training / round", "<= 0.1x", rest, rest <= 0.1),
        Target(f"{precision}: GB of device memory, 100 clients", "<= 12", ten.memory / 1e9, ten.memory <= 12e9),
    ]


def paper(precision: str, seed: int = 0) -> Experiment:
    """The paper's experiment, 32+4 bits, without a limit of rounds."""
    settings = {
        "seed": seed,
        "train": {"rounds": 1_000_000, "lr": LR},
        "engine": {"name": "batched", "device": "cuda", "precision": precision},
        "record": {"checkpoint": 100},
    }
    return Experiment(**merge(PRESETS["paper"], settings))


def packed(data: Dataset, runs: int, precision: str, rounds: int) -> Packed:
    """Measure complete rounds of runs that differ in their seeds, each recorded in a separate folder."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with folder() as out:
        opened, engine = open_pack(data, runs, precision, out)
        took: list[float] = []
        trained: list[float] = []
        begin, train = time.perf_counter(), 0.0
        for place, outcome in run_rounds(opened, engine, lambda: len(took) >= WARM + rounds):
            train += outcome.seconds["train"]  # type: ignore[union-attr]
            if place == runs - 1:
                torch.cuda.synchronize()
                now = time.perf_counter()
                took.append(now - begin)
                trained.append(train)
                begin, train = now, 0.0
        for run in opened:
            run.close()
    return Packed(runs, median(trained[WARM:]), median(took[WARM:]), torch.cuda.max_memory_allocated() - before)


def open_pack(data: Dataset, runs: int, precision: str, out: Path) -> tuple[list[Run], Engine]:
    """Runs of a pack and their common engine."""
    first = Run(paper(precision), out / "0", data=data)
    engine: Engine = first.engine
    others = [
        Run(paper(precision, seed), out / str(seed), data=data, on=lambda run: Seat(engine)) for seed in range(1, runs)
    ]
    return [first, *others], engine


def one_at_a_time(data: Dataset, precision: str) -> float:
    """us per sample of the sequential engine on this GPU."""
    experiment = paper(precision).changed(**{"engine.name": "sequential", "train.cohort": 2})
    run = Run(experiment, data=data)
    assert isinstance(run.engine, Sequential)
    took = [next(run).seconds["train"] for _ in range(3)]
    run.close()
    return 1e6 * median(took[1:]) / (SAMPLES / 5)


def centralised(data: Dataset, precision: str, batch: int = 5000, steps: int = 40) -> float:
    """us per sample of centralised SGD on one model with large batches, as one CUDA graph."""
    model = PaperCNN().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, fused=True)
    index = torch.randint(0, len(data.x), (batch,), device="cuda")
    bf16 = precision == "bf16"
    table = kernels.levels(data, torch.bfloat16 if bf16 else torch.float32)
    keys = torch.arange(batch, device="cuda")

    def step() -> None:
        drawn = draws(keys).to(torch.int32)
        x = kernels.images(data.x, index[None], drawn[None], table)[0].permute(0, 3, 1, 2)  # channels last
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16, cache_enabled=False):
            loss: Tensor = F.cross_entropy(model(x), data.y[index])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with arithmetic(precision):
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        torch.backends.cudnn.benchmark = before
        took = []
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                graph.replay()
            torch.cuda.synchronize()
            took.append((time.perf_counter() - begin) / steps)
    return 1e6 * median(took) / batch
