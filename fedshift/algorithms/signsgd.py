"""signSGD with majority vote: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018.

    client:  sends sign(w_k - w_t), with sign(0) = 0
    server:  w = w_t + lr sign(sum_k p_k sign(w_k - w_t))

Signs are three values, which `uplink.bits = 2` codes exactly, and a range coder below 1.6 bits.
"""

from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import added, part, take, tmap
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round

VOTES = "votes/"  # sum of p_k sign(m_k) during a round


@dataclass(frozen=True)
class Signs(ClientRule):
    """sign(w_k - w_t)"""

    def message(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda w, start: (w - start).sign(), w, sent.params)


@dataclass(frozen=True)
class Vote(ServerRule):
    """w = w_t + lr sign(sum_k p_k sign(m_k)); a vote counts p_k, whatever a client sends

    >>> import torch
    >>> sent, state = Broadcast({"w": torch.zeros(3)}, {}), {}
    >>> for k, votes in enumerate(([1.0, -1.0, 1.0], [1.0, -1.0, -1.0], [-40.0, 1.0, 0.0])):
    ...     upload = DecodedUpload(k, {"w": torch.tensor(votes)}, {}, torch.tensor(1.0), 1, False, 0.0)
    ...     state, _ = Vote(0.5).take(upload, sent, state, {})
    >>> rnd = Round(1, 3, 3, sent, sent.params, 0.0, model=sent.params, message=sent.params)
    >>> Vote(0.5).apply(sent, state, rnd)[0].params
    {'w': tensor([ 0.5000, -0.5000,  0.0000])}
    """

    lr: float

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        signs = {name: upload.weight * x.sign() for name, x in upload.decoded.items() if x.is_floating_point()}
        return added(state, VOTES, signs), memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        votes = take(part(VOTES, state), rnd.message)
        w = {name: rnd.model[name] + self.lr * x.sign() for name, x in votes.items()}
        return out._replace(params=out.params | w), {}


def signsgd(lr: float = 1e-3) -> Algorithm:
    """Every weight moves by lr in the direction of the majority."""
    if not lr > 0:
        raise ValueError(f"signsgd(lr={lr}): lr must be positive")
    return Algorithm(Signs(), chain(Average(), Vote(lr)))
