"""The training loop: `run_rounds` trains one run, or several on one engine, round by round."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from fedshift.core.types import CPU, Broadcast, Params
from fedshift.data.cohorts import Plan, draw_plan
from fedshift.rounds.downlink import broadcast
from fedshift.rounds.engine import RAISED, Engine, Job, TrainingError, Upload, describe, one_thread
from fedshift.rounds.evaluate import ClientScores, Score
from fedshift.rounds.federation import Federation, Layer, Outcome, State
from fedshift.rounds.policy import choose, reported
from fedshift.rounds.server import RoundUploads
from fedshift.rounds.uplink import Uplink, split_server


class DivergedError(RuntimeError):
    """Several rounds in a row had no upload that could be used."""


class Memory(Protocol):
    """Memory of clients between rounds; {} for a client that has not trained yet."""

    def get(self, client: int) -> Params: ...

    def put(self, client: int, memory: Params) -> None: ...


class Ram:
    """Memory of clients in RAM."""

    def __init__(self) -> None:
        self.held: dict[int, Params] = {}

    def get(self, client: int) -> Params:
        return self.held.get(client, {})

    def put(self, client: int, memory: Params) -> None:
        if memory or client in self.held:
            self.held[client] = memory


class DrawnRound(NamedTuple):
    """Cohort and plan of a round: independent of the model, so they can be drawn ahead."""

    clients: list[int]
    dropped: list[int]  # clients that drop out before they upload
    plan: Plan | None  # None if all clients drop out


def draw(fed: Federation, number: int, home: torch.device) -> DrawnRound:
    """Draw the cohort of a round and its plan, on the device `home`."""
    clients, dropped = fed.cohorts.draw(number)
    if not clients:
        return DrawnRound(clients, dropped, None)
    plan = draw_plan(
        fed.partition.at(home),
        clients,
        seed=fed.seed,
        number=number,
        epochs=fed.epochs,
        steps=fed.steps,
        batch=fed.batch,
        rate=fed.rate,
    )
    return DrawnRound(clients, dropped, plan)


def choose_uplinks(fed: Federation, state: State, clients: Sequence[int]) -> tuple[list[Uplink], Params]:
    """Uplinks of the clients of the next round, and the policy's part of the state after it.

    A policy chooses those of the clients in adaptive groups; the others have the uplinks of their groups.
    """
    number, groups = state.number + 1, fed.group[torch.tensor(clients)].tolist()
    uplinks = [fed.uplinks[g] for g in groups]
    places = [i for i, g in enumerate(groups) if fed.groups[g].adaptive]
    if fed.policy is None or not places:
        return uplinks, state.policy
    stats = fed.stats(state.policy, [uplinks[i] for i in places])
    try:
        chosen, after = choose(fed.policy, state.policy, number, [clients[i] for i in places], stats)
    except RAISED as problem:  # of a user's policy
        raise TrainingError(f"round {number}, uplink policy {fed.policy}: {describe(problem)}") from problem
    for i, uplink in zip(places, chosen, strict=True):
        uplinks[i] = fed.sendable(uplink)
    return uplinks, after


class OpenRound:
    """A round in progress: its cohort is drawn, and an engine is to train its job."""

    def __init__(
        self,
        fed: Federation,
        state: State,
        memory: Memory,
        drawn: DrawnRound | None = None,
        *,
        histograms: bool = False,
        frames: bool = True,
    ) -> None:
        self.fed, self.state, self.memory = fed, state, memory
        self.clock, self.number = Clock(), state.number + 1
        clients, self.dropped, plan = drawn or draw(fed, self.number, CPU)
        self.sending = broadcast(fed, state, [*clients, *self.dropped])
        self.uploads = RoundUploads(fed, state, self.sending.sent, memory.get)
        self.job: Job | None = None
        self.policy = state.policy  # after this round
        if plan:
            cohort, start = torch.tensor(clients), fed.partition.start
            uplinks, self.policy = choose_uplinks(fed, state, clients)
            self.job = Job(
                number=self.number,
                clients=clients,
                rule=fed.algorithm.client,
                sent=self.sending.sent,
                broadcast=self.sending.frame,
                recall=lambda client: split_server(memory.get(client))[0],
                plan=plan,
                examples=(start[cohort + 1] - start[cohort]).tolist(),  # not sizes, which are those of all clients
                uplinks=uplinks,
                layers=fed.layers,
                histograms=histograms,
                frames=frames,
                run=fed.run,
                adaptive=fed.policy is not None,
                owned=[fed.partition.of(client) for client in clients] if fed.reports_loss else (),
            )
        self.clock.lap("draw")

    def take(self, uploads: Iterable[Upload]) -> None:
        """Check uploads as they arrive, and average the usable ones in the order of the cohort."""
        assert self.job is not None
        for i, upload in enumerate(uploads):
            self.clock.lap("clients")
            self.uploads.take(upload, self.job, i)
            self.clock.lap("aggregate")
        self.uploads.settle(self.job)
        self.clock.lap("aggregate")

    def end(
        self,
        score: Callable[[Params], Score] | None,
        score_clients: Callable[[Params], ClientScores] | None = None,
    ) -> tuple[State, Outcome]:
        """Apply the server's rules to the mean, and evaluate the result on the test set and for each client.

        A round whose result is NaN or infinite is skipped: the state and the memory of clients do not change.
        """
        fed, state, broken = self.fed, self.state, ""
        layer_stats: dict[str, Layer] = {}
        if self.uploads.mean.count:
            rnd = self.uploads.round(self.number, fed.partition.clients)
            out, server = fed.algorithm.server.apply(state.out, self.uploads.server, rnd)
            out, server = _as_before(out, server, state)
            layer_stats, broken = self.uploads.stats.layers(rnd, out, server, state.server)
        if broken:
            why = f"the round is skipped: the server's rules made {broken} NaN or infinite"
            self.uploads, layer_stats = self.uploads.skipped(why), {}
        if self.uploads.mean.count:
            policy = reported(self.policy, self.number, self.uploads.reports) if fed.policy else {}
            state = State(self.number, out, server, 0, self.sending.down, policy)
            for client, memory in self.uploads.memory.items():
                self.memory.put(client, memory)
        elif self.uploads.silent and not self.uploads.failed:  # no client had anything to upload
            state = state._replace(number=self.number, down=self.sending.down, policy=self.policy)
        else:
            state = state._replace(number=self.number, down=self.sending.down, policy=self.policy)
            state = state._replace(skipped=state.skipped + 1)
            if state.skipped >= fed.patience:
                why = next(iter(self.uploads.failed.values()), "every client dropped out")
                raise DivergedError(
                    f"round {self.number}: no usable upload in {state.skipped} rounds in a row; last reason: {why}"
                )
        self.clock.lap("aggregate")
        result = score(state.out.params) if score else None
        clients = score_clients(state.out.params) if score_clients else None
        self.clock.lap("evaluate")
        dropped, seconds = len(self.dropped), self.clock.seconds
        outcome = self.uploads.outcome(self.number, result, layer_stats, dropped, seconds, self.sending.length)
        return state, outcome._replace(clients=clients)


def _as_before(out: Broadcast, server: Params, state: State) -> tuple[Broadcast, Params]:
    """Model, control and server state in the dtypes they had before the round, which rules may have changed."""
    pairs = ((out.params, state.out.params), (out.control, state.out.control), (server, state.server))
    params, control, server = (
        {name: x.to(old[name].dtype) if name in old else x for name, x in new.items()} for new, old in pairs
    )
    return Broadcast(params, control), server


class Training:
    """A run: its federation, the state after its last round, and the memory of its clients.

    `run_rounds` trains it, alone or together with others on one engine.
    """

    def __init__(
        self,
        fed: Federation,
        engine: Engine,
        rounds: int,
        state: State | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.fed, self.engine, self.rounds = fed, engine, rounds
        self.state = (state or fed.start()).at(engine.home)
        self.memory: Memory = Ram() if memory is None else memory
        self.closed = False

    @property
    def finished(self) -> bool:
        return self.state.number >= self.rounds

    def draw(self, ahead: int = 0) -> DrawnRound | None:
        """Draw the next round, or the round `ahead` rounds later; None after the last round."""
        number = self.state.number + 1 + ahead
        return draw(self.fed, number, self.engine.home) if number <= self.rounds else None

    def begin(self, drawn: DrawnRound | None = None) -> OpenRound:
        """Open the next round; its job is then trained, and its uploads are taken, before `end`."""
        return OpenRound(self.fed, self.state, self.memory, drawn or self.draw())

    def end(self, opened: OpenRound) -> Outcome:
        """Aggregate and evaluate a round."""
        self.state, outcome = opened.end(self.engine.evaluate)
        return outcome

    def finish(self) -> None:
        """End a run after its last round."""
        self.close()

    def checkpoint(self) -> None:
        """Write a checkpoint of this round, if there is a record; only between rounds."""

    def close(self) -> None:
        """Stop: no further round is trained."""
        self.closed = True


class Ended(NamedTuple):
    """Problem that ended a run before its last round."""

    problem: Exception


def run_rounds(
    runs: Sequence[Training], engine: Engine, stop: Callable[[], bool] = lambda: False
) -> Generator[tuple[int, Outcome | Ended]]:
    """Train runs on one engine, each round of all runs together, to their last rounds or until `stop` is true.

    Yields the index of a run and the outcome of its round, or the exception that ended this run alone. When stopped,
    each run has a checkpoint to resume from. The caller closes runs and engine.
    """
    ahead: dict[int, DrawnRound] = {}
    side = torch.cuda.Stream() if engine.home.type == "cuda" else None  # type: ignore[no-untyped-call]
    while training := [(place, run) for place, run in enumerate(runs) if not run.closed]:
        if stop():
            for _, run in training:
                run.checkpoint()
            return
        if last := [run for _, run in training if run.finished]:  # was stopped after its last round and before `finish`
            for run in last:
                run.finish()
            continue
        with one_thread():
            outcomes, ahead = _round(training, engine, ahead, side)
        yield from outcomes


def _round(
    training: Sequence[tuple[int, Training]],
    engine: Engine,
    drawn: Mapping[int, DrawnRound],
    side: torch.cuda.Stream | None,
) -> tuple[list[tuple[int, Outcome | Ended]], dict[int, DrawnRound]]:
    """Train one round of each run; return the outcomes, and the cohorts of the next round."""
    alone, begin = len(training) == 1, time.perf_counter()
    begun: list[tuple[int, Training, OpenRound]] = []
    outcomes: list[tuple[int, Outcome | Ended]] = []
    for place, run in training:
        try:
            opened = run.begin(drawn.get(place))
            begun.append((place, run, opened if alone else _remembered(opened)))
        except Exception as problem:
            run.close()
            outcomes.append((place, Ended(problem)))
    if not begun:
        return outcomes, {}
    uploads = engine.train([opened.job for _, _, opened in begun if opened.job])
    with _on_stream(side):  # while the device trains
        ahead = {place: later for place, run, _ in begun if (later := run.draw(1))}
    arrived = iter(uploads if alone else [iter(list(each)) for each in uploads])
    passed = (time.perf_counter() - begin) / len(begun)
    for place, run, opened in begun:
        if not alone:  # trained together: each run is charged an equal part of the time
            opened.clock.pause()
            opened.clock.seconds["clients"] = passed
        uploaded = next(arrived) if opened.job else None
        try:
            if uploaded is not None:
                opened.take(uploaded)
            outcomes.append((place, run.end(opened)))
        except Exception as problem:  # ends this run alone; the others continue
            run.close()
            outcomes.append((place, Ended(problem)))
    return outcomes, ahead


def _remembered(opened: OpenRound) -> OpenRound:
    """Load the memory of the clients, so that an error while reading it ends this run alone."""
    if opened.job:
        memory = {client: opened.job.recall(client) for client in opened.job.clients}
        opened.job = opened.job._replace(recall=memory.__getitem__)
    return opened


@contextmanager
def _on_stream(side: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on a separate stream, which the current stream then waits for."""
    if side is None:
        yield
        return
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


class Clock:
    """Seconds per phase."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.last = now, now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> float:
        """Add the time since the last lap to this phase, and return it."""
        now = self.now()
        passed, self.last = now - self.last, now
        self.seconds[phase] = self.seconds.get(phase, 0.0) + passed
        return passed

    def pause(self) -> None:
        """Ignore the time since the last lap, which another run used."""
        self.last = self.now()
