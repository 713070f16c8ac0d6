"""A grid of runs, as many at a time as there are cores; what is finished is skipped, what was stopped goes on.

    [sweep]
    "uplink.bits" = [32, {32 = 0.5, 4 = 0.5}]
    "shift.on" = [false, true]
    seed = [0, 1, 2]

Every combination is a run. `runs = [{...}, {...}]` lists settings that go together instead.
"""

import itertools
import multiprocessing
import signal
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch

from fedshift.engines.processes import start
from fedshift.files import RunError, write
from fedshift.record import Folder
from fedshift.running import Run
from fedshift.settings import Experiment
from fedshift.summary import names
from fedshift.toml import SettingsError, merge, plain, put, read

FILE = "sweep.toml"


class One(NamedTuple):
    """A run of the grid."""

    name: str
    experiment: Experiment
    folder: Path


class Event(NamedTuple):
    """What a run has to tell: a round, a sentence, its end, or why it failed."""

    place: int  # in the grid
    kind: str  # 'round', 'told', 'done', 'stopped', 'failed'
    text: str = ""
    number: int = 0
    score: float | None = None
    loss: float | None = None
    bytes_up: int = 0


def expand(raw: Mapping[str, Any]) -> list[Experiment]:
    """Every combination of the settings listed under `sweep`.

    >>> grid = {"train": {"rounds": 3}, "sweep": {"seed": [0, 1], "train": {"lr": [0.1, 0.2]}}}
    >>> [(one.seed, one.train.lr, one.train.rounds) for one in expand(grid)]
    [(0, 0.1, 3), (0, 0.2, 3), (1, 0.1, 3), (1, 0.2, 3)]
    """
    base = {key: value for key, value in raw.items() if key != "sweep"}
    grid = raw.get("sweep", {})
    if not isinstance(grid, Mapping):
        raise SettingsError(f"sweep = {grid!r}: must be a table of lists")
    runs = grid.get("runs", [{}])
    axes = dict(_axes({key: value for key, value in grid.items() if key != "runs"}))
    if not isinstance(runs, list) or not runs or not all(isinstance(one, Mapping) for one in runs):
        raise SettingsError(f"sweep.runs = {runs!r}: must be a list of tables of settings")
    experiments = []
    for together in runs:
        for values in itertools.product(*axes.values()):
            one = merge(base, together)
            for key, value in zip(axes, values, strict=True):
                one = merge({}, _copied(one))
                put(one, key, value)
            experiments.append(Experiment(**one))
    return experiments


def keys(raw: Mapping[str, Any]) -> set[str]:
    """The settings that a sweep sets for each run."""
    grid = raw.get("sweep", {})
    together = [dotted for one in grid.get("runs", []) for dotted in _dotted(one)]
    return {*together, *_dotted({key: value for key, value in grid.items() if key != "runs"})} - {"name"}


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        whole = not isinstance(value, Mapping) or key in ("bits", "bandwidth")
        yield from [prefix + key] if whole else _dotted(value, f"{prefix}{key}.")


