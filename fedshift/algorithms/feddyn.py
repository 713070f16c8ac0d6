"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, 2021.

    client:  each step follows grad - h_k + alpha (w - w_t)
             h_k = h_k - alpha (w_k - w_t)
    server:  h = h - alpha / N sum_k (w_k - w_t)         so that h is the mean of all h_k
             w = mean_k w_k - h / alpha

Clients use their decoded upload in h_k, so h = mean(h_k) holds also for quantized uploads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import added, part, take, tmap, zeros
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round

SUM = "sum/"  # prefix of the sum of updates in the state, during a round


@dataclass(frozen=True)
class Regularized(ClientRule):
    """SGD along grad - h_k + alpha (w - w_t)."""

    alpha: float

    def init(self, params: Params) -> Params:
        return zeros(params)

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return tmap(lambda g, h, w, start: g - h + self.alpha * (w - start), grad, memory, w, sent.params)

    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        return self.alpha, tmap(lambda h, start: -h - self.alpha * start, memory, sent.params)

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda h, w, start: h - self.alpha * (w - start), memory, decoded, sent.params)


@dataclass(frozen=True)
class Dynamic(ServerRule):
    """h = h - alpha / N sum_k (w_k - w_t);  w = mean_k w_k - h / alpha

    One of two clients moved from 0 to 1, alpha = 0.5: h = -0.25 and w = 1.5.

    >>> import torch
    >>> rule, sent, w = Dynamic(0.5), Broadcast({"w": torch.zeros(1)}, {}), {"w": torch.ones(1)}
    >>> upload = DecodedUpload(0, w, {}, torch.tensor(1.0), 1, False, 0.0)
    >>> state, _ = rule.take(upload, sent, rule.init(sent.params, ["w"])[1], {})
    >>> out, state = rule.apply(Broadcast(w, {}), state, Round(1, 1, 2, sent, w, 0.0, model=sent.params))
    >>> out.params, state
    ({'w': tensor([1.5000])}, {'w': tensor([-0.2500])})
    """

    alpha: float

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return {}, zeros(take(params, trained))

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        h = [name for name in state if not name.startswith(SUM)]
        return added(state, SUM, {name: upload.decoded[name] - sent.params[name] for name in h}), memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        part_of_all = self.alpha / rnd.population
        h = {name: state[name] - part_of_all * x for name, x in part(SUM, state).items()}
        w = {name: out.params[name] - x / self.alpha for name, x in h.items()}
        return out._replace(params=out.params | w), h


def feddyn(alpha: float = 0.01) -> Algorithm:
    """Clients follow grad - h_k + alpha (w - w_t); the server corrects the mean by h / alpha."""
    if not alpha > 0:
        raise ValueError(f"feddyn(alpha={alpha}): alpha must be positive")
    return Algorithm(Regularized(alpha), chain(Average(), Dynamic(alpha)))
