"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

    client:  w_k = w - lr * grad F_k(w), repeated
    server:  w = sum_k p_k w_k

With a quantized uplink it is FedPAQ (Reisizadeh et al. 2020) on weights, the paper's baseline.
"""

from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import Algorithm
from fedshift.core.types import Broadcast, Params, Round


@dataclass(frozen=True)
class Plain:
    """Plain SGD."""

    extra = "none"

    def init(self, params: Params) -> Params:
        return {}

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return grad

    def finish(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> tuple[Params, Params]:
        return {}, {}


@dataclass(frozen=True)
class Average:
    """w = sum_k p_k w_k"""

    def init(self, params: Params) -> Params:
        return {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        return out._replace(params=rnd.mean), state


def fedavg() -> Algorithm:
    """w = sum_k p_k w_k; with quantized uploads it is FedPAQ.

    >>> import torch
    >>> sent, mean = Broadcast({"w": torch.zeros(2)}, {}), {"w": torch.ones(2)}
    >>> rnd = Round(1, arrived=10, population=100, start=sent, mean=mean, extra={}, share=0.5)
    >>> fedavg().server.apply(sent, {}, rnd)[0].params
    {'w': tensor([1., 1.])}
    """
    return Algorithm(Plain(), Average())
