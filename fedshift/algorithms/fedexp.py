"""FedExP: Jhunjhunwala, Wang, Joshi, Speeding Up Federated Averaging via Extrapolation, 2023.

    server:  d_k = w_k - w_t,  d = sum_k p_k d_k
             lr = max(1, sum_k |d_k|^2 / (2 K (|d|^2 + eps)))
             w = w_t + lr d

The norms are over all trained tensors. The authors evaluate the mean of the last two models; this rule does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.tree import tmap, zeros
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round


@dataclass(frozen=True)
class Extrapolation(ServerRule):
    """Server rate from the norms of the updates.

    Updates 3 and -1: sum of squares 10, mean 1, so lr = 10 / (2 * 2 * 1) = 2.5 and w = 2.5.

    >>> sent = Broadcast({"w": torch.zeros(1)}, {})
    >>> state = Extrapolation(0.0).init(sent.params, ["w"])[1]
    >>> for value in (3.0, -1.0):
    ...     upload = DecodedUpload(0, {"w": torch.tensor([value])}, {}, torch.tensor(1.0), 1, False, 0.0)
    ...     state, _ = Extrapolation(0.0).take(upload, sent, state, {})
    >>> mean = {"w": torch.tensor([1.0])}
    >>> rnd = Round(1, 2, 2, sent, mean, 0.0, model=sent.params)
    >>> Extrapolation(0.0).apply(Broadcast(mean, {}), state, rnd)[0].params
    {'w': tensor([2.5000])}
    """

    eps: float = 1e-3

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return {}, {name: torch.zeros((), dtype=torch.float64, device=params[name].device) for name in trained}

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        """Add |d_k|^2 of each tensor."""
        return tmap(lambda total, w, start: total + square(w - start), state, upload.decoded, sent.params), memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        d = {name: out.params[name] - rnd.model[name] for name in state}
        mean, total = (torch.stack(list(x.values())).sum() for x in (tmap(square, d), state))
        lr = (total / (2 * rnd.arrived * (mean + self.eps))).clamp(min=1.0)
        w = {name: (rnd.model[name] + lr * x).to(x.dtype) for name, x in d.items()}
        return out._replace(params=out.params | w), zeros(state)


def square(x: Tensor) -> Tensor:
    return x.double().square().sum()


def fedexp(eps: float = 1e-3) -> Algorithm:
    """Server rate max(1, sum_k |d_k|^2 / (2 K (|d|^2 + eps)))."""
    return Algorithm(Plain(), chain(Average(), Extrapolation(eps)))
