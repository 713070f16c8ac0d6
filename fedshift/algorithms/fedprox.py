"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020.

client:  minimises F_k(w) + mu/2 |w - w_t|^2, so each step adds mu (w - w_t) to the gradient
server:  as in FedAvg
"""

from dataclasses import dataclass

from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.tree import tmap
from fedshift.core.types import Broadcast, Params


@dataclass(frozen=True)
class Prox(Plain):
    """grad + mu (w - w_t)

    >>> import torch
    >>> sent = Broadcast({"w": torch.tensor([1.0])}, {})
    >>> Prox(0.5).adjust({"w": torch.tensor([3.0])}, {"w": torch.tensor([5.0])}, sent, {})
    {'w': tensor([5.])}
    """

    mu: float

    def __post_init__(self) -> None:
        if not self.mu >= 0:
            raise ValueError(f"Prox(mu={self.mu}): mu must be 0 or more")

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        if not self.mu:
            return grad
        return tmap(lambda g, w, start: g.add(w - start, alpha=self.mu), grad, w, sent.params)

    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        return self.mu, tmap(lambda start: -self.mu * start, sent.params)


def fedprox(mu: float = 0.01) -> Algorithm:
    """Clients follow grad + mu (w - w_t); the server averages.

    >>> fedprox(0.1)
    Algorithm(client=Prox(mu=0.1), server=Average())
    """
    return Algorithm(Prox(mu), Average())