def _axes(grid: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    for key, value in grid.items():
        if isinstance(value, Mapping):
            yield from _axes(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value:
            yield prefix + key, value
        else:
            raise SettingsError(f"sweep.{prefix}{key} = {value!r}: must be a list of values, one or more")


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


class Sweep:
    """The runs of a grid in one folder."""

    def __init__(self, raw: Mapping[str, Any], out: Path) -> None:
        experiments = expand(raw)
        labels = names(experiments)
        if twice := [name for name in labels if labels.count(name) > 1]:
            raise SettingsError(f"sweep: two runs have the same settings ({twice[0]})")
        self.out = out.absolute()
        self.runs = [One(*one, self.out / one[0]) for one in zip(labels, experiments, strict=True)]
        if (self.out / "settings.toml").exists():
            raise RunError(f"{out}: holds a run already; choose another --out")
        self.text = tomli_w.dumps(plain(raw))
        for one in self.runs:
            _same_settings(one)

    def finished(self, one: One) -> bool:
        return (one.folder / "model.safetensors").exists()

    def train(self, cores: int) -> Iterator[Event]:
        """Train what is not finished; close this to stop each run at the end of its round."""
        path, foreign = self.out / FILE, not (self.out / ".lock").exists()
        with Folder(self.out):
            same = path.exists() and read(path) == tomllib.loads(self.text)
            if path.exists() and foreign and not same:
                raise RunError(f"{path}: is not of this sweep; choose another --out")
            if not same:
                write(path, self.text.encode())
            yield from self._train(cores)

    def _train(self, cores: int) -> Iterator[Event]:
        todo = [place for place, one in enumerate(self.runs) if not self.finished(one)]
        each = max(1, max((one.experiment.engine.workers for one in self.runs), default=1))
        workers: list[_Worker] = []
        for _ in range(min(len(todo), max(1, cores // each))):
            workers.append(_Worker(self.runs, [worker.connection for worker in workers]))
        waiting = iter(todo)
        try:
            busy = {worker.connection: worker for worker in workers if worker.start(next(waiting, None))}
            while busy:
                for connection in wait(list(busy)):
                    worker = busy[connection]
                    event = worker.receive()
                    yield event
                    if event.kind not in ("done", "failed", "stopped"):
                        continue
                    del busy[connection]
                    if not worker.process.is_alive():  # it took its run with it; the others go on
                        worker = _Worker(self.runs, [other.connection for other in workers])
                        workers.append(worker)
                    if worker.start(next(waiting, None)):
                        busy[worker.connection] = worker
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """A process that runs one experiment after another."""

    def __init__(self, runs: Sequence[One], others: "list[Connection[Any, Any]]") -> None:
        forks = sys.platform == "linux"
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self.enough = context.Event()
        self.runs, self.place = runs, -1
        self.connection, theirs = context.Pipe()
        copies = [*others, self.connection] if forks else []
        self.process = context.Process(target=_work, args=(theirs, copies, runs, self.enough))
        start(self.process)
        theirs.close()

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
            why = "its process ended before its time; memory may have been short"
            return Event(self.place, "failed", f"{self.runs[self.place].name}: {why}")

    def stop(self) -> None:
        """At the end of its round."""
        self.enough.set()
        with suppress(EOFError, OSError):
            self.connection.send(None)
            while True:  # until it closes its end
                self.connection.recv()
        self.process.join()
        self.connection.close()


def _work(
    server: "Connection[Any, Any]", copies: "list[Connection[Any, Any]]", runs: Sequence[One], enough: Any
) -> None:
    """`copies` are a fork's copies of the server's ends of pipes, which would hide that the server is gone."""
    for connection in copies:
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while (place := server.recv()) is not None and not enough.is_set():
            _one(server, place, runs[place], enough)


def _one(server: "Connection[Any, Any]", place: int, one: One, enough: Any) -> None:
    """One run, from where it is."""
    try:
        again = (one.folder / "settings.toml").exists()
        run = Run(
            one.experiment,
            one.folder,
            again=again,
            cores=1,
            tell=lambda sentence: server.send(Event(place, "told", f"{one.name}: {sentence}")),
        )
        for outcome in run:
            figures = outcome.number, outcome.accuracy, outcome.loss, sum(outcome.bytes_up)
            server.send(Event(place, "round", "", *figures))
            if enough.is_set() and not run.finished:
                run.checkpoint()
                run.close()
                server.send(Event(place, "stopped"))
                return
        server.send(Event(place, "done"))
    except BrokenPipeError:
        raise
    except Exception as problem:
        server.send(Event(place, "failed", f"{one.name}: {problem}"))


def _same_settings(one: One) -> None:
    """A folder left by a sweep with other settings is not this sweep's."""
    path = one.folder / "settings.toml"
    if path.exists() and path.read_text(encoding="utf-8") != one.experiment.toml():
        raise RunError(f"{one.folder}: was run with other settings; choose another --out")
