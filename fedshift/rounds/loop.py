"""The algorithm box of the paper: `run_rounds` trains one run, or many on one engine, round by round."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from fedshift.core.types import CPU, Params
from fedshift.data.cohorts import Plan, draw_plan
from fedshift.rounds.engine import Engine, Job, Upload, one_thread
from fedshift.rounds.evaluate import Score
from fedshift.rounds.federation import Federation, Layer, Outcome, State
from fedshift.rounds.server import Uploads


class DivergedError(RuntimeError):
    """Several rounds in a row had no upload that could be used."""


class Memory(Protocol):
    """Memory of clients between rounds; {} for a client that has not trained yet."""

    def get(self, client: int) -> Params: ...

    def put(self, client: int, memory: Params) -> None: ...


class Ram:
    """Memory of clients that is forgotten with the process."""

    def __init__(self) -> None:
        self.held: dict[int, Params] = {}

    def get(self, client: int) -> Params:
        return self.held.get(client, {})

    def put(self, client: int, memory: Params) -> None:
        if memory:
            self.held[client] = memory


class Drawn(NamedTuple):
    """Who trains in a round and on what: it depends on nothing that is learnt, so it can be drawn ahead."""

    clients: list[int]
    dropped: list[int]
    plan: Plan | None  # None where all were lost


def draw(fed: Federation, number: int, home: torch.device) -> Drawn:
    """The cohort of a round and its plan, which is made on the device `home`."""
    clients, dropped = fed.cohorts.draw(number)
    if not clients:
        return Drawn(clients, dropped, None)
    plan = draw_plan(
        fed.partition.at(home),
        clients,
        seed=fed.seed,
        number=number,
        epochs=fed.epochs,
        batch=fed.batch,
        rate=fed.rate,
    )
    return Drawn(clients, dropped, plan)


class Turn:
    """A round that is on: its cohort is drawn, and its job is for an engine to do."""

    def __init__(
        self,
        fed: Federation,
        state: State,
        memory: Memory,
        drawn: Drawn | None = None,
        *,
        histograms: bool = False,
        frames: bool = True,
    ) -> None:
        self.fed, self.state, self.memory = fed, state, memory
        self.clock, self.number = Clock(), state.number + 1
        clients, self.dropped, plan = drawn or draw(fed, self.number, CPU)
        self.uploads = Uploads(fed, state.out)
        self.job: Job | None = None
        if plan:
            cohort = torch.tensor(clients)
            self.job = Job(
                number=self.number,
                clients=clients,
                rule=fed.algorithm.client,
                sent=state.out,
                recall=memory.get,
                plan=plan,
                examples=fed.partition.sizes[cohort].tolist(),
                uplinks=[fed.groups[g].uplink for g in fed.group[cohort].tolist()],
                layers=fed.layers,
                histograms=histograms,
                frames=frames,
            )
        self.clock.lap("draw")

    def take(self, uploads: Iterable[Upload]) -> None:
        """Measure what arrives, and average what can be used in the order of the cohort."""
        assert self.job is not None
        for i, upload in enumerate(uploads):
            self.clock.lap("clients")
            self.uploads.take(upload, self.job, i)
            self.clock.lap("aggregate")
        self.uploads.settle(self.job)
        self.clock.lap("aggregate")

    def end(self, score: Callable[[Params], Score] | None) -> tuple[State, Outcome]:
        """Apply the server's rules to the mean, and evaluate what comes of it.

        A round whose result is not finite is skipped: state and clients' memory stay as they were.
        """
        fed, state, broken = self.fed, self.state, ""
        layer_stats: dict[str, Layer] = {}
        if self.uploads.mean.count:
            rnd = self.uploads.round(self.number, fed.partition.clients)
            out, server = fed.algorithm.server.apply(state.out, state.server, rnd)
            layer_stats, broken = self.uploads.stats.layers(rnd, out, server, state.server)
        if broken:
            why = f"the round is skipped: the server's rules made {broken} NaN or infinite"
            self.uploads, layer_stats = self.uploads.skipped(why), {}
        if self.uploads.mean.count:
            state = State(self.number, out, server, 0)
            for client, memory in self.uploads.memory.items():
                self.memory.put(client, memory)
        else:
            state = state._replace(number=self.number, skipped=state.skipped + 1)
            if state.skipped >= fed.patience:
                why = next(iter(self.uploads.failed.values()), "every client dropped out")
                raise DivergedError(
                    f"round {self.number}: no usable upload in {state.skipped} rounds in a row; the last: {why}"
                )
        self.clock.lap("aggregate")
        found = score(state.out.params) if score else None
        self.clock.lap("evaluate")
        return state, self.uploads.outcome(self.number, found, layer_stats, len(self.dropped), self.clock.seconds)


class Training:
    """A run: what does not change in it, the state after its last round, and what its clients remember.

    `run_rounds` trains it, alone or beside others on one engine.
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

    def draw(self, ahead: int = 0) -> Drawn | None:
        """The cohort of the next round, or of one so many rounds later; None when there is no such round."""
        number = self.state.number + 1 + ahead
        return draw(self.fed, number, self.engine.home) if number <= self.rounds else None

    def begin(self, drawn: Drawn | None = None) -> Turn:
        """The next round: its job is to be done, and its uploads taken, before its end."""
        return Turn(self.fed, self.state, self.memory, drawn or self.draw())

    def end(self, turn: Turn) -> Outcome:
        """Aggregate and evaluate a round."""
        self.state, outcome = turn.end(self.engine.evaluate)
        return outcome

    def finish(self) -> None:
        """End a run after its last round."""
        self.close()

    def checkpoint(self) -> None:
        """Make this round one to resume from, where there is a record; only between rounds."""

    def close(self) -> None:
        """Stop here: no further round is trained."""
        self.closed = True


