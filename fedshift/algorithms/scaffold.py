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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import over, take, tmap, zeros
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round


@dataclass(frozen=True)
class Controlled(ClientRule):
    """SGD along grad - c_i + c.

    The client computes the change of c_i from its decoded upload, so the server can compute it too: nothing is sent for
    it, and c = mean(c_i) holds also for quantized uploads.
    """

    def init(self, params: Params) -> Params:
        return zeros(params)

    def recover(self, params: Params, sent: Broadcast) -> Params:
        """c, with which the correction is zero"""
        return take(sent.control, params)

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return tmap(lambda g, c_i, c: g - c_i + c, grad, memory, sent.control)

    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        return 0.0, tmap(lambda c_i, c: c - c_i, memory, sent.control)

    def change(self, w: Params, sent: Broadcast, travel: Tensor) -> Params:
        """c_i+ - c_i = (w_t - w_k) / travel - c"""
        c = {name: x for name, x in sent.control.items() if name in w}
        return tmap(lambda c, start, w: (start - w) / over(travel, w).to(w.dtype) - c, c, sent.params, w)

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda c_i, d: c_i + d, memory, self.change(decoded, sent, travel))


@dataclass(frozen=True)
class ControlledExactly(Controlled):
    """As in the original: the change is computed from the weights before coding, and sent in a second upload."""

    def second(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return self.change(w, sent, travel)

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda c_i, d: c_i + d, memory, self.change(w, sent, travel))


@dataclass(frozen=True)
class Control(ServerRule):
    """c = c + K/N * mean_k (c_i+ - c_i), so that c stays the mean of all c_i"""

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return zeros(take(params, trained)), {}

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        change = upload.second or Controlled().change(upload.decoded, sent, upload.travel)
        return tmap(torch.add, state, change) if state else change, memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        part = rnd.arrived / rnd.population
        control = tmap(lambda d, c: c.add(d / rnd.arrived, alpha=part), state, out.control)
        return out._replace(control=out.control | control), {}


def scaffold(control: Literal["derived", "sent"] = "derived") -> Algorithm:
    """Clients follow grad - c_i + c, and c stays the mean of all c_i.

    With 'sent', the change of c_i is sent exactly in a second upload; with 'derived', the server derives it from the
    upload. The example above, with c_i+ = 3:

    >>> sent = Broadcast({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.5)})
    >>> w_k, c_i = {"w": torch.tensor(0.7)}, {"w": torch.tensor(2.0)}
    >>> scaffold().client.remember(w_k, w_k, sent, c_i, torch.tensor(0.2))
    {'w': tensor(3.)}
    """
    if control not in ("derived", "sent"):
        raise ValueError(f"scaffold(control={control!r}): control must be 'derived' or 'sent'")
    return Algorithm(Controlled() if control == "derived" else ControlledExactly(), chain(Average(), Control()))
