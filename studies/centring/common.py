"""Task, networks and rules of the studies of centring.

The task is that of the preset `demo`: digits, 100 clients of two labels each, 10 per round, 5 local epochs. A
`Variant` is one way to train on it; runs of one seed have the same clients, cohorts, batches and initial weights.
"""

import argparse
import copy
import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Dataset, Experiment, Params
from fedshift.algorithms import Algorithm, Average, Shift, chain
from fedshift.algorithms.base import ClientRule, ServerRule
from fedshift.algorithms.fedavg import Plain
from fedshift.core.types import Broadcast, Round
from fedshift.data import datasets
from fedshift.engines import Batched
from fedshift.engines.gpu.coding import TrainedJob
from fedshift.experiment.build import build
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.toml import merge
from fedshift.rounds.engine import Job, Upload
from fedshift.rounds.federation import Federation, Outcome, State
from fedshift.rounds.loop import DivergedError, OpenRound, Ram
from fedshift.runs.summary import WINDOW

RESULTS = Path(__file__).parent / "results"
# the task of the demo with two groups of clients, as in the published results
DEMO = merge(
    {key: part for key, part in PRESETS["demo"].items() if key != "sweep"},
    {"train": {"selection": "stratified"}, "uplink": {"quantizer": "kmeans", "coder": "bitpack"}},
)


def means(w: Tensor) -> Tensor:
    """Mean of each filter of a linear layer, or of K stacked layers: (..., outputs, 1)."""
    return w.mean(-1, keepdim=True)


def norms(w: Tensor) -> Tensor:
    """Norm of each filter, like `means`."""
    return w.norm(dim=-1, keepdim=True)


def filters(params: Params) -> list[str]:
    """Names of the tensors that have filters: weights, not biases or gains."""
    return [name for name in params if name.endswith("weight")]


# networks


