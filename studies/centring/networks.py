"""Filter centring on small networks of many kinds: which layers to centre, and where it helps, has no effect, or harms.

    python studies/centring/networks.py [--part PART ...] [--seeds 3] [--first 0] [--rounds 100]

    input     the input layer centred alone, with the others, and left out, by its fan-in
    inner     inner layers of small fan-in, each centred alone
    final     every network with the layers that the library selects, against no shift and the rule per layer
    coarse    the same with half of the clients at 4 bit
    fresh     the transformer on seeds 3 to 8, with two conditions on the fan-in
    limits    iid clients, weak heterogeneity, other algorithms, larger cohorts, long training

The task is that of the preset `demo`: digits, 100 clients of two labels, ten per round, five local epochs, on a CPU.
Runs of one network in one setting differ in rule and seed and are trained as one stack. Each part is written to
`results/networks_<part>.csv`, one row for each run. The score is the mean accuracy of the last ten rounds, in percent.
All parts together take about an hour on one core; `--match` restricts a part to networks whose name contains a text.
"""

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import DEMO

from fedshift.algorithms import Algorithm, Shift, chain, filters
from fedshift.core.types import Broadcast, Params, Round
from fedshift.engines import Batched, Engine, Sequential, StackError
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import OpenRound, Ram
from fedshift.runs.progress import echo
from fedshift.runs.summary import WINDOW

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("study", "network", "setting", "rule", "seed", "rounds", "score")

# A rule returns the shift of a federation, None for no shift.
Rule = Callable[[Federation], Shift | None]


def centred(chosen: Callable[[int, int], bool]) -> Rule:
    """Filter centring of the weights for which `chosen(place, fan_in)` is true; place 0 is the input layer."""

    def rule(fed: Federation) -> Shift:
        found = filters(fed.task.model).items()
        fan_ins = {name: at.fan_in(fed.task.params[name].shape) for name, at in found}
        names = [name for place, (name, fan_in) in enumerate(fan_ins.items()) if chosen(place, fan_in)]
        return Shift("filter", 1.0, tensors=tuple(names))

    return rule


RULES: dict[str, Rule] = {
    "no shift": lambda fed: None,
    "layer .5": lambda fed: Shift("layer", 0.5),
    "filter 1": lambda fed: Shift("filter", 1.0),
    "every filter": centred(lambda place, fan_in: True),
    "input layer": centred(lambda place, fan_in: place == 0),
    "all but the input layer": centred(lambda place, fan_in: place > 0),
    "second layer": centred(lambda place, fan_in: place == 1),
    "third layer": centred(lambda place, fan_in: place == 2),
    "fourth layer": centred(lambda place, fan_in: place == 3),
    "fan-in of 64 or more": centred(lambda place, fan_in: fan_in >= 64),
    "embedding, too": lambda fed: Shift("filter", 1.0, tensors=("embed.weight", "hidden.weight", "head.weight")),
}
PAIRED = ("no shift", "layer .5", "filter 1")
BY_PLACE = ("no shift", "input layer", "all but the input layer", "every filter")


@dataclass(frozen=True)
class Adam:
    """FedAdam: d = w - w^t;  m = b1 m + (1 - b1) d;  v = b2 v + (1 - b2) d^2;  w = w^t + rate m / (sqrt(v) + tau)

    Reddi et al., Adaptive Federated Optimization, 2021. w is the output of the preceding rules.
    """

    rate: float
    trained: tuple[str, ...]
    tau: float = 1e-3
    b1: float = 0.9
    b2: float = 0.99

    def init(self, params: Params) -> Params:
        m = {f"m/{name}": torch.zeros_like(params[name]) for name in self.trained}
        return m | {f"v/{name}": torch.full_like(params[name], self.tau**2) for name in self.trained}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        params, after = dict(out.params), dict[str, torch.Tensor]()
        for name in self.trained:
            start = rnd.start.params[name]
            d = params[name] - start
            m = self.b1 * state[f"m/{name}"] + (1 - self.b1) * d
            v = self.b2 * state[f"v/{name}"] + (1 - self.b2) * d * d
            params[name] = start + self.rate * m / (v.sqrt() + self.tau)
            after |= {f"m/{name}": m, f"v/{name}": v}
        return out._replace(params=params), after


