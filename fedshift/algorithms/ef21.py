"""EF21: Richtarik, Sokolov, Fatkhullin, A New, Simpler, Theoretically Better Error Feedback, 2021.

    client:  sends m_k = (w_k - w_t) - g_k, decoded as q_k
             g_k = g_k + q_k
    server:  g = g + 1/N sum_k q_k                 so that g is the mean of all g_k
             w = w_t + lr g

The step uses the last known updates of absent clients. With exact uploads and full participation it is FedAvg.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import added, part, prefixed, take, tmap, zeros
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round

MEAN, SUM = "mean/", "sum/"  # g; sum of q_k during a round


@dataclass(frozen=True)
class Differences(ClientRule):
    """Send what the update differs from the last known one.

    >>> import torch
    >>> sent, w, g = Broadcast({"w": torch.ones(1)}, {}), {"w": torch.tensor([4.0])}, {"w": torch.tensor([1.0])}
    >>> Differences().message(w, sent, g, torch.tensor(1.0))  # (4 - 1) - 1
    {'w': tensor([2.])}
    """

    def init(self, params: Params) -> Params:
        return zeros(params)

    def message(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda w, start, g: w - start - g, w, sent.params, memory)

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda g, q: g + q, memory, decoded)


@dataclass(frozen=True)
class MeanOfAll(ServerRule):
    """g = g + 1/N sum_k q_k;  w = w_t + lr g"""

    lr: float = 1.0

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return {}, prefixed(MEAN, zeros(take(params, trained)))

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        return added(state, SUM, take(upload.decoded, part(MEAN, state))), memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        g = tmap(lambda g, q: g + q / rnd.population, part(MEAN, state), part(SUM, state))
        w = {name: rnd.model[name] + self.lr * x for name, x in g.items()}
        return out._replace(params=out.params | w), prefixed(MEAN, g)


def ef21(lr: float = 1.0) -> Algorithm:
    """Clients send differences between updates; the server steps along the mean of all clients' last updates."""
    return Algorithm(Differences(), chain(Average(), MeanOfAll(lr)))
