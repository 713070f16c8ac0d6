"""A grid of runs: on a GPU as many at once as fit, elsewhere one for each core; what was stopped goes on."""

import time
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import tomli_w

from fedshift.core.files import RunError, write
from fedshift.engines import Engine, TrainingError
from fedshift.experiment.build import engine, packable
from fedshift.experiment.grid import One, expand
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, differences, plain, read
from fedshift.rounds.loop import Ended, run_rounds
from fedshift.runs.checkpoint import Checkpoints
from fedshift.runs.events import Event
from fedshift.runs.journal import require_settings
from fedshift.runs.packs import Seat, alike, fitting, kind
from fedshift.runs.parallel import Simulate, Worker
from fedshift.runs.record import SWEEP, RunFolder, begun, finished, settings_of
from fedshift.runs.run import Run
from fedshift.runs.summary import names


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
            raise RunError(f"{out}: already contains a run; choose another --out")
        for one in self.runs:
            said = one.experiment.engine
            if said.deterministic and packable(one.experiment) and not said.pack and len(self.runs) > 1:
                raise SettingsError(
                    "engine.deterministic = true: in a sweep needs engine.pack, how many runs are trained at once"
                )
        self.text = tomli_w.dumps(plain(raw))
        for one in self.runs:
            _same_settings(one)

    def train(
        self, cores: int, stop: Callable[[], bool] = lambda: False, simulate: Simulate | None = None
    ) -> Generator[Event]:
        """Train what is not finished; close this, or let `stop` say so, to stop each run at the end of its round.

        `simulate` trains runs whose engine is flower.
        """
        path, foreign = self.out / SWEEP, not (self.out / ".lock").exists()
        with RunFolder(self.out):
            same = path.exists() and read(path) == tomllib.loads(self.text)
            if path.exists() and foreign and not same:
                raise RunError(f"{path}: is not of this sweep; choose another --out")
            if not same:
                write(path, self.text.encode())
            todo = [place for place, one in enumerate(self.runs) if not finished(one.folder)]
            together = [place for place in todo if packable(self.runs[place].experiment)]
            # worker processes first: a process that has used a GPU cannot fork others that do
            yield from self._apart([place for place in todo if place not in together], cores, stop, simulate)
            yield from self._together(together, stop)

    def _apart(
        self, todo: Sequence[int], cores: int, stop: Callable[[], bool], simulate: Simulate | None
    ) -> Iterator[Event]:
        """Each run in a process of its own."""
        each = max(1, max((one.experiment.engine.workers for one in self.runs), default=1))
        each = cores if any(one.experiment.engine.name == "flower" for one in self.runs) else each
        crew = [Worker(self.runs, simulate) for _ in range(min(len(todo), max(1, cores // each)))]
        waiting = iter(todo)
        try:
            busy: dict[Any, Worker] = {
                worker.connection: worker for worker in crew if worker.start(next(waiting, None))
            }
            while busy and not stop():
                for connection in wait(list(busy), timeout=1.0):
                    worker = busy[connection]
                    event = worker.receive()
                    yield event
                    if event.kind not in ("done", "failed", "stopped"):
                        continue
                    del busy[connection]
                    if not worker.process.is_alive():  # it took its run with it; the others go on
                        worker = Worker(self.runs, simulate)
                        crew.append(worker)
                    if worker.start(next(waiting, None)):
                        busy[worker.connection] = worker
        finally:
            for worker in crew:
                worker.stop()

    def _together(self, todo: Sequence[int], stop: Callable[[], bool]) -> Iterator[Event]:
        """As many runs at once as fit the device."""
        for group in self._alike(todo):
            waiting = list(group)
            while waiting and not stop():
                first = OpenedRun(self.runs, waiting)
                yield from first.train(stop)
                waiting = [place for place in waiting if place not in first.places]

    def _alike(self, todo: Sequence[int]) -> list[list[int]]:
        """Runs that can share a pack; with `deterministic`, the packs are the same whatever is finished already."""
        groups: dict[str, list[int]] = {}
        for place, one in enumerate(self.runs):
            said = one.experiment.engine
            if place in todo or (said.deterministic and packable(one.experiment)):
                groups.setdefault(kind(one.experiment), []).append(place)
        packs: list[list[int]] = []
        for places in groups.values():
            said = self.runs[places[0]].experiment.engine
            size = said.pack if said.deterministic else len(places)
            packs += [places[i : i + size] for i in range(0, len(places), size)] if size else [places]
        return [left for pack in packs if (left := [place for place in pack if place in todo])]


class OpenedRun:
    """The first runs of a list, as many as are trained at once, ready to go on."""

    def __init__(self, runs: Sequence[One], waiting: Sequence[int]) -> None:
        self.told: list[Event] = []
        self.all, self.runs = runs, list[Run]()
        self.places: list[int] = []  # of those that were opened, and of those that could not be
        self.on: list[int] = []
        self.engine: Engine | None = None
        latest = _common_round([runs[place].folder for place in waiting], runs[waiting[0]].experiment)
        most = len(waiting)
        for place in waiting:
            if len(self.places) >= most:
                break
            self.places.append(place)
            try:
                run = self._open(place, latest)
            except Exception as problem:
                self.told.append(Event("failed", f"{runs[place].name}: {problem}", place=place))
                continue
            if self.runs and not alike(self.runs[0].fed.task, run.fed.task):
                run.close()
                self.places.remove(place)  # for another pack
                continue
            if not self.runs:
                most = fitting([runs[other].experiment for other in waiting], run.fed.task)
            self.runs.append(run)
            self.on.append(place)

    def _open(self, place: int, latest: int | None) -> Run:
        one = self.all[place]

        def seat(run: Run) -> Engine:
            self.engine = self.engine or engine(one.experiment, run.fed.task, 1)
            return Seat(self.engine)

        return Run(
            one.experiment,
            one.folder,
            again=begun(one.folder),
            like=self.runs[0] if self.runs else None,
            latest=latest,
            on=seat,
            tell=lambda sentence: self.told.append(Event("told", f"{one.name}: {sentence}", place=place)),
        )

    def train(self, stop: Callable[[], bool]) -> Iterator[Event]:
        yield from self._new()
        if self.engine is None:
            return
        try:
            for at, outcome in run_rounds(self.runs, self.engine, stop):
                place = self.on[at]
                if isinstance(outcome, Ended):
                    yield Event("failed", f"{self.all[place].name}: {outcome.problem}", place=place)
                    continue
                yield Event.of(outcome, place)
                yield from self._new()
                if self.runs[at].finished:
                    yield Event("done", place=place)
        except TrainingError as problem:  # of the engine, and so of all runs
            for run, place in zip(self.runs, self.on, strict=True):
                if not run.finished and not run.closed:  # closed: it failed before, alone
                    yield Event("failed", f"{self.all[place].name}: {problem}", place=place)
        finally:
            for run in self.runs:
                run.close()
            self.engine.close()

    def _new(self) -> list[Event]:
        told, self.told = self.told, []
        return told


def _common_round(folders: Sequence[Path], experiment: Experiment) -> int | None:
    """With `deterministic`, the last round that all runs of a pack have a checkpoint of: they go on together.

    None where there is no such round, because one has not begun or has failed: then each goes on from where it is.
    """
    if not experiment.engine.deterministic:
        return None
    saved = [{number for number, _ in Checkpoints(folder).newest_first} for folder in folders]
    return max(set.intersection(*saved), default=None)


def _same_settings(one: One) -> None:
    """A folder left by a sweep with other settings is not this sweep's, even if its settings file was edited since."""
    if not begun(one.folder):
        return
    if changed := differences(settings_of(one.folder).toml(), one.experiment.toml()):
        raise RunError(f"{one.folder}: was run with other settings; choose another --out ({changed})")
    require_settings(one.folder, one.experiment)


def estimate(raw: Mapping[str, Any], cores: int) -> float:
    """Seconds that the runs of a grid will take here, from two rounds of the first of them; nothing is written.

    Runs that are packed are timed in a pack; on a CPU the rounds have a single epoch, and training is scaled.
    """
    experiments = expand(raw)
    first = experiments[0]
    if not packable(first):
        short = Run(first.changed(**{"train.epochs": 1, "train.rounds": 1, "engine.name": "sequential"}))
        (outcome,) = short
        train = outcome.seconds["train"]
        each = outcome.seconds["round"] - train + train * first.train.epochs
        return each * sum(one.train.rounds for one in experiments) / min(cores, len(experiments))
    similar = [one.changed(**{"train.rounds": 3}) for one in experiments if kind(one) == kind(first)]
    runs: list[Run] = [Run(similar[0])]
    shared = runs[0].engine
    runs += [
        Run(one, like=runs[0], on=lambda run: Seat(shared)) for one in similar[1 : fitting(similar, runs[0].fed.task)]
    ]
    took: list[float] = []
    begin = time.perf_counter()
    for at, _ in run_rounds(runs, shared):
        if at == len(runs) - 1:
            took.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    shared.close()
    each = min(took) / len(runs)  # the first round also prepares the device
    return each * sum(one.train.rounds for one in experiments)
