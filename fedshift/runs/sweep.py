"""Sweeps: train a grid of runs, on a GPU as many at once as fit, otherwise one per core; stopped runs are resumed."""

import math
import statistics
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
from fedshift.experiment.grid import GridRun, expand
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
    """Runs of a grid in one folder."""

    def __init__(self, raw: Mapping[str, Any], out: Path) -> None:
        experiments = expand(raw)
        labels = names(experiments)
        if duplicates := [name for name in labels if labels.count(name) > 1]:
            raise SettingsError(f"sweep: two runs have the same settings ({duplicates[0]})")
        self.out = out.absolute()
        self.runs = [GridRun(*run, self.out / run[0]) for run in zip(labels, experiments, strict=True)]
        if begun(self.out):
            raise RunError(f"{out}: already contains a run; choose another --out")
        for planned in self.runs:
            config = planned.experiment.engine
            if config.deterministic and packable(planned.experiment) and not config.pack and len(self.runs) > 1:
                raise SettingsError(
                    "engine.deterministic = true: requires engine.pack, the number of runs per pack, in a sweep"
                )
        self.text = tomli_w.dumps(plain(raw))
        for planned in self.runs:
            _same_settings(planned)

    def train(
        self, cores: int, stop: Callable[[], bool] = lambda: False, simulate: Simulate | None = None
    ) -> Generator[Event]:
        """Train the runs that are not finished; `simulate` trains runs whose engine is flower.

        To stop each run at the end of its round, close the generator or return True from `stop`.
        """
        path, foreign = self.out / SWEEP, not (self.out / ".lock").exists()
        with RunFolder(self.out):
            same = path.exists() and read(path) == tomllib.loads(self.text)
            if path.exists() and foreign and not same:
                raise RunError(f"{path}: belongs to another sweep; choose another --out")
            if not same:
                write(path, self.text.encode())
            todo = [place for place, planned in enumerate(self.runs) if not finished(planned.folder)]
            together = [place for place in todo if packable(self.runs[place].experiment)]
            # worker processes first: a process that has used a GPU cannot fork processes that use it
            yield from self._apart([place for place in todo if place not in together], cores, stop, simulate)
            yield from self._together(together, stop)

    def _apart(
        self, todo: Sequence[int], cores: int, stop: Callable[[], bool], simulate: Simulate | None
    ) -> Iterator[Event]:
        """Train each run in its own process."""
        each = max(1, max((planned.experiment.engine.workers for planned in self.runs), default=1))
        each = cores if any(planned.experiment.engine.name == "flower" for planned in self.runs) else each
        workers = [Worker(self.runs, simulate) for _ in range(min(len(todo), max(1, cores // each)))]
        waiting = iter(todo)
        try:
            busy: dict[Any, Worker] = {
                worker.connection: worker for worker in workers if worker.start(next(waiting, None))
            }
            while busy and not stop():
                for connection in wait(list(busy), timeout=1.0):
                    worker = busy[connection]
                    event = worker.receive()
                    yield event
                    if event.kind not in ("done", "failed", "stopped"):
                        continue
                    del busy[connection]
                    if not worker.process.is_alive():  # its run has failed; others continue in a new process
                        worker = Worker(self.runs, simulate)
                        workers.append(worker)
                    if worker.start(next(waiting, None)):
                        busy[worker.connection] = worker
        finally:
            for worker in workers:
                worker.stop()

    def _together(self, todo: Sequence[int], stop: Callable[[], bool]) -> Iterator[Event]:
        """Train as many runs at once as fit the device."""
        for group in self._alike(todo):
            waiting = list(group)
            while waiting and not stop():
                pack = OpenedPack(self.runs, waiting)
                yield from pack.train(stop)
                waiting = [place for place in waiting if place not in pack.places]

    def _alike(self, todo: Sequence[int]) -> list[list[int]]:
        """Runs that can share a pack; with `deterministic`, packs do not depend on which runs are finished."""
        groups: dict[str, list[int]] = {}
        for place, planned in enumerate(self.runs):
            if place in todo or (planned.experiment.engine.deterministic and packable(planned.experiment)):
                groups.setdefault(kind(planned.experiment), []).append(place)
        packs: list[list[int]] = []
        for places in groups.values():
            config = self.runs[places[0]].experiment.engine
            size = config.pack if config.deterministic else len(places)
            packs += [places[i : i + size] for i in range(0, len(places), size)] if size else [places]
        return [left for pack in packs if (left := [place for place in pack if place in todo])]


class OpenedPack:
    """First runs of a list, as many as are trained at once, opened as a pack."""

    def __init__(self, runs: Sequence[GridRun], waiting: Sequence[int]) -> None:
        self.events: list[Event] = []
        self.all, self.runs = runs, list[Run]()
        self.places: list[int] = []  # indices in `all` of the runs that were opened or could not be opened
        self.opened: list[int] = []  # indices of `runs` in `all`
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
                self.events.append(Event("failed", f"{runs[place].name}: {problem}", place=place))
                continue
            if self.runs and not alike(self.runs[0].fed.task, run.fed.task):
                run.close()
                self.places.remove(place)  # left for another pack
                continue
            if not self.runs:
                most = fitting([runs[other].experiment for other in waiting], run.fed.task)
            self.runs.append(run)
            self.opened.append(place)

    def _open(self, place: int, latest: int | None) -> Run:
        planned = self.all[place]

        def seat(run: Run) -> Engine:
            self.engine = self.engine or engine(planned.experiment, run.fed.task, 1)
            return Seat(self.engine)

        return Run(
            planned.experiment,
            planned.folder,
            again=begun(planned.folder),
            like=self.runs[0] if self.runs else None,
            latest=latest,
            on=seat,
            tell=lambda sentence: self.events.append(Event("message", f"{planned.name}: {sentence}", place=place)),
        )

    def train(self, stop: Callable[[], bool]) -> Iterator[Event]:
        yield from self._new_events()
        if self.engine is None:
            return
        try:
            for at, outcome in run_rounds(self.runs, self.engine, stop):
                place = self.opened[at]
                if isinstance(outcome, Ended):
                    yield Event("failed", f"{self.all[place].name}: {outcome.problem}", place=place)
                    continue
                yield Event.of(outcome, place)
                yield from self._new_events()
                if self.runs[at].finished:
                    yield Event("done", place=place)
        except TrainingError as problem:  # an error of the engine fails all runs
            for run, place in zip(self.runs, self.opened, strict=True):
                if not run.finished and not run.closed:  # closed: it has failed before
                    yield Event("failed", f"{self.all[place].name}: {problem}", place=place)
        finally:
            for run in self.runs:
                run.close()
            self.engine.close()

    def _new_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events


def _common_round(folders: Sequence[Path], experiment: Experiment) -> int | None:
    """With `deterministic`, the last round of which all runs of a pack have a checkpoint, to resume them together.

    None without such a round, if a run has not started or has failed: then each run resumes from its own checkpoint.
    """
    if not experiment.engine.deterministic:
        return None
    saved = [{number for number, _ in Checkpoints(folder).newest_first} for folder in folders]
    return max(set.intersection(*saved), default=None)


def _same_settings(planned: GridRun) -> None:
    """Raise RunError if the folder contains a run with other settings, even if its settings file was edited."""
    if not begun(planned.folder):
        return
    if changed := differences(settings_of(planned.folder).toml(), planned.experiment.toml()):
        raise RunError(f"{planned.folder}: was run with other settings; choose another --out ({changed})")
    require_settings(planned.folder, planned.experiment)


# of an estimate: at most this many rounds per kind of run; none is started after its part of this time
TIMED_ROUNDS, TIMED_SECONDS = 20, 10.0
TIMED_KINDS = 16  # as many as a frontier has


def training_time(experiments: Sequence[Experiment], cores: int) -> float:
    """Estimated seconds to train the experiments of a grid on this machine, from a few rounds of some of them.

    On a CPU, up to 16 kinds of runs are timed for a few rounds with a single epoch or step, whose time is scaled. On
    a GPU, those of the first pack are. Nothing is written.
    """
    first = experiments[0]
    if not packable(first):
        kinds = kinds_of_cost(experiments)
        stride = math.ceil(len(kinds) / TIMED_KINDS)
        loaded: dict[str, Run] = {}  # data sets are loaded once
        total, limit = 0.0, TIMED_SECONDS * stride / len(kinds)
        for place in range(0, len(kinds), stride):  # a kind that is not timed is like the one before
            begin, each = _time_of(kinds[place][0], limit, loaded)
            similar = [experiment for group in kinds[place : place + stride] for experiment in group]
            total += sum(begin + each * experiment.train.rounds for experiment in similar)
        return total / min(cores, len(experiments))
    similar = [
        experiment.changed(**{"train.rounds": 3}) for experiment in experiments if kind(experiment) == kind(first)
    ]
    runs: list[Run] = [Run(similar[0])]
    shared = runs[0].engine
    runs += [
        Run(experiment, like=runs[0], on=lambda run: Seat(shared))
        for experiment in similar[1 : fitting(similar, runs[0].fed.task)]
    ]
    passed: list[float] = []
    begin = time.perf_counter()
    for at, _ in run_rounds(runs, shared):
        if at == len(runs) - 1:
            passed.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    shared.close()
    each = min(passed) / len(runs)  # the first round also prepares the device
    return each * sum(experiment.train.rounds for experiment in experiments)


def kinds_of_cost(experiments: Sequence[Experiment]) -> list[list[Experiment]]:
    """Experiments whose rounds take equally long: those that differ in seed, rounds or shift only.

    >>> grid = [Experiment(seed=seed, uplink=uplink) for uplink in ("exact", "lean") for seed in (0, 1)]
    >>> [[(run.uplink.bits, run.seed) for run in runs] for runs in kinds_of_cost(grid)]
    [[(32, 0), (32, 1)], [(8, 0), (8, 1)]]
    """
    kinds: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        parts = experiment.model_dump(exclude={"name": True, "seed": True, "shift": True, "train": {"rounds"}})
        kinds.setdefault(repr(parts), []).append(experiment)
    return list(kinds.values())


def _time_of(experiment: Experiment, limit: float, loaded: dict[str, Run]) -> tuple[float, float]:
    """Seconds until a run starts, and of each round; after two rounds, none is started after `limit` seconds.

    `loaded`: a run for each data set, whose data later ones share.
    """
    begin, steps = time.perf_counter(), experiment.train.steps
    length = "train.epochs" if steps is None else "train.steps"
    short = experiment.changed(**{length: 1, "train.rounds": TIMED_ROUNDS, "engine.name": "sequential"})
    source = f"{experiment.data.name} {experiment.data.args}"
    run = Run(short, like=loaded.get(source))
    loaded.setdefault(source, run)
    built, times = time.perf_counter() - begin, list[float]()
    for outcome in run:
        train = outcome.seconds["train"]
        times.append(outcome.seconds["round"] - train + train * (steps or experiment.train.epochs))
        if len(times) > 1 and time.perf_counter() - begin > limit:
            break
    run.close()
    return built, statistics.median(times[1:])  # the first round is slower
