"""A grid of runs, as many at a time as there are cores; what is finished is skipped, what was stopped goes on.

    [sweep]
    "uplink.bits" = [32, {32 = 0.5, 4 = 0.5}]
    "shift.on" = [false, true]
    seed = [0, 1, 2]

Every combination is a run. `runs = [{...}, {...}]` lists settings that go together instead.
"""

import copy
import itertools
import multiprocessing
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedshift.engines import workers
from fedshift.events import Event
from fedshift.files import RunError, write
from fedshift.record import SETTINGS, SWEEP, Folder, begun, finished
from fedshift.running import Run
from fedshift.settings import Experiment
from fedshift.summary import names
from fedshift.toml import SettingsError, dotted, merge, plain, put, read


class One(NamedTuple):
    """A run of the grid."""

    name: str
    experiment: Experiment
    folder: Path


def expand(raw: Mapping[str, Any]) -> list[Experiment]:
    """Every combination of the settings listed under `sweep`.

    >>> grid = {"train": {"rounds": 3}, "sweep": {"seed": [0, 1], "train": {"lr": [0.1, 0.2]}}}
    >>> [(one.seed, one.train.lr, one.train.rounds) for one in expand(grid)]
    [(0, 0.1, 3), (0, 0.2, 3), (1, 0.1, 3), (1, 0.2, 3)]
    """
    base = {key: value for key, value in raw.items() if key != "sweep"}
    runs, axes = _parts(raw)
    experiments = []
    for together in runs:
        for values in itertools.product(*axes.values()):
            one = copy.deepcopy(merge(base, together))
            for key, value in zip(axes, values, strict=True):
                put(one, key, value)
            experiments.append(Experiment(**one))
    return experiments


def keys(raw: Mapping[str, Any]) -> set[str]:
    """The settings that a sweep sets for each run."""
    runs, axes = _parts(raw)
    return {*axes, *(key for one in runs for key in dotted(one))} - {"name"}


def _parts(raw: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], dict[str, list[Any]]]:
    """Settings that go together, and those of which every combination is wanted."""
    grid = raw.get("sweep", {})
    if not isinstance(grid, Mapping):
        raise SettingsError(f"sweep = {grid!r}: must be a table of lists")
    runs = grid.get("runs", [{}])
    if not isinstance(runs, list) or not runs or not all(isinstance(one, Mapping) for one in runs):
        raise SettingsError(f"sweep.runs = {runs!r}: must be a list of tables of settings")
    axes = dotted({key: value for key, value in grid.items() if key != "runs"})
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SettingsError(f"sweep.{key} = {values!r}: must be a list of values, one or more")
    return runs, axes


class Sweep:
    """The runs of a grid in one folder."""

    def __init__(self, raw: Mapping[str, Any], out: Path) -> None:
        experiments = expand(raw)
        labels = names(experiments)
        if twice := [name for name in labels if labels.count(name) > 1]:
            raise SettingsError(f"sweep: two runs have the same settings ({twice[0]})")
        self.out = out.absolute()
        self.runs = [One(*one, self.out / one[0]) for one in zip(labels, experiments, strict=True)]
        if begun(self.out):
            raise RunError(f"{out}: holds a run already; choose another --out")
        self.text = tomli_w.dumps(plain(raw))
        for one in self.runs:
            _same_settings(one)

    def train(self, cores: int) -> Iterator[Event]:
        """Train what is not finished; close this to stop each run at the end of its round."""
        path, foreign = self.out / SWEEP, not (self.out / ".lock").exists()
        with Folder(self.out):
            same = path.exists() and read(path) == tomllib.loads(self.text)
            if path.exists() and foreign and not same:
                raise RunError(f"{path}: is not of this sweep; choose another --out")
            if not same:
                write(path, self.text.encode())
            yield from self._train(cores)

    def _train(self, cores: int) -> Iterator[Event]:
        todo = [place for place, one in enumerate(self.runs) if not finished(one.folder)]
        each = max(1, max((one.experiment.engine.workers for one in self.runs), default=1))
        each = cores if any(one.experiment.engine.name == "flower" for one in self.runs) else each
        crew = [_Worker(self.runs) for _ in range(min(len(todo), max(1, cores // each)))]
        waiting = iter(todo)
        try:
            busy: dict[Any, _Worker] = {
                worker.connection: worker for worker in crew if worker.start(next(waiting, None))
            }
            while busy:
                for connection in wait(list(busy)):
                    worker = busy[connection]
                    event = worker.receive()
                    yield event
                    if event.kind not in ("done", "failed", "stopped"):
                        continue
                    del busy[connection]
                    if not worker.process.is_alive():  # it took its run with it; the others go on
                        worker = _Worker(self.runs)
                        crew.append(worker)
                    if worker.start(next(waiting, None)):
                        busy[worker.connection] = worker
        finally:
            for worker in crew:
                worker.stop()


class _Worker:
    """A process that runs one experiment after another."""

    def __init__(self, runs: Sequence[One]) -> None:
        self.enough = multiprocessing.Event()
        self.runs, self.place = runs, -1
        # not a daemon: a run may have workers of its own
        self.process, self.connection = workers.start(_work, runs, self.enough, daemon=False)

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
            return Event("failed", f"{self.runs[self.place].name}: {why}", place=self.place)

    def stop(self) -> None:
        """At the end of its round."""
        self.enough.set()
        with suppress(EOFError, OSError):
            self.connection.send(None)
            while True:  # until it closes its end
                self.connection.recv()
        self.process.join()
        workers.close(self.connection)


def _work(server: "Connection[Any, Any]", runs: Sequence[One], enough: Any) -> None:
    while (place := server.recv()) is not None and not enough.is_set():
        _one(server, place, runs[place], enough)


def _one(server: "Connection[Any, Any]", place: int, one: One, enough: Any) -> None:
    """One run, from where it is."""
    try:
        if one.experiment.engine.name == "flower":
            _one_on_flower(server, place, one, enough)
            return
        run = Run(
            one.experiment,
            one.folder,
            again=begun(one.folder),
            cores=1,
            tell=lambda sentence: server.send(Event("told", f"{one.name}: {sentence}", place=place)),
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
    except Exception as problem:
        server.send(Event("failed", f"{one.name}: {problem}", place=place))


def _one_on_flower(server: "Connection[Any, Any]", place: int, one: One, enough: Any) -> None:
    with closing(simulation()(one.experiment, one.folder, enough.is_set)) as events:
        for event in events:
            text = f"{one.name}: {event.text}" if event.text else ""
            server.send(event._replace(text=text, place=place))


def simulation() -> Any:
    """`simulate` of `fedshift.flower`, which is only looked at where it is asked for; SettingsError without Flower."""
    if any(find_spec(name) is None for name in ("flwr", "ray")):
        raise SettingsError("engine.name = 'flower': Flower is not installed here; pip install 'fedshift[flower]'")
    from fedshift.flower.simulate import simulate

    return simulate


def _same_settings(one: One) -> None:
    """A folder left by a sweep with other settings is not this sweep's."""
    if begun(one.folder) and (one.folder / SETTINGS).read_text(encoding="utf-8") != one.experiment.toml():
        raise RunError(f"{one.folder}: was run with other settings; choose another --out")