@dataclass(frozen=True)
class Case:
    """One network in one setting, under several rules."""

    network: str
    model: str  # a function of models.py
    args: dict[str, Any] = field(default_factory=dict)
    rules: Sequence[str] = PAIRED
    setting: str = "32+32"
    changed: dict[str, Any] = field(default_factory=dict)  # settings, named with their table
    adam: float = 0.0  # the server's rate of FedAdam; 0 for none
    seeds: Sequence[int] | None = None

    def federation(self, rule: str, seed: int, rounds: int) -> Federation:
        base = Experiment(**DEMO, seed=seed, shift={"on": False}, engine={"name": "sequential"})
        changes = {"model.name": f"models:{self.model}", "model.args": self.args, "train.rounds": rounds}
        fed = build(base.changed(**changes | {"uplink.bits": "32+32"} | self.changed))
        client, server = fed.algorithm
        rules = [Adam(self.adam, tuple(fed.task.trained))] if self.adam else []
        shift = RULES[rule](fed)
        return replace(fed, algorithm=Algorithm(client, chain(server, *rules, *([shift] if shift else []))))


def train(feds: Sequence[Federation], rounds: int) -> list[float]:
    """Train runs of one network at the same time, as one stack if the network allows it; return the score of each."""
    engines: list[Engine]
    try:
        engines = [Batched(feds[0].task, "fp32")] * len(feds)
    except StackError:
        engines = [Sequential(fed.task) for fed in feds]
    states, memories = [fed.start() for fed in feds], [Ram() for _ in feds]
    scores: list[list[float]] = [[] for _ in feds]
    for number in range(1, rounds + 1):
        open_rounds = [OpenRound(fed, state, memory) for fed, state, memory in zip(feds, states, memories, strict=True)]
        jobs = [opened.job for opened in open_rounds if opened.job]
        if isinstance(engines[0], Batched):
            made = engines[0].train(jobs)
        else:
            made = [engine.train([job])[0] for engine, job in zip(engines, jobs, strict=True)]
        for opened, uploads in zip(open_rounds, made, strict=True):
            opened.take(uploads)
        for i, opened in enumerate(open_rounds):
            states[i], outcome = opened.end(engines[i].evaluate if number > rounds - WINDOW else None)
            if outcome.accuracy is not None:
                scores[i].append(100 * outcome.accuracy)
    return [fmean(values) for values in scores]


def patches(height: int, width: int, activation: str = "relu") -> Case:
    name = f"patches {height}x{width}, {activation}, fan-in {height * width}"
    return Case(name, "patches", {"height": height, "width": width, "activation": activation}, BY_PLACE)


def bottleneck(inputs: int, activation: str) -> Case:
    rules = ("no shift", "input layer", "third layer", "all but the input layer", "every filter")
    name = f"MLP with a layer of {inputs} inputs, {activation}"
    return Case(name, "mlp", {"bottleneck": inputs, "activation": activation}, rules)


def separable(kernel: int, width: int) -> Case:
    name = f"CNN, depthwise {kernel}x{kernel}, 1x1 on {width} channels"
    rules = ("no shift", "second layer", "third layer", "fourth layer")
    return Case(name, "separable", {"kernel": kernel, "width": width}, rules)


def convolution(activation: str) -> Case:
    rules = ("no shift", "second layer", "third layer", "all but the input layer")
    return Case(f"CNN 3x3, {activation}", "cnn", {"activation": activation}, rules)


