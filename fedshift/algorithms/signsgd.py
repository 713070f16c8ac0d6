"""signSGD with majority vote: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018.

    client:  sends sign(w_k - w_t), with sign(0) = 0
    server:  w = w_t + lr sign(sum_k p_k sign(w_k - w_t))

Signs are three values, which `uplink.bits = 2` codes exactly, and a range coder below 1.6 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import tmap
from fedshift.core.types import Broadcast, Params, Round


@dataclass(frozen=True)
class Signs(ClientRule):
    """sign(w_k - w_t)"""

    def message(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda w, start: (w - start).sign(), w, sent.params)


@dataclass(frozen=True)
class Vote(ServerRule):
    """w = w_t + lr sign(sum_k p_k m_k)

    >>> import torch
    >>> sent = Broadcast({"w": torch.zeros(3)}, {})
    >>> votes = {"w": torch.tensor([0.2, -0.6, 0.0])}  # weighted means of signs
    >>> Vote(0.5).apply(sent, {}, Round(1, 3, 3, sent, {}, 0.0, model=sent.params, message=votes))[0].params
    {'w': tensor([ 0.5000, -0.5000,  0.0000])}
    """

    lr: float

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        votes: Mapping[str, Tensor] = rnd.message
        w = {name: rnd.model[name] + self.lr * x.sign() for name, x in votes.items()}
        return out._replace(params=out.params | w), state


def signsgd(lr: float = 1e-3) -> Algorithm:
    """Every weight moves by lr in the direction of the majority."""
    if not lr > 0:
        raise ValueError(f"signsgd(lr={lr}): lr must be positive")
    return Algorithm(Signs(), chain(Average(), Vote(lr)))
