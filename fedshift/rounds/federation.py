"""The nouns of a run: what does not change from round to round, what does, and what there is to tell."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms import Algorithm, Chain, Filters, ServerRule, Shift, filters, weights
from fedshift.algorithms.bounds import BOUND, CAP
from fedshift.core import tree
from fedshift.core.types import Broadcast, Params
from fedshift.data.cohorts import Cohorts, Rate
from fedshift.data.partition import Partition
from fedshift.rounds.engine import Histogram, Task
from fedshift.rounds.evaluate import Score
from fedshift.rounds.uplink import Uplink, quantized
from fedshift.wire.writer import known


class Group(NamedTuple):
    """Clients that upload alike."""

    name: str
    uplink: Uplink
    bandwidth: float | None = None  # bytes a second


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything about a run that does not change from round to round.

    The model is known here, so here it is decided which tensors are shifted: those that a `Shift` names, if they are
    trained, or else the model's weights. Its rule is given their names, and where their filters are.
    """

    task: Task
    algorithm: Algorithm
    partition: Partition
    cohorts: Cohorts
    groups: Sequence[Group]
    group: Tensor  # (N,) which group each client is in
    bandwidth: Tensor | None  # (N,) bytes a second, infinite where it is not known
    epochs: int
    batch: int
    rate: Rate
    seed: int
    weights: Literal["equal", "examples"] = "equal"
    patience: int = 5  # rounds without a usable upload before the run stops
    bound: float = BOUND  # largest update norm, as a multiple of the round's median; 0 for no limit
    cap: float = CAP  # largest weight, likewise
    layers: list[str] = field(init=False)  # weights and shifted tensors: the record has columns for them
    filters: dict[str, Filters] = field(init=False)  # of the model's weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "filters", filters(self.task.model))
        object.__setattr__(self, "algorithm", self.algorithm._replace(server=self._named(self.algorithm.server)))
        recorded = {*weights(self.task.model), *self.shifted}
        object.__setattr__(self, "layers", [name for name in self.task.trained if name in recorded])

    def _named(self, rule: ServerRule) -> ServerRule:
        """Every shift with the names of the tensors that it changes; other rules as they are."""
        if isinstance(rule, Chain):
            return Chain(tuple(map(self._named, rule.rules)))
        if not isinstance(rule, Shift):
            return rule
        trained = tree.take(self.task.params, self.task.trained)
        if rule.tensors is None and rule.per == "layer":
            return replace(rule, tensors=tuple(weights(self.task.model)))
        rule = replace(rule, filters={name: at for name, at in self.filters.items() if name in trained})
        return replace(rule, tensors=tuple(rule.chosen(trained)))

    @property
    def shifted(self) -> list[str]:
        """The tensors that are shifted; none without a shift."""
        rule = shift_of(self.algorithm)
        return list(rule.tensors or ()) if rule else []

    @cached_property
    def variable(self) -> bool:
        """True if the length of some group's uploads depends on what they hold."""
        choices = [quantized(group.uplink, self.task.trained) for group in self.groups]
        return any(known(choice, self.task.params)[1] for choice in choices)

    def start(self) -> "State":
        params = self.task.params
        trained = tree.take(params, self.task.trained)
        return State(0, Broadcast(params, self.algorithm.client.init(trained)), self.algorithm.server.init(params), 0)


class State(NamedTuple):
    """Everything that does change, but for the memory of clients."""

    number: int  # rounds done
    out: Broadcast
    server: Params
    skipped: int  # rounds in a row without a usable upload

    def at(self, device: torch.device) -> "State":
        """The same on a device."""
        params, control, server = (
            tree.tmap(lambda x: x.to(device), part) for part in (self.out.params, self.out.control, self.server)
        )
        return self._replace(out=Broadcast(params, control), server=server)


class Layer(NamedTuple):
    """One layer in one round."""

    mean_before: float  # the shift
    mean_after: float
    shorter: bool  # on which side of Theorem 2's fence: whether the shift makes the step the shorter one
    step: float  # |w^{t+1} - w^t|
    drift: float  # mean over clients of |w_k - w^t|
    drift_coded: float  # and of |Q(w_k) - w^t|
    filters_before: float  # root mean square of the means of filters, before the shift
    filters_after: float


class Outcome(NamedTuple):
    """What there is to tell about a round.

    >>> from fedshift import Experiment, run
    >>> outcome = next(run(Experiment(uplink={"bits": {32: 0.5, 4: 0.5}}, engine={"name": "sequential"})))
    >>> outcome.number, outcome.arrived, outcome.bytes_up  # codes, side data, header
    (1, 10, (218640, 640, 1760))
    """

    number: int
    score: Score | None  # None where the model was not evaluated
    share: float  # of the weight that lossy uploads had
    layers: dict[str, Layer]  # {} for a round that was skipped
    error: float  # mean relative quantization error of the lossy uploads
    bytes_up: tuple[int, int, int]  # codes, side data, header
    bytes_down: int
    arrived: int
    dropped: int  # clients that were lost before they uploaded
    failed: dict[int, str]  # clients whose upload could not be used, and why
    seconds: dict[str, float]  # by phase, and of the whole round; training and encoding are sums over clients
    uplink_seconds: float | None  # until the slowest client's upload would be there; None without bandwidths
    histograms: tuple[Histogram, ...] = ()
    capped: int = 0  # uploads whose weight was lowered to the cap
    bytes_estimated: int | None = None  # of all uploads, with estimates for entropy-coded ones; None without estimates
    bytes_framed: int | None = None  # of the same uploads by real frames; None where none were made to check estimates

    @property
    def accuracy(self) -> float | None:
        """The mean of the metric over the test set: the loss where that is the metric, None where not evaluated."""
        return self.score.metric / self.score.examples if self.score else None

    @property
    def loss(self) -> float | None:
        return self.score.loss / self.score.examples if self.score else None


def shift_of(algorithm: Algorithm) -> Shift | None:
    rules = algorithm.server.rules if isinstance(algorithm.server, Chain) else (algorithm.server,)
    return next((rule for rule in rules if isinstance(rule, Shift)), None)
