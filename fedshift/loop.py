"""The algorithm box of the paper: one round, from the draw of the cohort to the next broadcast."""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from fedshift.data.cohorts import draw_plan
from fedshift.engines.base import Engine, Job
from fedshift.federation import Federation, Outcome, State
from fedshift.server import Uploads
from fedshift.types import Params


class DivergedError(RuntimeError):
    """Several rounds in a row had no upload that could be used."""


class Memory(Protocol):
    """What clients remember between rounds; {} for one that has not trained yet."""

    def get(self, client: int) -> Params: ...

    def put(self, client: int, memory: Params) -> None: ...


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
