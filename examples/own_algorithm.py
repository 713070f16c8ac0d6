# ruff: noqa: T201
"""An algorithm of your own: clients with a memory, and the coordinate-wise median instead of the mean.

    client:  each step follows grad + beta v_k
             v_k = (w_t - w_k) / travel               the mean direction of the client's last round
    server:  w = median_k w_k, for each coordinate

Output: the accuracy (mean of the last ten rounds) of FedAvg, of this algorithm passed as an object, and of the same
algorithm named in own_algorithm.toml. From this folder, `fedshift run own_algorithm.toml` trains and records it.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fedshift import Algorithm, Broadcast, ClientRule, Experiment, Params, Round, ServerRule, chain, fedavg, run


@dataclass(frozen=True)
class Persistent(ClientRule):
    beta: float

    def init(self, params: Params) -> Params:
        return {name: torch.zeros_like(x) for name, x in params.items()}

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return {name: g + self.beta * memory[name] for name, g in grad.items()}

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        per_client = {name: travel.reshape(*travel.shape, *[1] * (x.ndim - travel.ndim)) for name, x in w.items()}
        return {name: (sent.params[name] - x) / per_client[name] for name, x in w.items()}


@dataclass(frozen=True)
class Median(ServerRule):
    needs: ClassVar[frozenset[str]] = frozenset({"uploads"})

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        names, k = [name for name, x in out.params.items() if x.is_floating_point()], len(rnd.uploads)
        ordered = {name: torch.stack([u.decoded[name] for u in rnd.uploads]).sort(0).values for name in names}
        middle = {name: (x[(k - 1) // 2] + x[k // 2]) / 2 for name, x in ordered.items()}
        return out._replace(params=out.params | middle), state


def rule(beta: float = 0.5) -> Algorithm:
    return Algorithm(Persistent(beta), chain(fedavg().server, Median()))


def accuracy(experiment: Experiment, algorithm: Algorithm | None = None) -> float:
    last = [outcome.accuracy or 0.0 for outcome in run(experiment, algorithm=algorithm)][-10:]
    return sum(last) / len(last)


def main() -> None:
    settings = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    plain = Experiment(**{key: value for key, value in settings.items() if key != "algorithm"})
    print(f"FedAvg             {accuracy(plain):.3f}")
    print(f"mine, as an object {accuracy(plain, rule(beta=0.3)):.3f}")
    print(f"mine, by its name  {accuracy(Experiment(**settings)):.3f}")


if __name__ == "__main__":
    main()
