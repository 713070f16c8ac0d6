"""AdaQuantFL: Jhunjhunwala et al., Adaptive Quantization of Model Updates for Federated Learning, 2021.

    s_t = ceil(s_0 sqrt(F(w_0) / F(w_t)))

Coarse at first, finer as the training loss falls. F is the training loss of all clients, which would take a round trip
to each of them before every round. Here it is the weighted mean of the losses that the clients of the last round
reported with their uploads, at the model they received: one round late, as in the comparison of the DAdaQuant paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedshift.codecs.qsgd import MOST
from fedshift.core.types import Params
from fedshift.policies.levels import check_levels, uplink
from fedshift.rounds.policy import Policy, PolicyStats
from fedshift.rounds.uplink import Uplink


@dataclass(frozen=True)
class AdaQuantFL(Policy):
    """QSGD whose levels grow as the training loss falls.

    The first two rounds have s0 levels. norm, bucket: of QSGD; one norm of the whole update without buckets (0).
    """

    s0: int = 2
    norm: Literal["l2", "max"] = "l2"
    bucket: int = 0
    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def __post_init__(self) -> None:
        check_levels("AdaQuantFL", self.bucket, s0=self.s0)

    def init(self, clients: int, rounds: int) -> Params:
        """F(w_0) and the last F(w_t); 0 before the first is known."""
        return {"first": torch.zeros((), dtype=torch.float64), "loss": torch.zeros((), dtype=torch.float64)}

    def choose(
        self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats
    ) -> tuple[Sequence[Uplink], Params]:
        if (loss := stats.mean_loss(number - 1)) is not None:
            now = torch.tensor(loss, dtype=torch.float64)
            state = {"first": state["first"] if bool(state["first"]) else now, "loss": now}
        first, last = float(state["first"]), float(state["loss"])
        return [uplink(levels(self.s0, first, last), self.norm, self.bucket)] * len(cohort), state


def levels(s0: int, first: float, loss: float) -> int:
    """ceil(s_0 sqrt(F(w_0) / F(w_t))), at most 127.

    >>> levels(2, 1.0, 1.0), levels(2, 1.0, 0.25), levels(2, 1.0, 0.2), levels(2, 1.0, 0.0), levels(2, 0.0, 0.0)
    (2, 4, 5, 127, 2)
    """
    if first <= 0:
        return s0
    return min(MOST, math.ceil(s0 * math.sqrt(first / loss))) if loss > 0 else MOST
