"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

    client:  w_k = w - lr * grad F_k(w), repeated
    server:  w = sum_k p_k w_k

With a quantized uplink it is FedPAQ (Reisizadeh et al. 2020) on weights, the paper's baseline.
"""

from dataclasses import dataclass

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule
from fedshift.core.types import Broadcast, Params, Round


@dataclass(frozen=True)
class Plain(ClientRule):
    """Plain SGD."""


@dataclass(frozen=True)
class Average(ServerRule):
    """w = sum_k p_k w_k"""

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        return out._replace(params=rnd.mean), state


def fedavg() -> Algorithm:
    """w = sum_k p_k w_k; with quantized uploads it is FedPAQ.

    >>> import torch
    >>> sent, mean = Broadcast({"w": torch.zeros(2)}, {}), {"w": torch.ones(2)}
    >>> rnd = Round(1, arrived=10, population=100, start=sent, mean=mean, share=0.5)
    >>> fedavg().server.apply(sent, {}, rnd)[0].params
    {'w': tensor([1., 1.])}
    """
    return Algorithm(Plain(), Average())
