"""The algorithm box of the paper: one round, from the draw of the cohort to the next broadcast."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedshift import tree
from fedshift.accumulate import Mean
from fedshift.algorithms import Algorithm, Chain, Shift, shorter
from fedshift.algorithms.fedshift import layers, mean
from fedshift.data.cohorts import Cohorts, Plan, Rate, draw_plan, travel
from fedshift.data.partition import Partition
from fedshift.engines.base import Engine, Histogram, Job, Task, Upload
from fedshift.evaluate import Score
from fedshift.frame import WireError
from fedshift.types import Broadcast, Params, Round
from fedshift.uplink import Uplink, quantized, read
from fedshift.wire import EXACT, fixed, size, unpack


class DivergedError(RuntimeError):
    """Several rounds in a row had no upload that could be used."""


class Memory(Protocol):
    """What clients remember between rounds; {} for one that has not trained yet."""

    def get(self, client: int) -> Params: ...

    def put(self, client: int, memory: Params) -> None: ...


class Group(NamedTuple):
    """Clients that upload alike."""

    name: str
    uplink: Uplink
    bandwidth: float | None = None  # bytes a second


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything about a run that does not change from round to round."""

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
    layers: list[str] = field(init=False)  # tensors that the shift may touch: the record speaks of these

    def __post_init__(self) -> None:
        rule = shift_of(self.algorithm)
        object.__setattr__(self, "layers", layers(self.task.params, rule.tensors if rule else None))

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


class Layer(NamedTuple):
    """One layer in one round."""

    mean_before: float  # the shift
    mean_after: float
    shorter: bool  # on which side of Theorem 2's fence: whether the shift makes the step the shorter one
    step: float  # |w^{t+1} - w^t|
    drift: float  # mean over clients of |w_k - w^t|
    drift_coded: float  # and of |Q(w_k) - w^t|


class Outcome(NamedTuple):
    """What there is to tell about a round."""

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

    @property
    def accuracy(self) -> float | None:
        """The mean of the metric over the test set, None where it was not evaluated."""
        return self.score.metric / self.score.examples if self.score else None

    @property
    def loss(self) -> float | None:
        return self.score.loss / self.score.examples if self.score else None


def run_round(
    fed: Federation, engine: Engine, state: State, memory: Memory, *, evaluate: bool = True, histograms: bool = False
) -> tuple[State, Outcome]:
    """Draw a cohort, let it train and upload, average what arrives, apply the server's rules, evaluate."""
    clock = Clock()
    number, sent = state.number + 1, state.out
    clients, dropped = fed.cohorts.draw(number)
    uploads = Uploads(fed, sent)
    if clients:
        plan = draw_plan(
            fed.partition, clients, seed=fed.seed, number=number, epochs=fed.epochs, batch=fed.batch, rate=fed.rate
        )
        cohort = torch.tensor(clients)
        job = Job(
            number=number,
            clients=clients,
            rule=fed.algorithm.client,
            sent=sent,
            recall=memory.get,
            plan=plan,
            examples=fed.partition.sizes[cohort].tolist(),
            uplinks=[fed.groups[g].uplink for g in fed.group[cohort].tolist()],
            layers=fed.layers,
            histograms=histograms,
        )
        clock.lap("draw")
        for i, upload in enumerate(engine.train([job])[0]):
            clock.lap("clients")
            if uploads.take(upload, job, i):
                memory.put(upload.client, upload.memory)
            clock.lap("aggregate")
    if uploads.mean.count:
        rnd = uploads.round(number, fed.partition.clients)
        out, server = fed.algorithm.server.apply(sent, state.server, rnd)
        told = uploads.layers(rnd, out.params)
        state = State(number, out, server, 0)
    else:
        told = {}
        state = state._replace(number=number, skipped=state.skipped + 1)
        if state.skipped >= fed.patience:
            why = next(iter(uploads.failed.values()), "every client dropped out")
            raise DivergedError(f"round {number}: no usable upload in {state.skipped} rounds in a row; the last: {why}")
    clock.lap("aggregate")
    score = engine.evaluate(state.out.params) if evaluate else None
    clock.lap("evaluate")
    return state, uploads.outcome(number, score, told, len(dropped), clock.seconds)