NETWORKS = [
    Case("MLP 64-128-10", "mlp"),
    Case("MLP 64-128-10, tanh", "mlp", {"activation": "tanh"}),
    Case("MLP 64-128-10, LayerNorm", "mlp", {"norm": True}),
    Case("CNN 3x3", "cnn"),
    Case("CNN 5x5", "cnn", {"kernel": 5}),
    Case("CNN 3x3, GroupNorm", "cnn", {"norm": "group"}),
    Case("CNN 3x3, BatchNorm", "cnn", {"norm": "batch"}),
    Case("CNN, depthwise 3x3", "separable"),
    Case("CNN, transposed convolution", "upsampling"),
    Case("LSTM, rows of 8 pixels", "lstm"),
    Case("LSTM, rows of 8 pixels, rate 0.3", "lstm", changed={"train.lr": 0.3}),
    Case("transformer, rows of 8 pixels", "transformer"),
    Case("embedding of pixel values, MLP", "words", rules=(*PAIRED, "embedding, too")),
]
LIMITS: dict[str, dict[str, Any]] = {
    "iid": {"data.partition": "iid"},
    **{
        f"dirichlet {alpha:g}": {"data.partition": "dirichlet", "data.alpha": alpha, "data.least": 1}
        for alpha in (0.1, 1.0, 100.0)
    },
    "FedProx 0.01": {"algorithm.name": "fedprox", "algorithm.mu": 0.01},
    "FedProx 1": {"algorithm.name": "fedprox", "algorithm.mu": 1.0},
    "SCAFFOLD": {"algorithm.name": "scaffold"},
    "30 clients a round": {"train.cohort": 30},
    "100 clients a round": {"train.cohort": 100},
    "600 rounds": {"train.rounds": 600},
}
PARTS: dict[str, list[Case]] = {
    "input": [
        *(patches(*sides) for sides in ((2, 2), (1, 8), (2, 4), (4, 4), (2, 8), (4, 8), (8, 8))),
        patches(4, 4, "tanh"),
        *(Case(f"MLP, fan-in {side**2}", "mlp", {"side": side}, BY_PLACE) for side in (2, 3, 4, 5, 6, 8)),
        Case("MLP, tanh, fan-in 64", "mlp", {"activation": "tanh"}, BY_PLACE),
        *(Case(f"CNN {k}x{k}, fan-in {k**2}", "cnn", {"kernel": k}, BY_PLACE) for k in range(2, 8)),
        *(Case(f"transformer, fan-in {8 * rows}", "transformer", {"rows": rows}, BY_PLACE) for rows in (1, 2, 4)),
        *(Case(f"LSTM, fan-in {8 * rows}", "lstm", {"rows": rows}, BY_PLACE) for rows in (1, 2, 4)),
    ],
    "inner": [
        *(bottleneck(inputs, activation) for activation in ("relu", "tanh") for inputs in (8, 16, 32)),
        *(separable(kernel, width) for kernel in (3, 5, 7) for width in (8, 16)),
        *map(convolution, ("relu", "tanh")),
    ],
    "final": NETWORKS,
    "coarse": [replace(case, setting="32+4", changed=case.changed | {"uplink.bits": "32+4"}) for case in NETWORKS],
    "fresh": [
        Case(
            "transformer, rows of 8 pixels",
            "transformer",
            rules=("no shift", "filter 1", "fan-in of 64 or more"),
            seeds=range(3, 9),
        )
    ],
    "limits": [
        *(Case("MLP 64-128-10", "mlp", setting=name, changed=changed) for name, changed in LIMITS.items()),
        *(Case("MLP 64-128-10", "mlp", setting=f"FedAdam {rate:g}", adam=rate) for rate in (0.01, 0.03)),
        *(Case("CNN 3x3", "cnn", setting=name, changed=LIMITS[name]) for name in ("iid", "SCAFFOLD")),
    ],
}


def rows(study: str, case: Case, seeds: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rows of a case, one per rule and seed."""
    rounds = case.changed.get("train.rounds", rounds)
    runs = [(rule, seed) for rule in case.rules for seed in case.seeds or seeds]
    scores = train([case.federation(rule, seed, rounds) for rule, seed in runs], rounds)
    return [
        dict(zip(COLUMNS, (study, case.network, case.setting, rule, seed, rounds, f"{score:.2f}"), strict=True))
        for (rule, seed), score in zip(runs, scores, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Filter centring on small networks of many kinds.")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds per run (default: 100)")
    parser.add_argument("--match", default="", help="only networks whose name contains this text")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files (default: results/ here)")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for part in args.part:
        with (args.out / f"networks_{part}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for case in PARTS[part]:
                if args.match not in case.network:
                    continue
                begin, made = time.perf_counter(), rows(part, case, seeds, args.rounds)
                writer.writerows(made)
                file.flush()
                for rule in case.rules:
                    found = " ".join(row["score"] for row in made if row["rule"] == rule)
                    echo(f"{case.network}, {case.setting}: {rule}: {found}")
                echo(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
