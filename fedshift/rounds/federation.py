"""Data of a run: its fixed part, its state, and the outcome of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms import Algorithm, Chain, Filters, ServerRule, Shift, defines, filters, weights
from fedshift.algorithms.bounds import BOUND, CAP
from fedshift.core import tree
from fedshift.core.types import Broadcast, Params
from fedshift.data.cohorts import Cohorts, Rate
from fedshift.data.partition import Partition
from fedshift.rounds.engine import Histogram, Task
from fedshift.rounds.evaluate import ClientScores, Held, Score
from fedshift.rounds.policy import REPORTS, Policy, PolicyStats, begin
from fedshift.rounds.uplink import Uplink, quantized
from fedshift.wire.frame import Header, head
from fedshift.wire.writer import FrameSize, choose

# names in the state of a lossy downlink: the tensors that clients hold, and the error that is fed back
HELD, FEEDBACK = "held/", "error/"
# bytes of all frames so far, and that number when each client last received one (N,), -1 for never
TOTAL, SEEN = "total", "seen"


class Group(NamedTuple):
    """Clients with the same uplink."""

    name: str
    uplink: Uplink
    bandwidth: float | None = None  # bytes per second
    adaptive: bool = False  # the policy of the run, if there is one, chooses the uplinks of these clients


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything about a run that does not change from round to round.

    A `Shift` in the algorithm is completed with the names of the tensors that it changes (the trained ones among those
    that it names, otherwise the model's weights) and with the positions of their filters.
    """

    task: Task
    algorithm: Algorithm
    partition: Partition
    cohorts: Cohorts
    groups: Sequence[Group]
    group: Tensor  # (N,) index of the group of each client
    bandwidth: Tensor | None  # (N,) bytes per second, infinite if unknown
    epochs: int
    batch: int
    rate: Rate
    seed: int
    steps: int | None = None  # local steps per round, instead of epochs
    downlink: Uplink = Uplink()  # codec of the broadcast
    weights: Literal["equal", "examples"] = "equal"
    patience: int = 5  # rounds without a usable upload before the run stops
    bound: float = BOUND  # largest update norm, as a multiple of the round's median; 0 for no limit
    cap: float = CAP  # largest weight, as a multiple of the median; 0 for no limit
    run: int = 0  # number of the run, in the headers of its frames
    held: Held | None = None  # held-out examples of each client
    policy: Policy | None = None  # chooses the uplinks of clients in adaptive groups
    rounds: int = 0  # of the whole run, which a policy may use
    layers: list[str] = field(init=False)  # weights and shifted tensors: the record has columns for them
    filters: dict[str, Filters] = field(init=False)  # of the model's weights

    def __post_init__(self) -> None:
        object.__setattr__(self, "filters", filters(self.task.model))
        object.__setattr__(self, "algorithm", self.algorithm._replace(server=self._named(self.algorithm.server)))
        recorded = {*weights(self.task.model), *self.shifted}
        object.__setattr__(self, "layers", [name for name in self.task.trained if name in recorded])

    def _named(self, rule: ServerRule) -> ServerRule:
        """The rule with the names of shifted tensors filled in; rules without a shift are unchanged."""
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
        """Names of the tensors that are shifted; [] without a shift."""
        rule = shift_of(self.algorithm)
        return list(rule.tensors or ()) if rule else []

    @cached_property
    def variable(self) -> bool:
        """True if the length of the uploads of some group depends on their values, or may do so with a policy."""
        if self.policy is not None:
            return True
        choices = [quantized(group.uplink, self.task.trained) for group in self.groups]
        return any(FrameSize(choice, self.task.params).variable for choice in choices)

    @cached_property
    def uplinks(self) -> list[Uplink]:
        """Uplink of each group, of updates if the client rule defines messages."""
        return [self.sendable(group.uplink) for group in self.groups]

    def sendable(self, uplink: Uplink) -> Uplink:
        """The uplink as clients use it: messages that a client rule defines are sent like updates."""
        return replace(uplink, update=True) if defines(self.algorithm.client, "message") else uplink

    @property
    def reports_loss(self) -> bool:
        """True if clients send the loss of the model that they receive, for the policy or a server rule."""
        rules = self.algorithm.server.needs
        return "loss" in rules or (self.policy is not None and "loss" in self.policy.needs)

    def stats(self, reports: Params, uplinks: Sequence[Uplink]) -> PolicyStats:
        """Input of the policy: `uplinks` are those of the cohort by the settings."""
        sizes = self.partition.sizes
        return PolicyStats(
            rounds=self.rounds,
            values=self.values,
            weights=sizes.double() if self.weights == "examples" else torch.ones(len(sizes), dtype=torch.float64),
            examples=sizes,
            bandwidth=None if self.bandwidth is None else self.bandwidth.double(),
            uplinks=uplinks,
            overhead=self._overhead,
            **tree.part(REPORTS, reports),
        )

    @cached_property
    def values(self) -> int:
        """Number of trained values."""
        return sum(self.task.params[name].numel() for name in self.task.trained)

    def _overhead(self, uplink: Uplink) -> int:
        """Bytes of an upload that do not depend on its values, with the header of the last round and largest client."""
        header = Header(uplink.update, self.rounds, int(self.partition.sizes.max()), False, uplink.lossy, self.run)
        whole = header._replace(client=self.partition.clients)
        return FrameSize(quantized(uplink, self.task.trained), self.task.params).fixed + len(head(whole))

    @cached_property
    def second(self) -> Params:
        """Tensors with the names, shapes and types of a second upload; {} for rules without one."""
        rule, sent = self.algorithm.client, self.start().out
        if not defines(rule, "second"):
            return {}
        trained = tree.take(sent.params, self.task.trained)
        return rule.second(trained, sent, rule.init(trained), torch.tensor(1.0))

    def start(self) -> "State":
        """State before the first round."""
        params = self.task.params
        control, server = self.algorithm.server.init(params, self.task.trained)
        policy = begin(self.policy, self.partition.clients, self.rounds) if self.policy else {}
        return State(0, Broadcast(params, control), server, 0, self._held(), policy)

    def _held(self) -> Params:
        """State of the downlink before the first round: clients hold nothing, so all receive the exact model."""
        link, params = self.downlink, self.task.params
        if not link.lossy:
            return {}
        if not link.update:
            coded = [n for n in self.task.trained if choose(link.codec, n, params[n]).quantizer.lossy]
            return tree.prefixed(FEEDBACK, tree.zeros(tree.take(params, coded))) if link.feedback else {}
        never = torch.full((self.partition.clients,), -1, dtype=torch.int64)
        return tree.prefixed(HELD, params) | {TOTAL: torch.zeros((), dtype=torch.int64), SEEN: never}


