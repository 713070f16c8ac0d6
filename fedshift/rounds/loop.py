"""The algorithm box of the paper: one round, from the draw of the cohort to the next broadcast."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from fedshift.core.types import CPU, Params
from fedshift.data.cohorts import Plan, draw_plan
from fedshift.rounds.engine import Engine, Job, Upload
from fedshift.rounds.evaluate import Score
from fedshift.rounds.federation import Federation, Layer, Outcome, State
from fedshift.rounds.server import Uploads


class DivergedError(RuntimeError):
    """Several rounds in a row had no upload that could be used."""


class Memory(Protocol):
    """What clients remember between rounds; {} for one that has not trained yet."""

    def get(self, client: int) -> Params: ...

    def put(self, client: int, memory: Params) -> None: ...


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
            layer_stats, broken = self.uploads.layers(rnd, out, server, state.server)
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


def run_round(
    fed: Federation, engine: Engine, state: State, memory: Memory, *, evaluate: bool = True, histograms: bool = False
) -> tuple[State, Outcome]:
    """Draw a cohort, let it train and upload, average what arrives, apply the server's rules, evaluate."""
    turn = Turn(fed, state, memory, draw(fed, state.number + 1, engine.home), histograms=histograms)
    if turn.job:
        turn.take(engine.train([turn.job])[0])
    return turn.end(engine.evaluate if evaluate else None)


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
