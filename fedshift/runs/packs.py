"""Many runs on one engine: their clients are trained as one stack, and each run keeps its own record.

A packed run makes the draws it would make alone. What it computes differs by rounding, because a
larger stack adds up in another order.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedshift.core.tree import same
from fedshift.core.types import Params
from fedshift.engines import Engine, Task
from fedshift.experiment.settings import Experiment
from fedshift.rounds.engine import Job, Upload, one_thread
from fedshift.rounds.evaluate import Score
from fedshift.rounds.federation import Outcome
from fedshift.rounds.loop import Drawn, Turn
from fedshift.runs.run import Run

SPARE = 0.8  # of the device's free memory that a pack may take


class Seat(NamedTuple):
    """An engine that several runs use: who leaves it leaves it to the others."""

    engine: Engine

    @property
    def home(self) -> torch.device:
        return self.engine.home

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return self.engine.train(jobs)

    def evaluate(self, params: Params) -> Score:
        return self.engine.evaluate(params)

    def close(self) -> None:
        pass


class Ended(NamedTuple):
    """How a run of a pack ended before its last round."""

    problem: Exception


class Pack:
    """Runs that share model, data and batch size."""

    def __init__(self, runs: Sequence[Run], engine: Engine) -> None:
        self.runs, self.engine = runs, engine
        self.ahead: dict[int, Drawn] = {}
        self.side: torch.cuda.Stream | None = None

    def rounds(self, stop: Callable[[], bool] = lambda: False) -> Generator[tuple[int, Outcome | Ended]]:
        """Train all runs to their ends, or until `stop`: then each has a checkpoint to go on from."""
        try:
            while on := [(place, run) for place, run in enumerate(self.runs) if not run.closed]:
                if stop():
                    for _, run in on:
                        run.checkpoint()
                    return
                with one_thread():
                    yield from self._round(on)
        finally:
            for run in self.runs:
                run.close()
            self.engine.close()

    def _round(self, on: Sequence[tuple[int, Run]]) -> Iterator[tuple[int, Outcome | Ended]]:
        if done := [run for _, run in on if run.finished]:  # stopped after its last round and before its end
            for run in done:
                with suppress(StopIteration):
                    next(run)
            return
        begin = time.perf_counter()
        turns, ready = [], []
        for place, run in on:
            try:
                turns.append(self._begun(run, self.ahead.pop(place, None)))
                ready.append((place, run))
            except Exception as problem:
                run.close()
                yield place, Ended(problem)
        on = ready
        if not on:
            return
        made = self.engine.train([turn.job for turn in turns if turn.job])
        with self._aside():  # while the device trains
            self.ahead = {place: drawn for place, run in on if (drawn := run.draw(1))}
        uploads = iter([list(own) for own in made])
        passed = (time.perf_counter() - begin) / len(on)
        for (place, run), turn in zip(on, turns, strict=True):
            turn.clock.pause()
            turn.clock.seconds["clients"] = passed
            if turn.job:
                turn.take(next(uploads))
            try:
                yield place, run.end(turn)
            except Exception as problem:  # this run's own; the others go on
                run.close()
                yield place, Ended(problem)

    def _begun(self, run: Run, drawn: Drawn | None) -> Turn:
        """A round whose clients' memory is at hand: what is wrong with it is this run's own problem."""
        turn = run.begin(drawn)
        if turn.job:
            memory = {client: turn.job.recall(client) for client in turn.job.clients}
            turn.job = turn.job._replace(recall=memory.__getitem__)
        return turn

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a stream of its own, which the others wait for."""
        if self.engine.home.type != "cuda":
            yield
            return
        if self.side is None:
            self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.side):
            yield
        torch.cuda.current_stream().wait_stream(self.side)


def kind(experiment: Experiment) -> str:
    """What runs of one pack have in common."""
    said = experiment.train
    return repr(
        (
            (experiment.data.name, experiment.data.augment, experiment.model, experiment.engine),
            experiment.record.checkpoint if experiment.engine.deterministic else None,  # they go back together
            (said.batch, said.momentum, said.weight_decay, said.clip, said.loss, said.metric),
        )
    )


def alike(one: Task, other: Task) -> bool:
    """Whether what does not travel, frozen weights and private buffers, is the same: a pack has but one of it."""
    mine, its = one.fixed, other.fixed
    return mine.keys() == its.keys() and all(same(x, its[name]) for name, x in mine.items())


def fitting(experiments: Sequence[Experiment], task: Task) -> int:
    """How many of these, in their order, are trained at once: as many as are asked for, or as fit the device."""
    if asked := experiments[0].engine.pack:
        return asked
    device = task.data.x.device
    if device.type != "cuda":
        return 4  # a larger stack gains nothing on a CPU
    left = SPARE * torch.cuda.mem_get_info(device)[0]
    example, count = activations(task), 0
    for experiment in experiments:
        left -= room(experiment, task, example)
        if left < 0:
            break
        count += 1
    return max(1, count)


def room(experiment: Experiment, task: Task, example: int) -> int:
    """Bytes of device memory that a run needs in a pack.

        K (24 P + A B)  +  12 K P for FedProx and SCAFFOLD  +  4 N P for SCAFFOLD  +  4 N P for error feedback

    at most, for P weights, K clients a round of N, batches of B examples, and A bytes an example.
    """
    p = sum(x.numel() for x in task.params.values())
    said, k, n = experiment.algorithm.name, experiment.train.cohort, experiment.data.clients
    feedback = any(own.feedback for own in (experiment.uplink, *experiment.uplink.group.values()))
    kept = (said == "scaffold") + feedback if experiment.record.memory == "ram" else 0
    return k * (24 * p + example * experiment.train.batch) + 12 * k * p * (said != "fedavg") + 4 * n * p * kept


def activations(task: Task) -> int:
    """Bytes that one example takes in forward and backward pass: three times what the model's layers put out."""
    found: list[int] = []

    def count(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            found.append(12 * output.numel())

    hooks = [module.register_forward_hook(count) for module in task.model.modules()]
    with torch.no_grad():
        task.model(task.data.inputs(task.data.x[:1]))
    for hook in hooks:
        hook.remove()
    return sum(found)
