"""DAdaQuant: Hönig et al., DAdaQuant: Doubly-adaptive quantization for communication-efficient FL, 2022.

    time:     G_t = sum_k p_k F_k(w_t),   A_t = psi A_{t-1} + (1 - psi) G_t
              q doubles, up to q_max, if A_t >= A_{t+1-phi} and q has not changed for phi rounds
    clients:  q_k = max(1, round(sqrt(a / b) p_k^(2/3))),   a = sum_k p_k^(2/3),   b = sum_k p_k^2 / q^2

The second half has the variance of equal levels, sum_k p_k^2 / q_k^2 = b, with the smallest sum of levels; rounding
breaks the identity, most for clients with few examples. It has no effect if all p_k are equal.

F_k(w_t) is the loss of the received model on the client's examples, and is reported with the upload. The server knows
it when it chooses q of round t + 1, as in the code of the authors, so there is no further round trip. The authors'
code compares averages with >, the paper with >=; this is the paper's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedshift.codecs.qsgd import MOST
from fedshift.core.types import Params
from fedshift.policies.levels import check_levels, uplink
from fedshift.rounds.policy import Policy, PolicyStats
from fedshift.rounds.uplink import Uplink


@dataclass(frozen=True)
class DAdaQuant(Policy):
    """QSGD whose levels double when the loss stops falling, with fewer levels for clients of small weight.

    phi: rounds without progress after which q doubles; 0 for a tenth of all rounds, at least 2.
    time, clients: which of the halves is used; without `time`, q is q_max.
    norm, bucket: of QSGD; one norm of the whole update without buckets (0).
    """

    q_min: int = 1
    q_max: int = 8
    psi: float = 0.9
    phi: int = 0
    time: bool = True
    clients: bool = True
    norm: Literal["l2", "max"] = "l2"
    bucket: int = 0

    def __post_init__(self) -> None:
        check_levels("DAdaQuant", self.bucket, q_min=self.q_min, q_max=self.q_max)
        if self.q_min > self.q_max:
            raise ValueError(f"DAdaQuant(q_min={self.q_min}, q_max={self.q_max}): q_min must not be above q_max")
        if not 0 <= self.psi < 1:
            raise ValueError(f"DAdaQuant(psi={self.psi}): psi must be 0 or more and less than 1")
        if self.phi < 0:
            raise ValueError(f"DAdaQuant(phi={self.phi}): phi must be a number of rounds, or 0 for a tenth of all")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"loss"} if self.time else ())

    def init(self, clients: int, rounds: int) -> Params:
        """q, the last phi averages of the loss, and the numbers of losses so far and until q last changed."""
        if not self.time:
            return {}
        phi = min(self.phi, rounds) or max(2, rounds // 10)  # q never doubles if phi is that of all rounds or more
        whole = {name: torch.tensor(x) for name, x in (("q", self.q_min), ("losses", 0), ("changed", 0))}
        return whole | {"averages": torch.zeros(phi, dtype=torch.float64)}

    def choose(
        self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats
    ) -> tuple[Sequence[Uplink], Params]:
        if self.time and (loss := stats.mean_loss(number - 1)) is not None:
            state = advanced(state, loss, self.psi, self.q_max)
        q = int(state["q"]) if self.time else self.q_max
        p = stats.weights[torch.tensor(cohort)].tolist()
        each = levels(q, p) if self.clients else [q] * len(cohort)
        return [uplink(s, self.norm, self.bucket) for s in each], state


def advanced(state: Params, loss: float, psi: float, q_max: int) -> Params:
    """The state after one more loss: q doubles if the moving average has not fallen for phi rounds."""
    q, losses, changed = (int(state[name]) for name in ("q", "losses", "changed"))
    averages = state["averages"]  # the newest is the last
    average = psi * float(averages[-1]) + (1 - psi) * loss if losses else loss
    averages = torch.cat([averages[1:], torch.tensor([average], dtype=torch.float64)])
    losses += 1
    if losses >= changed + len(averages) and float(averages[-1]) >= float(averages[0]):
        q, changed = min(2 * q, q_max), losses
    whole = {name: torch.tensor(x) for name, x in (("q", q), ("losses", losses), ("changed", changed))}
    return whole | {"averages": averages}


def exact_levels(q: int, weights: Sequence[float]) -> list[float]:
    """sqrt(a / b) p_k^(2/3), before it is rounded.

    >>> [round(x, 6) for x in exact_levels(4, [1.0, 1.0, 1.0])]
    [4.0, 4.0, 4.0]
    """
    p = [weight / sum(weights) for weight in weights]
    a, b = sum(x ** (2 / 3) for x in p), sum((x / q) ** 2 for x in p)
    return [math.sqrt(a / b) * x ** (2 / 3) for x in p]


def levels(q: int, weights: Sequence[float]) -> list[int]:
    """q_k = max(1, round(sqrt(a / b) p_k^(2/3))), at most 127.

    >>> levels(4, [1.0, 8.0, 27.0])  # sqrt(a / b) p^(2/3) = 0.51 * (1, 4, 9)
    [1, 2, 5]
    """
    return [min(MOST, max(1, round(x))) for x in exact_levels(q, weights)]
