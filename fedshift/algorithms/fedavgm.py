"""FedAvgM: Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019.

server:  d = sum_k p_k w_k - w_t
         v = momentum v + d
         w = w_t + lr v
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.tree import take, zeros
from fedshift.core.types import Broadcast, Params, Round


@dataclass(frozen=True)
class Momentum(ServerRule):
    """v = momentum v + d;  w = w_t + lr v

    >>> import torch
    >>> w, mean = {"w": torch.zeros(1)}, {"w": torch.tensor([2.0])}
    >>> rnd = Round(2, 1, 1, Broadcast(w, {}), mean, 0.0, model=w)
    >>> Momentum(0.5).apply(Broadcast(mean, {}), {"w": torch.tensor([4.0])}, rnd)[0].params  # 0.5 * 4 + 2
    {'w': tensor([4.])}
    """

    momentum: float = 0.9
    lr: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.momentum < 1 and self.lr > 0):
            raise ValueError(f"{self}: momentum must be in [0, 1), and lr positive")

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return {}, zeros(take(params, trained))

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        v = {name: self.momentum * x + (out.params[name] - rnd.model[name]) for name, x in state.items()}
        w = {name: rnd.model[name] + self.lr * x for name, x in v.items()}
        return out._replace(params=out.params | w), v


def fedavgm(momentum: float = 0.9, lr: float = 1.0) -> Algorithm:
    """Momentum on the server."""
    return Algorithm(Plain(), chain(Average(), Momentum(momentum, lr)))
