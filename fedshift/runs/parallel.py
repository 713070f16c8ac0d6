"""Worker processes that train the runs of a grid one after another."""

import multiprocessing
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedshift.engines import workers
from fedshift.experiment.grid import GridRun
from fedshift.experiment.settings import Experiment
from fedshift.rounds.engine import describe
from fedshift.runs.events import Event
from fedshift.runs.record import begun
from fedshift.runs.run import Run

# trains one run outside this process: (experiment, folder, stop) -> events; stop() is True when it should stop
Simulate = Callable[[Experiment, Path, Callable[[], bool]], Generator[Event]]


class Worker:
    """Process that trains one run after another; runs on Flower are trained by `simulate`."""

    def __init__(self, runs: Sequence[GridRun], simulate: Simulate | None = None) -> None:
        self.enough = multiprocessing.Event()
        self.runs, self.place = runs, -1
        # not a daemon: a run may start its own workers
        self.process, self.connection = workers.start(_work, runs, simulate, self.enough, daemon=False)

    def start(self, place: int | None) -> bool:
        if place is not None:
            self.place = place
            self.connection.send(place)
        return place is not None

    def receive(self) -> Event:
        try:
            return Event(*self.connection.recv())
        except (EOFError, OSError):
            self.process.join()
            why = "its process ended unexpectedly; it may have run out of memory"
            return Event("failed", f"{self.runs[self.place].name}: {why}", place=self.place)

    def stop(self) -> None:
        """Stop the process at the end of its round."""
        self.enough.set()
        with suppress(EOFError, OSError):
            self.connection.send(None)
            while True:  # until the process closes its end
                self.connection.recv()
        self.process.join()
        workers.close(self.connection)


def _work(server: "Connection[Any, Any]", runs: Sequence[GridRun], simulate: Simulate | None, enough: Any) -> None:
    while (place := server.recv()) is not None and not enough.is_set():
        _train(server, place, runs[place], simulate, enough)


def _train(
    server: "Connection[Any, Any]", place: int, planned: GridRun, simulate: Simulate | None, enough: Any
) -> None:
    """Train one run, or resume it."""
    try:
        if planned.experiment.engine.name == "flower" and simulate:
            _simulated(server, place, planned, simulate, enough)
            return
        run = Run(
            planned.experiment,
            planned.folder,
            again=begun(planned.folder),
            cores=1,
            tell=lambda sentence: server.send(Event("message", f"{planned.name}: {sentence}", place=place)),
        )
        for outcome in run:
            server.send(Event.of(outcome, place))
            if enough.is_set() and not run.finished:
                run.checkpoint()
                run.close()
                server.send(Event("stopped", place=place))
                return
        server.send(Event("done", place=place))
    except BrokenPipeError:
        raise
    except SystemExit as problem:  # of a user's function
        server.send(Event("failed", f"{planned.name}: {describe(problem)}", place=place))
    except Exception as problem:
        server.send(Event("failed", f"{planned.name}: {problem}", place=place))


def _simulated(server: "Connection[Any, Any]", place: int, planned: GridRun, simulate: Simulate, enough: Any) -> None:
    with closing(simulate(planned.experiment, planned.folder, enough.is_set)) as events:
        for event in events:
            text = f"{planned.name}: {event.text}" if event.text else ""
            server.send(event._replace(text=text, place=place))
