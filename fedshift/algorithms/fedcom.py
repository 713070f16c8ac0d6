"""FedCOM and FedCOMGATE: Haddadpour et al., Federated Learning with Compression, 2021.

    client:  each step follows grad - delta_k                     delta_k = 0 in FedCOM
             delta_k = delta_k + (d - d_k) / travel               when the mean update d of the round is known
    server:  d = sum_k p_k d_k, of the decoded updates d_k
             w = w_t + lr d

The mean update of a round is sent with the next model. The paper has all clients in every round; a client that missed
rounds uses the mean update of the last round instead of that of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.cmfl import LAST, SendUpdate
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.tree import over, part, prefixed, tmap, zeros
from fedshift.core.types import Broadcast, Params, Round

DELTA, OWN, TRAVEL = "delta/", "own/", "travel"  # delta_k, the decoded update of the last round, and its travel


@dataclass(frozen=True)
class Tracked(ClientRule):
    """SGD along grad - delta_k.

    >>> sent = Broadcast({}, {"last/w": torch.tensor([3.0])})
    >>> memory = {"delta/w": torch.tensor([1.0]), "own/w": torch.tensor([2.0]), "travel": torch.tensor(0.5)}
    >>> Tracked().receive(sent, memory)["delta/w"]  # 1 + (3 - 2) / 0.5
    tensor([3.])
    """

    def init(self, params: Params) -> Params:
        zero, device = zeros(params), next(iter(params.values())).device
        return prefixed(DELTA, zero) | prefixed(OWN, zero) | {TRAVEL: torch.zeros((), device=device)}

    def receive(self, sent: Broadcast, memory: Params) -> Params:
        travel, last, update = memory[TRAVEL], part(LAST, sent.control), part(OWN, memory)
        rate = torch.where(travel > 0, 1 / travel, 0.0)  # 0 before the first upload
        delta = tmap(lambda delta, d, u: delta + (d - u) * over(rate, delta), part(DELTA, memory), last, update)
        return prefixed(DELTA, delta) | prefixed(OWN, update) | {TRAVEL: torch.zeros_like(travel)}

    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        return 0.0, tmap(torch.neg, part(DELTA, memory))

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        update = tmap(lambda w, start: w - start, decoded, sent.params)
        return memory | prefixed(OWN, update) | {TRAVEL: travel.to(memory[TRAVEL])}


@dataclass(frozen=True)
class Scaled(ServerRule):
    """w = w_t + lr d

    >>> sent = Broadcast({"w": torch.ones(1)}, {})
    >>> out = Broadcast({"w": torch.tensor([3.0])}, {})
    >>> rnd = Round(1, 1, 1, sent, out.params, 0.0, model=sent.params, trained=["w"])
    >>> Scaled(2.0).apply(out, {}, rnd)[0].params
    {'w': tensor([5.])}
    """

    lr: float

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        w = {name: rnd.model[name] + self.lr * (out.params[name] - rnd.model[name]) for name in rnd.trained}
        return out._replace(params=out.params | w), state


def fedcom(lr: float = 1.0) -> Algorithm:
    """FedAvg on decoded updates with a server rate."""
    return Algorithm(Plain(), chain(Average(), Scaled(lr)))


def fedcomgate(lr: float = 1.0) -> Algorithm:
    """FedCOM with gradient tracking: clients correct their gradients by the difference to the mean update."""
    return Algorithm(Tracked(), chain(Average(), SendUpdate(), Scaled(lr)))
