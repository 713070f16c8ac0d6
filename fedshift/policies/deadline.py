"""Deadline: rates that links afford in time, by reverse water-filling (Cover and Thomas, 2006).

    minimise sum_k p_k^2 c_k 2^(-2 R_k)   with   R_k d / 8 + overhead <= deadline bandwidth_k
                                          and    sum_k (R_k d / 8 + overhead) <= budget

R_k are bits per value, d is the number of values, and c_k 2^(-2R) is the distortion of the update of client k: c_k is
the squared norm of its last update, or the mean of the known ones (1 without any). Rates are between `least` and
`most`. Without a budget, each client has the largest rate that its link affords. With one, reverse water-filling
(Cover and Thomas, Elements of Information Theory, section 10.3.3) solves it: R_k = log2(p_k^2 c_k) / 2 + level within
the limits of client k, with the level at which the budget is spent.

The overhead of an upload is its header and side data, and the largest number of bytes by which an upload of the last
round exceeded its plan, because a coder needs a little more than the entropy of the codes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedshift.codecs.named import make_codec
from fedshift.core.types import Params
from fedshift.rounds.policy import Policy, PolicyStats
from fedshift.rounds.uplink import Uplink

LEAST, MOST = 0.001, 7.0  # rates of a Step quantizer
STEPS = 1000  # rates are rounded down to thousandths of a bit


@dataclass(frozen=True)
class Deadline(Policy):
    """Rates that fit the links within a deadline, and divide a budget with the smallest error of the mean.

    Clients send updates with feedback, in the step quantizer.

    deadline: seconds of an upload, None for no limit; budget: bytes of all uploads of a round, None for no limit.
    least, most: limits of the rates, in bits per value.
    """

    deadline: float | None = None
    budget: float | None = None
    least: float = 0.1
    most: float = 4.0

    def __post_init__(self) -> None:
        if self.deadline is None and self.budget is None:
            raise ValueError("Deadline(): needs a deadline in seconds, a budget in bytes per round, or both")
        for name, limit in (("deadline", self.deadline), ("budget", self.budget)):
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"Deadline({name}={limit}): {name} must be a positive number")
        if not LEAST <= self.least <= self.most <= MOST:
            raise ValueError(
                f"Deadline(least={self.least}, most={self.most}): rates must be between {LEAST} and {MOST:g} bits per "
                "value, and least must not be above most"
            )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"bandwidth"} if self.deadline is not None else ())

    def init(self, clients: int, rounds: int) -> Params:
        """Numbers of late uploads and of rounds beyond the budget; planned bytes of each client, and the excess."""
        planned = torch.zeros(clients, dtype=torch.float64)
        excess = torch.zeros((), dtype=torch.float64)
        return {"late": torch.tensor(0), "beyond": torch.tensor(0), "planned": planned, "excess": excess}

    def choose(
        self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats
    ) -> tuple[Sequence[Uplink], Params]:
        here, d, fixed = torch.tensor(cohort), stats.values, stats.overhead(uplink(self.least))
        planned, excess = state["planned"].clone(), state["excess"]
        arrived = (stats.last == number - 1) & (planned > 0)
        if arrived.any():
            excess = (stats.bytes - planned)[arrived].max().clamp(min=0)
        overhead = fixed + float(excess)
        seconds = self.deadline or math.inf
        speeds = [math.inf] * len(cohort) if stats.bandwidth is None else stats.bandwidth[here].tolist()
        affordable = [8 * (seconds * speed - overhead) / d for speed in speeds]
        high = [min(self.most, max(self.least, rate)) for rate in affordable]
        total = math.inf if self.budget is None else 8 * (self.budget - len(cohort) * overhead) / d
        energy = [p * p * c for p, c in zip(stats.weights[here].tolist(), energies(stats, cohort), strict=True)]
        rates = plan(energy, [self.least] * len(cohort), high, total)
        late, beyond = sum(rate < self.least for rate in affordable), total < self.least * len(cohort)
        rates = [max(self.least, math.floor(rate * STEPS) / STEPS) for rate in rates]
        planned[here] = fixed + torch.tensor(rates, dtype=torch.float64) * d / 8
        counts = {"late": state["late"] + late, "beyond": state["beyond"] + int(beyond)}
        return [uplink(rate) for rate in rates], counts | {"planned": planned, "excess": excess}

    def warnings(self, state: Params) -> Sequence[str]:
        """Limits that could not be met."""
        lowest = f"even with least = {self.least:g} bits per value"
        late = f"some uploads take longer than the deadline of {self.deadline} s {lowest}: their links are too slow"
        beyond = f"the uploads of a round exceed the budget of {self.budget} bytes {lowest}"
        return [why for name, why in (("late", late), ("beyond", beyond)) if state[name] > 0]


def energies(stats: PolicyStats, cohort: Sequence[int]) -> list[float]:
    """c_k: the squared norm of the last update of each client; the mean of all known ones for a client without one."""
    known = stats.last > 0
    usual = float(stats.norm[known].square().mean()) if known.any() else 1.0
    return [float(stats.norm[k]) ** 2 if known[k] else usual for k in cohort]


def plan(energy: Sequence[float], low: Sequence[float], high: Sequence[float], total: float) -> list[float]:
    """Rates R_k from low_k to high_k that minimise sum_k energy_k 2^(-2 R_k) with sum_k R_k <= total.

    A total below the sum of `low` cannot be met, and all rates are `low`.

    >>> plan([16.0, 1.0], [0.0, 0.0], [9.0, 9.0], 4.0)  # equal distortions: 16 / 2^6 = 1 / 2^2
    [3.0, 1.0]
    >>> plan([16.0, 1.0], [0.0, 0.0], [2.5, 9.0], 4.0)
    [2.5, 1.5]
    """
    if sum(high) <= total:
        return list(high)
    if sum(low) >= total:
        return list(low)
    # a client without energy has the offset of the smallest float, and gets bits last
    offsets = [math.log2(max(x, math.ulp(0.0))) / 2 for x in energy]

    def rates(level: float) -> list[float]:
        limits = zip(offsets, low, high, strict=True)
        return [min(most, max(least, offset + level)) for offset, least, most in limits]

    # sum(rates(level)) is piecewise linear between the levels at which a client reaches a limit
    corners = sorted(end - offset for offset, *ends in zip(offsets, low, high, strict=True) for end in ends)
    below = max(corner for corner in corners if sum(rates(corner)) <= total)
    above = min(corner for corner in corners if sum(rates(corner)) > total)
    start, end = sum(rates(below)), sum(rates(above))
    return rates(below + (above - below) * (total - start) / (end - start))


def uplink(rate: float) -> Uplink:
    """Updates at a rate, biases included, with feedback."""
    return Uplink(make_codec("step", 8, rate=rate, coder="range", biases=True), update=True, feedback=True)
