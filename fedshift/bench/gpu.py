"""The figures of `fedshift bench engines` on a GPU: many runs at once against one model, and one client at a time.

All of it is the paper's experiment (its CNN, 10 of 100 clients a round, 1,000 images each, ten epochs, batch 50,
crop and flip) on noise in the shape of CIFAR-10, measured in this process, device time synchronized.
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

from fedshift.bench.codecs import Bar
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
BASELINE = {"bf16": 1.55, "tf32": 2.05}  # us a sample above which centralised training was not done well
AMORTISED = {"bf16": 125, "tf32": 165}  # seconds for a run of 800 rounds
ALONE = 40.0  # us a sample of the sequential engine above which it is no measure
LR = 1e-4  # noise teaches nothing: at the paper's rate runs diverge, and rounds with NaN in them are timed
WARM = 4  # rounds in which kernels are compiled and graphs are recorded
CURVE = (1, 2, 4, 8, 10, 12)
ROUNDS, SAMPLES = 800, 100_000  # of the paper, and of one of its rounds


class Packed(NamedTuple):
    """A round of so many runs, medians over rounds."""

    runs: int
    train: float  # seconds
    whole: float
    memory: int  # bytes, the most there were

    @property
    def sample(self) -> float:
        """us of local training for one sample."""
        return 1e6 * self.train / (self.runs * SAMPLES)


def measure(rounds: int, tick: Tick) -> tuple[list[Bar], list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Bars, the table of precisions, and the curve of packs."""
    data = images(50_000, 10_000).to("cuda")
    bars: list[Bar] = []
    table: list[tuple[str, ...]] = []
    curve: list[tuple[str, ...]] = []
    for precision in BASELINE:
        tick(f"one client at a time, {precision}")
        alone = one_at_a_time(data, precision)
        tick(f"centralised training, {precision}")
        central = centralised(data, precision)
        points = []
        for runs in CURVE:
            tick(f"{runs} runs at once, {precision}")
            points.append(packed(data, runs, precision, rounds))
        ten = points[CURVE.index(10)]
        bars += promises(precision, central, alone, ten)
        rise = max(after.sample / before.sample for before, after in pairwise(points))
        bars.append(Bar(f"{precision}: cost a sample, 1 to 12 runs, largest rise", "<= 1.01x", rise, rise <= 1.01))
        figures = (central, alone, ten.sample, ten.whole, ten.whole / 10 * ROUNDS)
        table.append((precision, *(f"{figure:.3g}" for figure in figures)))
        curve.append((precision, *(f"{point.sample:.3f}" for point in points)))
    return bars, table, curve


def promises(precision: str, central: float, alone: float, ten: Packed) -> list[Bar]:
    """A baseline that is slower than it should be counts for nothing."""
    ratio, gain, run = ten.sample / central, alone / ten.sample, ten.whole / 10 * ROUNDS
    rest, most = (ten.whole - ten.train) / ten.whole, AMORTISED[precision]
    fair, sound = central <= BASELINE[precision], alone <= ALONE
    return [
        Bar(f"{precision}: a sample, 10 runs x 10 clients / centralised", "<= 1x", ratio, fair and ratio <= 1),
        Bar(f"{precision}: a sample, one client at a time / 10 runs", ">= 18x", gain, sound and gain >= 18),
        Bar(f"{precision}: seconds for a run of 800 rounds, of ten", f"<= {most}", run, run <= most),
        Bar(f"{precision}: all but local training / round", "<= 0.1x", rest, rest <= 0.1),
        Bar(f"{precision}: GB of device memory, 100 clients", "<= 12", ten.memory / 1e9, ten.memory <= 12e9),
    ]


def paper(precision: str, seed: int = 0) -> Experiment:
    """The paper's experiment, 32+4 bits, for as long as one likes."""
    settings = {
        "seed": seed,
        "train": {"rounds": 1_000_000, "lr": LR},
        "engine": {"name": "batched", "device": "cuda", "precision": precision},
        "record": {"checkpoint": 100},
    }
    return Experiment(**merge(PRESETS["paper"], settings))


def packed(data: Dataset, runs: int, precision: str, rounds: int) -> Packed:
    """Whole rounds of so many runs that differ in their seeds, each recorded in a folder of its own."""
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
    first = Run(paper(precision), out / "0", data=data)
    engine: Engine = first.engine
    others = [
        Run(paper(precision, seed), out / str(seed), data=data, on=lambda run: Seat(engine)) for seed in range(1, runs)
    ]
    return [first, *others], engine


def one_at_a_time(data: Dataset, precision: str) -> float:
    """us a sample of the sequential engine on this GPU."""
    experiment = paper(precision).changed(**{"engine.name": "sequential", "train.cohort": 2})
    run = Run(experiment, data=data)
    assert isinstance(run.engine, Sequential)
    took = [next(run).seconds["train"] for _ in range(3)]
    run.close()
    return 1e6 * median(took[1:]) / (SAMPLES / 5)


def centralised(data: Dataset, precision: str, batch: int = 5000, steps: int = 40) -> float:
    """us a sample of SGD on one model with large batches, as one CUDA graph: what the GPU does without federation."""
    model = PaperCNN().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, fused=True)
    index = torch.randint(0, len(data.x), (batch,), device="cuda")
    short = precision == "bf16"
    table = kernels.levels(data, torch.bfloat16 if short else torch.float32)
    keys = torch.arange(batch, device="cuda")

    def step() -> None:
        drawn = draws(keys).to(torch.int32)
        x = kernels.images(data.x, index[None], drawn[None], table)[0].permute(0, 3, 1, 2)  # channels last
        with torch.autocast("cuda", torch.bfloat16, enabled=short, cache_enabled=False):
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
