"""CMFL: Wang, Wang, Li, CMFL: Mitigating Communication Overhead for Federated Learning, 2019.

    client:  uploads only if the share of weights with sign(w_k - w_t) = sign(d) is at least `threshold`
    server:  d = w_{t+1} - w_t, sent with the model

Clients whose data differ from the others' upload less often, which biases the mean. In the first round all upload.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.core.tree import part, prefixed, take, zeros
from fedshift.core.types import Broadcast, Params, Round

LAST = "last/"  # prefix of the last global update in the control


@dataclass(frozen=True)
class Relevant(ClientRule):
    """Upload only updates whose signs agree with the last global update.

    >>> sent = Broadcast({"w": torch.zeros(4)}, {"last/w": torch.tensor([1.0, 1.0, 1.0, -1.0])})
    >>> stacked = {"w": torch.tensor([[1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, 1.0, 1.0]])}  # three signs of four, and one
    >>> Relevant(0.5).sends(stacked, sent, {})
    tensor([ True, False])
    """

    threshold: float

    def sends(self, w: Params, sent: Broadcast, memory: Params) -> Tensor:
        last = part(LAST, sent.control)
        same = torch.stack(
            [_count((w[name] - sent.params[name]).sign() == x.sign(), x) for name, x in last.items()]
        ).sum(0)
        count = sum(x.numel() for x in last.values())
        first = torch.stack([(x == 0).all() for x in last.values()]).all()
        diverged = torch.stack([_count(~w[name].isfinite(), x) for name, x in last.items()]).sum(0) > 0
        return (same >= self.threshold * count) | first | diverged  # a diverged client fails when it is coded


def _count(found: Tensor, like: Tensor) -> Tensor:
    """Number of true entries, of one client or of each of K."""
    return found.flatten(found.ndim - like.ndim).sum(-1) if like.ndim else found.long()


@dataclass(frozen=True)
class SendUpdate(ServerRule):
    """Send the last global update with the model."""

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return prefixed(LAST, zeros(take(params, trained))), {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        last = {name: out.params[name] - rnd.model[name] for name in part(LAST, out.control)}
        return out._replace(control=out.control | prefixed(LAST, last)), state


def cmfl(threshold: float = 0.6) -> Algorithm:
    """Clients upload only updates that agree with the last global update."""
    if not 0 <= threshold <= 1:
        raise ValueError(f"cmfl(threshold={threshold}): threshold must be between 0 and 1")
    return Algorithm(Relevant(threshold), chain(Average(), SendUpdate()))
