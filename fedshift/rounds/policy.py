"""Contract of an uplink policy: the server chooses the uplink of each client at the start of every round.

    uplinks, state = policy.choose(state, number, cohort, stats)

State is a dictionary of tensors, which is part of the checkpoint. What clients reported with their last used uploads
is kept beside it, one number per client of the population.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedshift.codecs.base import finite
from fedshift.codecs.codec import Codec
from fedshift.core.tree import part, prefixed, tmap
from fedshift.core.types import Params
from fedshift.rounds.uplink import Uplink
from fedshift.wire.registry import codec_bytes

NEEDS = {"loss", "bandwidth"}
STATE, REPORTS = "state/", "reports/"  # prefixes in the part of a run's state that belongs to its policy
LOSS_BYTES = 4  # a reported loss is sent as float32


class Report(NamedTuple):
    """Numbers that the server knows from one used upload."""

    loss: float  # F_k(w_t) of the model that the client received; 0 if the policy does not need it
    norm: float  # |w_k - w_t| as the server decodes it, over trained tensors
    error: float  # |u - Q(u)| / |u|
    bytes: float  # of the upload


class PolicyStats(NamedTuple):
    """Knowledge of the server at the start of a round; tensors (N,) have one entry per client of the population.

    Two of three clients uploaded in round 2, with weights 1 and 3:

    >>> last, nothing = torch.tensor([1, 2, 2]), torch.zeros(3)
    >>> p, loss = torch.tensor([1.0, 1.0, 3.0]), torch.tensor([9.0, 2.0, 6.0])
    >>> stats = PolicyStats(100, 650, p, last, None, [], lambda uplink: 0, last, loss, nothing, nothing, nothing)
    >>> stats.mean_loss(2), stats.mean_loss(3)
    (5.0, None)
    """

    rounds: int  # of the whole run
    values: int  # number of trained values of the model
    weights: Tensor  # (N,) float64: p_k before it is normalised
    examples: Tensor  # (N,) int64
    bandwidth: Tensor | None  # (N,) float64: bytes per second, infinite if unknown; None without bandwidths
    uplinks: Sequence[Uplink]  # of the cohort, according to the settings
    overhead: Callable[[Uplink], int]  # bytes of an upload that do not depend on its values
    last: Tensor  # (N,) int64: round of the last used upload, 0 for none; the following are from that round
    loss: Tensor  # (N,) float64: F_k(w_t), if the policy needs "loss"
    norm: Tensor  # (N,) float64: norm of the update
    error: Tensor  # (N,) float64: relative error of the codec
    bytes: Tensor  # (N,) float64: bytes of the upload

    def mean_loss(self, number: int) -> float | None:
        """sum_k p_k F_k over the clients whose uploads of round `number` were used; None if there are none."""
        here = self.last == number
        if number < 1 or not here.any():  # 0 means that a client has not uploaded yet
            return None
        return float((self.weights[here] * self.loss[here]).sum() / self.weights[here].sum())


class Policy(ABC):
    """Chooses the uplinks of the clients of a round. Policies are printed in records: write them as frozen dataclasses.

    `needs` may contain "loss" (every client computes the loss of the received model on its examples and sends it with
    its upload, as 4 bytes) and "bandwidth" (the settings must have bandwidths).

    One bit more every ten rounds:

    >>> from dataclasses import dataclass
    >>> from fedshift import Codec, KMeans
    >>> @dataclass(frozen=True)
    ... class Growing(Policy):
    ...     every: int = 10
    ...
    ...     def choose(self, state, number, cohort, stats):
    ...         bits = min(8, 1 + number // self.every)
    ...         return [Uplink(Codec(KMeans(bits)), update=True) for _ in cohort], state
    >>> Growing().choose({}, 25, [4, 7], None)[0][1].codec.bits
    3
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, clients: int, rounds: int) -> Params:
        """State before the first round; its names, shapes and dtypes must not change."""
        return {}

    @abstractmethod
    def choose(
        self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats
    ) -> tuple[Sequence[Uplink], Params]:
        """Uplink of each client of the cohort in round `number`, and the new state."""

    def warnings(self, state: Params) -> Sequence[str]:
        """Sentences for the user after a round; a run prints each once."""
        return ()


def warnings(policy: Policy | None, before: Params) -> Sequence[str]:
    """Warnings of a run's policy, if it has one, from its part of the run's state."""
    return policy.warnings(part(STATE, before)) if policy else ()