class Linear(nn.Linear):
    """z = w_hat x + speed b: a linear layer whose weights are computed from w, by `kind`

        free          w_hat = w
        centred       w_hat = w - mean(w_f)
        normalised    w_hat = gain w / rms(w_f)
        standardised  w_hat = gain (w - mean(w_f)) / std(w_f)

    A bias with speed s learns s^2 times as fast. Initial gains and biases give the same function as `free` or
    `centred` weights of the same draw.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, kind: str, speed: float) -> None:
        super().__init__(inputs, outputs, bias)
        self.kind, self.speed = kind, speed
        with torch.no_grad():
            if bias:
                self.bias.div_(speed)
            if self.scaled:
                self.gain = nn.Parameter(self._centred().square().mean(1).sqrt())

    @property
    def scaled(self) -> bool:
        return self.kind in ("normalised", "standardised")

    def _centred(self) -> Tensor:
        return self.weight - means(self.weight) if self.kind in ("centred", "standardised") else self.weight

    def forward(self, x: Tensor) -> Tensor:
        w = self._centred()
        if self.scaled:
            w = w * (self.gain / (w.square().mean(1) + 1e-10).sqrt())[:, None]
        return F.linear(x, w, None if self.bias is None else self.speed * self.bias)


class Net(nn.Module):
    """Multilayer perceptron, by default with the initial weights of the library's `mlp` for the same seed."""

    def __init__(
        self,
        sizes: Sequence[int] = (64, 128, 10),
        activation: str = "relu",
        kind: str = "free",
        bias: bool = True,
        speeds: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.activation, self.count = getattr(torch, activation), len(sizes) - 1
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            setattr(self, f"fc{i + 1}", Linear(inputs, outputs, bias, kind, speeds[i] if speeds else 1.0))

    def hidden(self, x: Tensor) -> Iterator[Tensor]:
        """Input of every layer, then the logits."""
        x = x.flatten(1)
        for i in range(self.count):
            yield x
            x = getattr(self, f"fc{i + 1}")(x)
            if i + 1 < self.count:
                x = self.activation(x)
        yield x

    def forward(self, x: Tensor) -> Tensor:
        *_, logits = self.hidden(x)
        return logits


# rules of the server


@dataclass(frozen=True)
class Scheduled:
    """Rule that is applied only in every k-th round from `first` to `last`."""

    rule: ServerRule
    every: int = 1
    first: int = 1
    last: float = math.inf

    def init(self, params: Params) -> Params:
        return self.rule.init(params)

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        active = self.first <= rnd.number <= self.last and not rnd.number % self.every
        return self.rule.apply(out, state, rnd) if active else (out, state)


@dataclass(frozen=True)
class KeepMeans:
    """w^{t+1} - mean_f(w^{t+1} - w^t): every filter keeps its initial mean."""

    def init(self, params: Params) -> Params:
        return {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        start = rnd.start.params
        kept = {name: (w := out.params[name]) - means(w - start[name]) for name in filters(out.params)}
        return out._replace(params=out.params | kept), state


def remove(w: Tensor, u: Tensor) -> Tensor:
    """Remove the direction u: w_f - (w_f . u) u / |u|^2 for every filter f."""
    return w - torch.outer(w @ u, u) / u.square().sum()


@dataclass(frozen=True)
class RemoveRandom:
    """Remove a random direction instead of the mean: normal numbers, or random signs, half of them -1."""

    signs: bool

    def init(self, params: Params) -> Params:
        g = torch.Generator().manual_seed(0)
        sizes = {name: params[name].shape[1] for name in filters(params)}
        if self.signs:
            return {name: torch.ones(n) - 2 * (torch.randperm(n, generator=g) < n // 2) for name, n in sizes.items()}
        return {name: torch.randn(n, generator=g) for name, n in sizes.items()}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        return out._replace(params=out.params | {name: remove(out.params[name], u) for name, u in state.items()}), state


@dataclass(frozen=True)
class RemoveMeanInput:
    """Remove the direction of the mean input of each layer over the training set, which a real server does not know."""

    tensors: tuple[str, ...]

    def init(self, params: Params) -> Params:
        return {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        params, x = dict(out.params), prepared("raw").x
        for name in filters(params):
            if name in self.tensors:
                params[name] = remove(params[name], x.mean(0))
            x = torch.relu(x @ params[name].T + params[name.replace("weight", "bias")])
        return out._replace(params=params), state


@dataclass(frozen=True)
class RemoveMainUpdate:
    """Remove the first eigenvector of the decayed second moments of a layer's updates."""

    decay: float = 0.9

    def init(self, params: Params) -> Params:
        return {name: torch.zeros(params[name].shape[1], params[name].shape[1]) for name in filters(params)}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        params, moments = dict(out.params), {}
        for name, moment in state.items():
            update = rnd.mean[name] - rnd.start.params[name]
            moments[name] = self.decay * moment + update.T @ update
            params[name] = remove(params[name], torch.linalg.eigh(moments[name])[1][:, -1])
        return out._replace(params=params), moments


@dataclass(frozen=True)
class KeepNorms:
    """w_f |w_f^0| / |w_f|: every filter of the named tensors (default: all weights) keeps its initial norm."""

    tensors: tuple[str, ...] = ()

    def init(self, params: Params) -> Params:
        return {name: norms(params[name]) for name in self.tensors or filters(params)}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        kept = {name: (w := out.params[name]) * (norm / norms(w)) for name, norm in state.items()}
        return out._replace(params=out.params | kept), state


@dataclass(frozen=True)
class ResetBias:
    """b = 0 for the last layer, after every round."""

    name: str = "fc2.bias"

    def init(self, params: Params) -> Params:
        return {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        return out._replace(params=out.params | {self.name: torch.zeros_like(out.params[self.name])}), state


# rules of the clients


@dataclass(frozen=True)
class CentredSteps(Plain):
    """g - mean_f(g): filter means do not change during a round."""

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return grad | {name: grad[name] - means(grad[name]) for name in filters(grad)}


@dataclass(frozen=True)
class MeanDecay(Plain):
    """g + rate * mean(w_f): weight decay of the filter means only."""

    rate: float = 0.0

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return grad | {name: grad[name] + self.rate * means(w[name]) for name in filters(grad)}


class CentringClients(Batched):
    """Engine whose clients centre their weights once, before they encode them."""

    def _train(self, jobs: Sequence[Job]) -> list[TrainedJob]:
        return [
            part._replace(w=part.w | {name: part.w[name] - means(part.w[name]) for name in filters(part.w)})
            for part in super()._train(jobs)
        ]


# data


def prepared(kind: str) -> Dataset:
    """Digits unchanged ('raw', pixels in 0..1), minus a constant, minus the mean of each pixel, or plus a constant."""
    data = datasets.load("digits")
    offset = {
        "raw": torch.zeros(()),
        "minus constant": -data.x.mean(),
        "minus pixel means": -data.x.mean(0),
        "plus constant": torch.tensor(0.5),
    }[kind]
    return replace(data, x=data.x + offset, test_x=data.test_x + offset)


# runs


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    server: tuple[ServerRule, ...] = ()  # after the average
    client: ClientRule = field(default_factory=Plain)
    net: dict[str, Any] = field(default_factory=dict)  # arguments of Net
    settings: dict[str, Any] = field(default_factory=dict)  # differences from the demo
    data: str = "raw"
    upload: bool = False  # clients centre their weights before they encode

    def federation(self, bits: str, seed: int, rounds: int) -> Federation:
        model = {"name": "common:Net", "args": self.net}
        base = {"seed": seed, "uplink": {"bits": bits}, "shift": {"on": False}, "train": {"rounds": rounds}}
        settings = merge(merge(copy.deepcopy(DEMO), base), self.settings)
        fed = build(Experiment(**settings | {"model": model}), data=prepared(self.data))
        return replace(fed, algorithm=Algorithm(self.client, chain(Average(), *self.server)))


def layer(share: float) -> Shift:
    """The paper's rule at a fixed share."""
    return Shift(share=share)


def centring(share: float = 1.0, *tensors: str) -> Shift:
    """Filter centring of the named tensors (default: all weights)."""
    return Shift(per="filter", share=share, tensors=tensors or None)


PLAIN = Variant("no shift")
CENTRED = Variant("filter 1", (centring(),))


class Step(NamedTuple):
    """One round of one run."""

    seed: int
    fed: Federation
    before: State
    uploads: list[Upload]
    after: State
    outcome: Outcome


def train(variant: Variant, bits: str, seeds: Sequence[int], count: int) -> Iterator[list[Step]]:
    """Train one run per seed in one stack; a run that diverges is left out of later rounds."""
    feds = {seed: variant.federation(bits, seed, count) for seed in seeds}
    task = next(iter(feds.values())).task
    engine = (CentringClients if variant.upload else Batched)(task, "fp32")
    states = {seed: fed.start() for seed, fed in feds.items()}
    memory = {seed: Ram() for seed in seeds}
    for _ in range(count):
        open_rounds = {seed: OpenRound(feds[seed], state, memory[seed]) for seed, state in states.items()}
        jobs = [opened.job for opened in open_rounds.values() if opened.job]
        steps = []
        for (seed, opened), uploads in zip(open_rounds.items(), engine.train(jobs), strict=True):
            arrived = list(uploads)
            opened.take(arrived)
            try:
                after, outcome = opened.end(engine.evaluate)
            except DivergedError:
                del states[seed]
                continue
            steps.append(Step(seed, feds[seed], states[seed], arrived, after, outcome))
            states[seed] = after
        yield steps


def scores(variant: Variant, bits: str, seeds: Sequence[int], count: int) -> dict[int, float]:
    """Mean accuracy in percent over the last ten rounds, per seed; NaN for a run that diverged.

    The number of rounds in the settings of a variant takes precedence.
    """
    count = variant.settings.get("train", {}).get("rounds", count)
    seen: dict[int, list[float]] = {seed: [] for seed in seeds}
    for steps in train(variant, bits, seeds, count):
        for step in steps:
            seen[step.seed].append(step.outcome.accuracy or 0.0)
    return {seed: 100 * mean(x[-WINDOW:]) if len(x) == count else math.nan for seed, x in seen.items()}


def arguments(about: str | None, parts: Iterable[str]) -> argparse.Namespace:
    """Parse the command line of a study."""
    names = list(parts)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)} (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    parser.add_argument("--rounds", type=int, default=150, help="rounds per run (default: 150)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files (default: results/ here)")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: must be among {', '.join(names)}")
    args.parts = args.parts or names
    return args


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write folder/name.csv with five digits per float."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{x:.5g}" if isinstance(x, float) else x for key, x in row.items()})
