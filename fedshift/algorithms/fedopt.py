"""FedOpt: Reddi et al., Adaptive Federated Optimization, 2021: FedAdagrad, FedAdam and FedYogi.

    server:  d = sum_k p_k w_k - w_t
             m = beta1 m + (1 - beta1) d
             v = v + d^2                                 Adagrad
                 beta2 v + (1 - beta2) d^2               Adam
                 v - (1 - beta2) d^2 sign(v - d^2)       Yogi
             w = w_t + lr m / (sqrt(v) + tau)

v starts at tau^2; there is no bias correction. Quantization noise increases v, so coarse uploads make shorter steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.tree import part, prefixed, take, tmap, zeros
from fedshift.core.types import Broadcast, Params, Round


@dataclass(frozen=True)
class Adaptive(ServerRule):
    """A step of the server along the update of the preceding rules.

    With d = 0.1 and beta1 = 0 Adagrad has v = 1 + 0.01 and moves by 0.1 / (1.005 + 1):

    >>> import torch
    >>> rule, w, mean = Adaptive("adagrad", lr=1.0, beta1=0.0, tau=1.0), torch.zeros(1), torch.tensor([0.1])
    >>> state = rule.init({"w": w}, ["w"])[1]
    >>> rnd = Round(1, 1, 1, Broadcast({"w": w}, {}), {"w": mean}, 0.0, model={"w": w})
    >>> rule.apply(Broadcast({"w": mean}, {}), state, rnd)[0].params
    {'w': tensor([0.0499])}
    """

    kind: Literal["adagrad", "adam", "yogi"]
    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.tau > 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 <= 1):
            raise ValueError(f"{self}: lr and tau must be positive, beta1 and beta2 between 0 and 1")

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        m = zeros(take(params, trained))
        return {}, prefixed("m/", m) | prefixed("v/", tmap(lambda x: x + self.tau**2, m))

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        d = {name: out.params[name] - rnd.model[name] for name in part("m/", state)}
        m = tmap(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, part("m/", state), d)
        v = tmap(lambda v, d: self.squares(v, d * d), part("v/", state), d)
        w = {name: rnd.model[name] + self.lr * m[name] / (v[name].sqrt() + self.tau) for name in d}
        return out._replace(params=out.params | w), prefixed("m/", m) | prefixed("v/", v)

    def squares(self, v: Tensor, square: Tensor) -> Tensor:
        """Running mean or sum of squares after d^2."""
        if self.kind == "adagrad":
            return v + square
        if self.kind == "adam":
            return self.beta2 * v + (1 - self.beta2) * square
        return v - (1 - self.beta2) * square * (v - square).sign()


def fedadagrad(lr: float = 0.1, tau: float = 1e-3) -> Algorithm:
    """Adagrad on the server: v = v + d^2, without momentum."""
    return Algorithm(Plain(), chain(Average(), Adaptive("adagrad", lr, 0.0, 0.99, tau)))


def fedadam(lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Algorithm:
    """Adam on the server: v = beta2 v + (1 - beta2) d^2."""
    return Algorithm(Plain(), chain(Average(), Adaptive("adam", lr, beta1, beta2, tau)))


def fedyogi(lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Algorithm:
    """Yogi on the server: v = v - (1 - beta2) d^2 sign(v - d^2)."""
    return Algorithm(Plain(), chain(Average(), Adaptive("yogi", lr, beta1, beta2, tau)))
