"""FedWSQ: Federated Learning with Weight Standardization and Distribution-Aware Non-Uniform Quantization, 2025.

    client:  sends m_k = (w_k - w_t) / sigma for each weight, and its own sigma_k = rms(w_k - w_t), exactly
    server:  w = w_t + sigma sum_k p_k m_k
             sigma = beta sigma + (1 - beta) mean_k sigma_k

sigma is one number for each tensor with two or more axes, sent with the model; other tensors are sent as updates.
Standardised messages suit levels that both ends know, `FixedCode`, for which no scale is sent. With exact uploads it is
FedAvg. The weight standardisation of the paper is a property of the model and not of this rule.

The first sigma is 1 % of the rms of the weights, which is small for the update of a round: with fixed levels, a sigma
that is too large moves all weights too far, and one that is too small only slows down the first round. After that
round, sigma is the mean of the clients'.

Example: sigma = 2, w_t = 1, one client with w_k - w_t = (3, 4), beta = 0.9. It sends m_k = (1.5, 2) and
sigma_k = sqrt((9 + 16) / 2) = 3.54; w = (4, 5), and sigma = 1.8 + 0.354 = 2.154.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import added, part, prefixed, tmap
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round

SIGMA, SUM = "sigma/", "sum/"  # in the control; sums of sigma_k during a round, in the state
STARTED = "started"  # 1 after the first round
FIRST = 0.01  # sigma of the first round, in multiples of the rms of the weights
LEAST = 1e-12  # smallest sigma, of weights that do not change; in half precision, the smallest normal number


@dataclass(frozen=True)
class Standardised(ClientRule):
    """(w_k - w_t) / sigma, and sigma_k as a second upload.

    >>> sent = Broadcast({"w": torch.ones(1, 2)}, {"sigma/w": torch.tensor(2.0)})
    >>> w, travel = {"w": torch.tensor([[4.0, 5.0]])}, torch.tensor(1.0)
    >>> Standardised().message(w, sent, {}, travel), Standardised().second(w, sent, {}, travel)
    ({'w': tensor([[1.5000, 2.0000]])}, {'w': tensor(3.5355)})
    """

    def message(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        sigma = part(SIGMA, sent.control)
        update = tmap(lambda w, start: w - start, w, sent.params)
        return {name: d / sigma[name] if name in sigma else d for name, d in update.items()}

    def second(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        sigma = part(SIGMA, sent.control)
        return {name: _rms(w[name] - sent.params[name], sent.params[name].ndim).to(x) for name, x in sigma.items()}


@dataclass(frozen=True)
class Scales(ServerRule):
    """w = w_t + sigma sum_k p_k m_k;  sigma = beta sigma + (1 - beta) mean_k sigma_k"""

    beta: float = 0.9

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        weights = {name: params[name] for name in trained if params[name].ndim > 1 and params[name].numel()}
        rms = {name: _rms(w, w.ndim) for name, w in weights.items()}
        usual = max(map(float, rms.values()), default=0.0) or 1.0  # for weights that begin at zero
        sigma = {name: _positive(FIRST * torch.where(x > 0, x, usual), weights[name]) for name, x in rms.items()}
        device = next(iter(params.values())).device if params else None
        return prefixed(SIGMA, sigma), {STARTED: torch.zeros((), device=device)}

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        return added(state, SUM, upload.second), memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        sigma = part(SIGMA, rnd.start.control)
        w = {name: rnd.model[name] + (sigma[name] * m if name in sigma else m) for name, m in rnd.message.items()}
        beta = self.beta * state[STARTED]
        mean = tmap(lambda total: total / rnd.arrived, part(SUM, state))
        after = tmap(lambda mean, old: _positive(beta * old + (1 - beta) * mean, old), mean, sigma)
        started = torch.ones_like(state[STARTED])
        return Broadcast(out.params | w, out.control | prefixed(SIGMA, after)), {STARTED: started}


def fedwsq(beta: float = 0.9) -> Algorithm:
    """Clients send standardised updates, for levels that need no scale.

    The example above:

    >>> sent = Broadcast({"w": torch.ones(1, 2)}, {"sigma/w": torch.tensor(2.0)})
    >>> m, travel = {"w": torch.tensor([[1.5, 2.0]])}, torch.tensor(1.0)
    >>> upload = DecodedUpload(0, m, {"w": torch.tensor(12.5).sqrt()}, travel, 1, False, 0.0)
    >>> rnd = Round(2, 1, 1, sent, sent.params, 0.0, model=sent.params, message=m)
    >>> rule = fedwsq().server.rules[1]
    >>> state, _ = rule.take(upload, sent, {"started": torch.tensor(1.0)}, {})
    >>> out, state = rule.apply(sent, state, rnd)
    >>> out.params, out.control
    ({'w': tensor([[4., 5.]])}, {'sigma/w': tensor(2.1536)})
    """
    if not 0 <= beta < 1:
        raise ValueError(f"fedwsq(beta={beta}): beta must be 0 or more and less than 1")
    return Algorithm(Standardised(), chain(Average(), Scales(beta)))


def _rms(x: Tensor, axes: int) -> Tensor:
    """Root mean square over the last axes, in float64."""
    return x.flatten(-axes).double().square().mean(-1).sqrt()


def _positive(sigma: Tensor, like: Tensor) -> Tensor:
    return sigma.to(like.dtype).clamp(min=max(LEAST, torch.finfo(like.dtype).tiny))