class Uploads:
    """The server's side of a round: uploads are folded into the mean one by one, and let go."""

    def __init__(self, fed: Federation, sent: Broadcast) -> None:
        self.fed, self.sent, self.trained = fed, sent, fed.task.trained
        self.mean = Mean(like=sent.params, base=sent.params)
        self.extra: Params = {}
        self.failed: dict[int, str] = {}
        self.taken: list[Upload] = []  # without frames and memory
        self.bytes_up = [0, 0, 0]
        self.fixed: dict[Uplink, tuple[int, int]] = {}
        self.errors: list[float] = []
        self.train = self.encode = 0.0
        self.slowest: float | None = None
        self.down = size(EXACT, sent.params) + (size(EXACT, sent.control) if sent.control else 0)

    def take(self, upload: Upload, job: Job, i: int) -> bool:
        """Whether it could be used."""
        self.train, self.encode = self.train + upload.seconds[0], self.encode + upload.seconds[1]
        if upload.failure:
            self.failed[upload.client] = upload.failure
            return False
        self._count(upload, job.uplinks[i])
        weight = float(job.examples[i]) if self.fed.weights == "examples" else 1.0
        try:
            self.mean.add(upload.frame, weight)
        except WireError as problem:
            self.failed[upload.client] = str(problem)
            return False
        if job.rule.extra != "none":
            change = unpack(upload.extra, like=self.sent.control) if upload.extra else self._derive(upload, job, i)
            self.extra = tree.tmap(torch.add, self.extra, change) if self.extra else change
        if job.uplinks[i].lossy:
            self.errors.append(upload.error)
        if self.fed.bandwidth is not None:
            sent = (len(upload.frame) + len(upload.extra)) / float(self.fed.bandwidth[upload.client])
            self.slowest = max(upload.seconds[1] + sent, self.slowest or 0.0)
        self.taken.append(upload._replace(frame=b"", extra=b"", memory={}))
        return True

    def _count(self, upload: Upload, uplink: Uplink) -> None:
        """Bytes by what they are: codes, side data, header."""
        if uplink not in self.fixed:
            self.fixed[uplink] = fixed(quantized(uplink, self.trained), self.sent.params)
        about, side = self.fixed[uplink]
        self.bytes_up[0] += len(upload.frame) - about - side
        self.bytes_up[1] += side
        self.bytes_up[2] += about
        if upload.extra:
            about, _ = fixed(EXACT, self.sent.control)
            self.bytes_up[0] += len(upload.extra) - about
            self.bytes_up[2] += about

    def _derive(self, upload: Upload, job: Job, i: int) -> Params:
        """What the client changed in its memory, worked out from its upload as the client did."""
        plan = Plan(*(part[i] for part in job.plan))
        decoded = read(upload.frame, self.sent.params)
        return job.rule.finish(decoded, self.sent, {}, travel(plan, self.fed.task.momentum))[1]

    def round(self, number: int, population: int) -> Round:
        arrived = self.mean.count
        extra = tree.tmap(lambda d: d / arrived, self.extra)
        return Round(number, arrived, population, self.sent, self.mean.result(), extra, self.mean.share)

    def layers(self, rnd: Round, params: Params) -> dict[str, Layer]:
        rule = shift_of(self.fed.algorithm)
        share = rule.share(rnd) if rule else rnd.share
        told = {}
        for i, name in enumerate(self.fed.layers):
            start, new = self.sent.params[name], params[name]
            before, after = float(mean(rnd.mean[name])), float(mean(new))
            drifts = [upload.drift[i] for upload in self.taken]
            told[name] = Layer(
                before,
                after,
                shorter(share, float(mean(start)), before),
                float(torch.linalg.vector_norm(new - start)),
                *(sum(column) / len(drifts) for column in zip(*drifts, strict=True)),
            )
        return told

    def outcome(
        self, number: int, score: Score | None, told: dict[str, Layer], dropped: int, seconds: dict[str, float]
    ) -> Outcome:
        errors, sent_to = self.errors, len(self.taken) + len(self.failed) + dropped
        codes, side, header = self.bytes_up
        return Outcome(
            number=number,
            score=score,
            share=self.mean.share,
            layers=told,
            error=sum(errors) / len(errors) if errors else 0.0,
            bytes_up=(codes, side, header),
            bytes_down=sent_to * self.down,
            arrived=self.mean.count,
            dropped=dropped,
            failed=self.failed,
            seconds={"train": self.train, "encode": self.encode, "round": sum(seconds.values())} | seconds,
            uplink_seconds=self.slowest,
            histograms=next((upload.histograms for upload in self.taken if upload.histograms), ()),
        )


def shift_of(algorithm: Algorithm) -> Shift | None:
    rules = algorithm.server.rules if isinstance(algorithm.server, Chain) else (algorithm.server,)
    return next((rule for rule in rules if isinstance(rule, Shift)), None)


class Clock:
    """Seconds by phase."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.last = now, now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """What passed since the last lap belongs to this phase."""
        now = self.now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now
