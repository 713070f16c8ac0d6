"""SCAFFOLD: Karimireddy et al., Stochastic Controlled Averaging for Federated Learning, 2020 (option II).

    client:  each step follows grad - c_i + c
             c_i+ = c_i - c + (w_t - w_k) / travel
    server:  w = sum_k p_k w_k
             c = c + K/N * mean_k (c_i+ - c_i)

`travel` is the distance that a unit gradient would have moved the client: steps * lr in the paper,
without momentum; with momentum m, sum_j lr (1 - m^j) / (1 - m). Dividing by less makes controls
several times too large, and training collapses.

Example: one client of two (N = 2, K = 1), w_t = 1, c = 0.5, c_i = 2, gradient 3 throughout,
two steps of lr 0.1 without momentum. Each step follows 3 - 2 + 0.5 = 1.5, so w_k = 0.7;
travel = 0.2; c_i+ = 2 - 0.5 + 0.3 / 0.2 = 3 (the gradient, as it should be); c = 0.5 + (3 - 2) / 2 = 1.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedshift.algorithms.base import Algorithm, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import over, tmap, zeros
from fedshift.core.types import Broadcast, Params, Round


@dataclass(frozen=True)
class Controlled:
    """SGD along grad - c_i + c.

    With 'derived', the client computes the change of c_i from its decoded upload, so the server can
    compute it too: nothing is sent for it, and c = mean(c_i) still holds. With 'sent', as in the
    original, the change is computed from the weights before coding and sent exactly in a second upload.
    """

    extra: Literal["derived", "sent"] = "derived"

    def __post_init__(self) -> None:
        if self.extra not in ("derived", "sent"):
            raise ValueError(f"Controlled(extra={self.extra!r}): extra must be 'derived' or 'sent'")

    def init(self, params: Params) -> Params:
        return zeros(params)

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return tmap(lambda g, c_i, c: g - c_i + c, grad, memory, sent.control)

    def finish(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> tuple[Params, Params]:
        change = tmap(lambda c, start, w: (start - w) / over(travel, w) - c, sent.control, sent.params, w)
        return tmap(lambda c_i, d: c_i + d, memory, change), change


@dataclass(frozen=True)
class Control:
    """c = c + K/N * mean_k (c_i+ - c_i), so that c stays the mean of all c_i"""

    def init(self, params: Params) -> Params:
        return {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        part = rnd.arrived / rnd.population
        return out._replace(control=tmap(lambda c, d: c.add(d, alpha=part), out.control, rnd.extra)), state


def scaffold(control: Literal["derived", "sent"] = "derived") -> Algorithm:
    """Clients follow grad - c_i + c, and c stays the mean of all c_i.

    The example above, with c_i+ = 3 and a change of 1:

    >>> import torch
    >>> sent = Broadcast({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.5)})
    >>> scaffold().client.finish({"w": torch.tensor(0.7)}, sent, {"w": torch.tensor(2.0)}, torch.tensor(0.2))
    ({'w': tensor(3.)}, {'w': tensor(1.)})
    """
    return Algorithm(Controlled(control), chain(Average(), Control()))