class Ended(NamedTuple):
    """Problem that ended a run before its last round."""

    problem: Exception


def run_rounds(
    runs: Sequence[Training], engine: Engine, stop: Callable[[], bool] = lambda: False
) -> Generator[tuple[int, Outcome | Ended]]:
    """Train runs on one engine, each round of all of them together, to their last rounds or until `stop`.

    Yields the place of a run and the outcome of its round, or the problem that ended this run alone. When stopped, each
    run has a checkpoint to resume from. The caller closes runs and engine.
    """
    ahead: dict[int, Drawn] = {}
    side = torch.cuda.Stream() if engine.home.type == "cuda" else None  # type: ignore[no-untyped-call]
    while training := [(place, run) for place, run in enumerate(runs) if not run.closed]:
        if stop():
            for _, run in training:
                run.checkpoint()
            return
        if last := [run for _, run in training if run.finished]:  # stopped after its last round and before its end
            for run in last:
                run.finish()
            continue
        with one_thread():
            outcomes, ahead = _round(training, engine, ahead, side)
        yield from outcomes


def _round(
    training: Sequence[tuple[int, Training]], engine: Engine, drawn: Mapping[int, Drawn], side: torch.cuda.Stream | None
) -> tuple[list[tuple[int, Outcome | Ended]], dict[int, Drawn]]:
    """One round of each run, from the draw of its cohort to the next broadcast; and the cohorts of the next round."""
    alone, begin = len(training) == 1, time.perf_counter()
    begun: list[tuple[int, Training, Turn]] = []
    outcomes: list[tuple[int, Outcome | Ended]] = []
    for place, run in training:
        try:
            turn = run.begin(drawn.get(place))
            begun.append((place, run, turn if alone else _remembered(turn)))
        except Exception as problem:
            run.close()
            outcomes.append((place, Ended(problem)))
    if not begun:
        return outcomes, {}
    uploads = engine.train([turn.job for _, _, turn in begun if turn.job])
    with _aside(side):  # while the device trains
        ahead = {place: later for place, run, _ in begun if (later := run.draw(1))}
    arrived = iter(uploads if alone else [iter(list(each)) for each in uploads])
    passed = (time.perf_counter() - begin) / len(begun)
    for place, run, turn in begun:
        if not alone:  # trained together: each has an equal part of the time
            turn.clock.pause()
            turn.clock.seconds["clients"] = passed
        if turn.job:
            turn.take(next(arrived))
        try:
            outcomes.append((place, run.end(turn)))
        except Exception as problem:  # of this run alone; the others are trained further
            run.close()
            outcomes.append((place, Ended(problem)))
    return outcomes, ahead


def _remembered(turn: Turn) -> Turn:
    """The round with its clients' memory at hand: a problem with reading it is of this run alone."""
    if turn.job:
        memory = {client: turn.job.recall(client) for client in turn.job.clients}
        turn.job = turn.job._replace(recall=memory.__getitem__)
    return turn


@contextmanager
def _aside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """On a stream of its own, which the current one waits for."""
    if side is None:
        yield
        return
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


class Clock:
    """Seconds by phase."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.last = now, now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> float:
        """What passed since the last lap belongs to this phase; how much that was."""
        now = self.now()
        passed, self.last = now - self.last, now
        self.seconds[phase] = self.seconds.get(phase, 0.0) + passed
        return passed

    def pause(self) -> None:
        """What passed since the last lap was another run's."""
        self.last = self.now()