def begin(policy: Policy, clients: int, rounds: int) -> Params:
    """State of a run's policy before the first round: that of the policy, and no reports."""
    if unknown := sorted(policy.needs - NEEDS):
        raise ValueError(f"{policy}: needs {unknown[0]!r}; policies can need {', '.join(sorted(NEEDS))}")
    reports = {name: torch.zeros(clients, dtype=torch.float64) for name in Report._fields}
    last = {"last": torch.zeros(clients, dtype=torch.int64)}
    state = policy.init(clients, rounds)
    if why := state_problem(state):
        raise ValueError(f"{policy}: init returned {why}")
    return prefixed(STATE, state) | prefixed(REPORTS, reports | last)


def choose(
    policy: Policy, before: Params, number: int, cohort: Sequence[int], stats: PolicyStats
) -> tuple[list[Uplink], Params]:
    """Call a policy and check its answer: the uplinks of the cohort, and the part of the run's state after it."""
    state = part(STATE, before)
    answer = policy.choose(dict(state), number, cohort, stats)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(f"choose returned {type(answer).__name__} instead of uplinks and state")
    uplinks, after = list(answer[0]), answer[1]
    if len(uplinks) != len(cohort):
        raise ValueError(f"choose returned {len(uplinks)} uplinks for {len(cohort)} clients")
    if wrong := [uplink for uplink in uplinks if not isinstance(uplink, Uplink)]:
        raise TypeError(f"choose returned {wrong[0]!r}, which must be an Uplink(codec, update, feedback)")
    for uplink in dict.fromkeys(uplinks):
        codec_bytes(uplink.codec)  # an error now, if it cannot be sent
    if why := state_problem(after):
        raise TypeError(f"choose returned {why}")
    kinds, needed = ({name: (tuple(x.shape), x.dtype) for name, x in tree.items()} for tree in (after, state))
    if kinds != needed:
        raise ValueError(f"choose returned the state {kinds}, but init returned {needed}")
    if broken := [name for name, x in after.items() if x.is_floating_point() and not finite(x)]:
        raise ValueError(f"choose returned a state whose {broken[0]} is NaN or infinite")
    return uplinks, before | prefixed(STATE, tmap(torch.clone, after))  # tensors that share memory cannot be stored


def state_problem(state: object) -> str:
    """Reason why an object cannot be the state of a policy, '' if it can."""
    if not isinstance(state, Mapping):
        return f"a state of type {type(state).__name__} instead of a dictionary of tensors"
    return next((f"a state whose {name} is not a tensor" for name, x in state.items() if not isinstance(x, Tensor)), "")


def reported(before: Params, number: int, reports: Mapping[int, Report]) -> Params:
    """The policy's part of a run's state with the reports of a round."""
    if not reports:
        return before
    clients = torch.tensor(list(reports))
    after = {name: x.clone() if name.startswith(REPORTS) else x for name, x in before.items()}
    after[f"{REPORTS}last"][clients] = number
    for place, name in enumerate(Report._fields):
        column = [report[place] for report in reports.values()]
        after[REPORTS + name][clients] = torch.tensor(column, dtype=torch.float64)
    return after


def sent_loss(loss: float) -> float:
    """A loss as the server receives it, in float32."""
    return float(torch.tensor(loss, dtype=torch.float32))


def loss_problem(loss: float | None) -> str:
    """Reason why a reported loss cannot be used, '' if it can."""
    return "its loss is missing, NaN or infinite" if loss is None or not math.isfinite(loss) else ""


def label(codec: Codec) -> str:
    """Short name of a codec: its quantizer, with the settings that are not defaults.

    >>> from fedshift import KMeans, Step
    >>> from fedshift.codecs.exact import EXACT
    >>> [label(codec) for codec in (Codec(KMeans(4)), Codec(Step(rate=0.5)), EXACT)]
    ['KMeans(bits=4)', 'Step(rate=0.5)', 'exact']
    """
    quantizer = codec.quantizer
    if quantizer.plain and not quantizer.lossy:
        return "exact"
    if not is_dataclass(quantizer):
        return str(quantizer)
    given = [(field.name, getattr(quantizer, field.name), field.default) for field in fields(quantizer)]
    settings = ", ".join(f"{name}={value}" for name, value, default in given if value != default)
    return f"{type(quantizer).__name__}({settings})"
