"""FedVARP: Jhunjhunwala et al., FedVARP: Tackling the Variance Due to Partial Client Participation, 2022.

    server:  d_k = w_k - w_t
             v = mean_k (d_k - y_k) + mean of all y_j
             w = w_t + lr v
             y_k = d_k for the clients of the round

The server remembers y_k, the last update of each client, as it was decoded. With full participation it is FedAvg.
Uploads are weighted equally.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.tree import added, part, prefixed, take, tmap, zeros
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round

MEAN, SUM = "mean/", "sum/"  # mean of all y_j; sum of d_k - y_k during a round


@dataclass(frozen=True)
class LastUpdates(ServerRule):
    """v = mean_k (d_k - y_k) + mean_j y_j

    One of two clients, d_k = 3, y_k = 1, mean of all y_j = 2: v = 3 - 1 + 2 = 4, and the mean becomes 2 + 2 / 2 = 3.

    >>> import torch
    >>> rule, sent = LastUpdates(), Broadcast({"w": torch.zeros(1)}, {})
    >>> upload = DecodedUpload(0, {"w": torch.tensor([3.0])}, {}, torch.tensor(1.0), 1, False, 0.0)
    >>> state, y = rule.take(upload, sent, {"mean/w": torch.tensor([2.0])}, {"w": torch.ones(1)})
    >>> out, state = rule.apply(sent, state, Round(1, 1, 2, sent, {}, 0.0, model=sent.params))
    >>> out.params, state, y
    ({'w': tensor([4.])}, {'mean/w': tensor([3.])}, {'w': tensor([3.])})
    """

    needs: ClassVar[frozenset[str]] = frozenset({"memory"})
    lr: float = 1.0

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return {}, prefixed(MEAN, zeros(take(params, trained)))

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        d = {name: upload.decoded[name] - sent.params[name] for name in part(MEAN, state)}
        return added(state, SUM, tmap(lambda d, y: d - y, d, memory) if memory else d), d

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        change, mean = part(SUM, state), part(MEAN, state)
        v = tmap(lambda s, y: s / rnd.arrived + y, change, mean)
        w = {name: rnd.model[name] + self.lr * x for name, x in v.items()}
        return out._replace(params=out.params | w), prefixed(
            MEAN, tmap(lambda s, y: y + s / rnd.population, change, mean)
        )


def fedvarp(lr: float = 1.0) -> Algorithm:
    """The server uses the last updates of clients that are absent."""
    return Algorithm(Plain(), chain(Average(), LastUpdates(lr)))