class State(NamedTuple):
    """Everything that changes from round to round, except the memory of clients."""

    number: int  # rounds done
    out: Broadcast  # the server's model and control
    server: Params
    skipped: int  # rounds in a row without a usable upload
    down: Params = {}  # noqa: RUF012  of a lossy downlink: what clients hold
    policy: Params = {}  # noqa: RUF012  state of the uplink policy, and what clients reported

    def at(self, device: torch.device) -> "State":
        """The same state on a device; that of a policy stays on the CPU."""
        params, control, server, down = (
            tree.tmap(lambda x: x.to(device), part)
            for part in (self.out.params, self.out.control, self.server, self.down)
        )
        return self._replace(out=Broadcast(params, control), server=server, down=down)


class Layer(NamedTuple):
    """Statistics of one layer in one round."""

    mean_before: float  # before the shift
    mean_after: float
    shorter: bool  # Theorem 2: True if the shift makes the step shorter
    step: float  # |w^{t+1} - w^t|
    drift: float  # mean over clients of |w_k - w^t|
    drift_coded: float  # mean over clients of |Q(w_k) - w^t|
    filters_before: float  # root mean square of the means of filters, before the shift
    filters_after: float


class UsedUplink(NamedTuple):
    """Uplink that a policy chose for a client, and the bytes of its upload."""

    client: int
    codec: str  # label
    bytes: int
    bits: float  # per trained value: 8 bytes / values


class Outcome(NamedTuple):
    """Result and statistics of a round.

    >>> from fedshift import Experiment, run
    >>> outcome = next(run(Experiment(uplink={"bits": {32: 0.5, 4: 0.5}}, engine={"name": "sequential"})))
    >>> outcome.number, outcome.arrived, outcome.bytes_up  # codes, side data, header
    (1, 10, (218640, 640, 390))
    """

    number: int
    score: Score | None  # None if the model was not evaluated
    share: float  # of lossy uploads in the total weight
    layers: dict[str, Layer]  # {} for a round that was skipped
    error: float  # mean relative quantization error of the lossy uploads
    bytes_up: tuple[int, int, int]  # codes, side data, header
    bytes_down: int
    arrived: int
    dropped: int  # clients that dropped out before they uploaded
    failed: dict[int, str]  # reason for each client whose upload was not used
    seconds: dict[str, float]  # per phase and for the whole round; training and encoding are sums over clients
    uplink_seconds: float | None  # until the slowest client's upload would arrive; None without bandwidths
    histograms: tuple[Histogram, ...] = ()
    capped: int = 0  # uploads whose weight was lowered to the cap
    silent: int = 0  # clients whose rule decided not to upload
    bytes_estimated: int | None = None  # of all uploads, with estimates for entropy-coded ones; None without estimates
    bytes_framed: int | None = None  # of the same uploads as real frames; None if estimates were not checked
    clients: ClientScores | None = None  # None if the model was not evaluated for each client
    uplinks: tuple[UsedUplink, ...] = ()  # of the used uploads, if the run has an uplink policy

    @property
    def accuracy(self) -> float | None:
        """Score by the metric on the test set (the loss if there is no metric); None if not evaluated."""
        return self.score.metric / self.score.examples if self.score else None

    @property
    def loss(self) -> float | None:
        return self.score.loss / self.score.examples if self.score else None


def shift_of(algorithm: Algorithm) -> Shift | None:
    """The first shift among the server's rules, or None."""
    rules = algorithm.server.rules if isinstance(algorithm.server, Chain) else (algorithm.server,)
    return next((rule for rule in rules if isinstance(rule, Shift)), None)
