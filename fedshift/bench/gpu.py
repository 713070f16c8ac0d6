"""Measurements of `fedshift bench engines` on a GPU: packed runs against one model, and against one client at a time;
packs of other algorithms and uplinks against FedAvg.

All use the paper's experiment (its CNN, 10 of 100 clients per round with 1,000 images each, ten epochs, batch 50, crop
and flip) on random noise with the shape of CIFAR-10, in this process, with synchronized device time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

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
from fedshift.rounds.uplinks import expanded
from fedshift.runs.packs import Seat
from fedshift.runs.run import Run

Tick = Callable[[str], None]
Rows = list[tuple[str, ...]]
BASELINE = {"bf16": 1.55, "tf32": 2.05}  # us per sample; a slower centralised training is no valid baseline
AMORTISED = {"bf16": 50, "tf32": 165}  # seconds per run of 800 rounds
ALONE = 40.0  # us per sample; a slower sequential engine is no valid baseline
LR = 1e-4  # small, because runs on noise diverge at the paper's rate, and rounds with NaN would be timed
WARM = 4  # warm-up rounds: kernels are compiled and graphs are recorded
CURVE = (1, 2, 4, 8, 10, 12)
CURVES = {"bf16": CURVE, "tf32": (1, 10)}  # numbers of runs that are measured
ROUNDS, SAMPLES = 800, 100_000  # rounds of a run of the paper, samples of one of its rounds
TEN = 10  # runs of a pack
MIXED = 1.15  # a round of any pack, relative to one of FedAvg
ESTIMATED = 1.03  # a round with estimated bytes, relative to one whose bytes are known in advance
# changes of the paper's settings, which are those of FedAvg with 32+4 bits
RUNS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedProx": {"algorithm": {"name": "fedprox"}},
    "SCAFFOLD": {"algorithm": {"name": "scaffold"}},
    "Fed-EF": {"uplink": {"feedback": True}},
    "lean": {"uplink": "lean"},
    "lean, packed": {"uplink": expanded("lean") | {"bits": 8, "coder": "bitpack"}},
}
PACKS: dict[str, tuple[str, ...]] = {
    "Fed-EF": ("Fed-EF",),
    "SCAFFOLD": ("SCAFFOLD",),
    "mixed": ("FedAvg", "FedProx", "SCAFFOLD", "Fed-EF", "lean"),
    "lean": ("lean",),
    "lean, packed": ("lean, packed",),
}


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


class GpuResult(NamedTuple):
    targets: list[Target]
    precisions: Rows
    curve: Rows  # over numbers of runs
    packs: Rows  # of different runs


def measure(rounds: int, tick: Tick) -> GpuResult:
    """Measure packs of FedAvg in each precision, and packs of other runs in bf16."""
    data = images(50_000, 10_000).to("cuda")
    targets: list[Target] = []
    table: Rows = []
    curve: Rows = []
    packs: Rows = []
    for precision in BASELINE:
        tick(f"one client at a time, {precision}")
        alone = one_at_a_time(data, precision)
        tick(f"centralised training, {precision}")
        central = centralised(data, precision)
        points = {}
        for runs in CURVES[precision]:
            tick(f"pack of {runs} runs, {precision}")
            points[runs] = packed(data, [paper(precision, seed) for seed in range(runs)], rounds)
        ten = points[TEN]
        targets += pack_targets(precision, central, alone, ten)
        rise = max(after.sample / before.sample for before, after in pairwise(points.values()))
        what = f"{precision}: time per sample, {min(points)} to {max(points)} runs, largest rise"
        targets.append(Target(what, "<= 1.01x", rise, rise <= 1.01))
        if precision == "bf16":
            found = {"FedAvg": ten}
            for name in PACKS:
                tick(f"pack of ten runs, {name}, {precision}")
                found[name] = packed(data, pack(name, precision), rounds)
            targets += ratio_targets(precision, found)
            for name, measured in found.items():
                numbers = measured.train, measured.total, measured.total / ten.total, measured.memory / 1e9
                packs.append((name, *(f"{x:.3g}" for x in numbers)))
        figures = (central, alone, ten.sample, ten.total, ten.total / 10 * ROUNDS)
        table.append((precision, *(f"{figure:.3g}" for figure in figures)))
        curve.append((precision, *(f"{points[runs].sample:.3f}" if runs in points else "" for runs in CURVE)))
    return GpuResult(targets, table, curve, packs)


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


def ratio_targets(precision: str, packs: Mapping[str, Packed]) -> list[Target]:
    """Targets for seconds per round of packs of ten runs, relative to FedAvg; and of estimated bytes."""
    pairs = [(name, "FedAvg", MIXED) for name in ("Fed-EF", "SCAFFOLD", "mixed")] + [
        ("lean", "lean, packed", ESTIMATED)
    ]
    targets = []
    for name, reference, most in pairs:
        ratio = packs[name].total / packs[reference].total
        what = f"{precision}: seconds per round, ten runs, {name} / {reference}"
        targets.append(Target(what, f"<= {most}x", ratio, ratio <= most))
    return targets


def pack(name: str, precision: str) -> list[Experiment]:
    """Ten experiments of a pack, with different seeds."""
    return [paper(precision, seed, **RUNS[run]) for seed, run in enumerate(islice(cycle(PACKS[name]), TEN))]


def paper(precision: str, seed: int = 0, **changed: Any) -> Experiment:
    """The paper's experiment, 32+4 bits, without a limit of rounds; `changed`: other settings."""
    settings = {
        "seed": seed,
        "train": {"rounds": 1_000_000, "lr": LR},
        "engine": {"name": "batched", "device": "cuda", "precision": precision},
        "record": {"checkpoint": 100, "frames": 0},  # frames that check estimated bytes are not part of most rounds
    }
    return Experiment(**merge(merge(PRESETS["paper"], settings), changed))


def packed(data: Dataset, experiments: Sequence[Experiment], rounds: int) -> Packed:
    """Measure complete rounds of runs that are trained together, each recorded in a separate folder."""
    runs = len(experiments)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with folder() as out:
        opened, engine = open_pack(data, experiments, out)
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


def open_pack(data: Dataset, experiments: Sequence[Experiment], out: Path) -> tuple[list[Run], Engine]:
    """Runs of a pack and their common engine."""
    first = Run(experiments[0], out / "0", data=data)
    engine: Engine = first.engine
    others = [
        Run(experiment, out / str(place), data=data, on=lambda run: Seat(engine))
        for place, experiment in enumerate(experiments[1:], start=1)
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
