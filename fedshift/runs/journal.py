"""Journal of a recorded run: write rounds, checkpoints and the memory of clients, and restore them."""

import math
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from fedshift.core.files import RunError
from fedshift.core.tree import take
from fedshift.core.types import Params
from fedshift.data.datasets import load
from fedshift.experiment.settings import Experiment
from fedshift.rounds.federation import Federation, Outcome, State
from fedshift.runs.about import machine
from fedshift.runs.checkpoint import Checkpoints, stored_identity
from fedshift.runs.identity import IDENTITY, RunIdentity, data_id
from fedshift.runs.memory import StoredMemory
from fedshift.runs.record import MODEL, SETTINGS, RunFolder, finished, leftover


class Journal:
    """Folder of one run, its checkpoints and the memory of its clients; call `begin` or `restore` first."""

    memory: StoredMemory

    def __init__(self, path: Path, experiment: Experiment, fed: Federation, given: Sequence[str] = ()) -> None:
        """`given` are the names of arguments of the caller, like 'model', that cannot be rebuilt from the settings."""
        self.folder, self.experiment, self.fed = RunFolder(path), experiment, fed
        self.checkpoints = Checkpoints(self.folder.path)
        self.in_ram = experiment.record.memory == "ram"
        self.saved = 0  # round of the newest checkpoint
        self.identity = RunIdentity.of(experiment, fed, given)

    @property
    def session(self) -> str:
        """Id of the run, the same after each resume, by which remote nodes recognize it."""
        return self.identity.run

    def begin(self) -> State:
        """Initial state of a new run; RunError if its folder contains other files."""
        where = self.folder.path
        if self.folder.begun:
            raise taken(where)
        if foreign := self.folder.foreign:
            self.folder.leave()
            raise RunError(f"{where}: contains {foreign}, which does not belong to a run; choose an empty folder")
        if left := leftover(where):
            raise RunError(f"{where}: contains {left} of a run whose {SETTINGS} is missing; choose an empty folder")
        about = machine() | {"seed": str(self.experiment.seed), "data": self.fed.task.data.checksum}
        counts = {"clients": self.fed.partition.clients, "left_out": self.fed.partition.left_out}
        self.folder.begin(self.experiment, self.fed, about | {"shifted": self.fed.shifted} | counts, self.identity)
        self.memory = StoredMemory.restored(where / "memory", self.identity.run, keep=self.in_ram)
        return self.fed.start()

    def restore(self, tell: Callable[[str], None], latest: int | None = None) -> State:
        """State to resume from: that of the newest checkpoint up to round `latest`, or the initial state without one.

        Everything is checked before the folder is changed; RunError leaves it as it is.
        """
        where, state = self.folder.path, self.fed.start()
        stored = stored_identity(where)
        if stored is None:
            raise RunError(
                f"{where}: the run cannot be identified, because {IDENTITY} and all checkpoints are missing or "
                f"damaged, or were written by an earlier version of fedshift; start a new run in another folder from "
                f"{where / SETTINGS}"
            )
        stored.compare(self.identity, where)
        records = self.folder.records(self.experiment, self.fed)
        memory_like = self.fed.algorithm.client.init(take(self.fed.task.params, self.fed.task.trained))
        last = math.inf if latest is None else latest
        found = self.checkpoints.restore(state, memory_like, stored, records, self.in_ram, last)
        if found:
            state = found.state
            for warning in found.warnings:
                tell(f"{warning}; resuming from round {state.number}")
        else:
            self._check_start(stored, len(records) - 1, tell)
        if found and self.folder.model.exists():
            tell(f"{self.folder.model}: is damaged or not the final model of the run; it will be written again")
        self.identity = stored._replace(model="")
        if RunIdentity.read(where) is None:
            self.identity.write(where)
            tell(f"{where / IDENTITY}: was missing or damaged, and has been repaired")
        self.memory = found.memory if found else StoredMemory.restored(where / "memory", stored.run, keep=self.in_ram)
        for sentence in self.folder.rewind(state.number, self.experiment, self.fed):
            tell(sentence)
        self.saved = state.number
        return state

    def _check_start(self, stored: RunIdentity, recorded: int, tell: Callable[[str], None]) -> None:
        """Raise RunError if a run without a checkpoint cannot be repeated from round 0 with the same result."""
        where = self.folder.path
        if self.folder.model.exists():
            raise RunError(
                f"{where / MODEL}: is damaged or not the final model of the run, and there is no checkpoint; "
                f"start a new run in another folder from {where / SETTINGS}"
            )
        if stored.start != self.identity.start:
            raise RunError(
                f"{where}: there is no checkpoint, and the model's initial weights are not those the run was started "
                "with; pass the same model, or start a new run in another folder"
            )
        if recorded >= self.experiment.record.checkpoint:
            tell(f"{where}: the checkpoints are missing; resuming from round 0")

    def add(self, state: State, outcome: Outcome) -> None:
        """Record a round, and write a checkpoint if one is due."""
        self.folder.add(self.experiment, self.fed, outcome)
        if outcome.number % self.experiment.record.checkpoint == 0:
            self.checkpoint(state)
        elif not self.in_ram:
            self.memory.save(outcome.number)

    def checkpoint(self, state: State) -> None:
        """Write a checkpoint of this round unless there is one."""
        if self.saved != state.number:
            self.checkpoints.save(state, self.memory, self.identity, self.folder.record)
            self.saved = state.number

    @property
    def oldest(self) -> int:
        """Round of the oldest checkpoint, to which the run returns if later ones are damaged."""
        return min((number for number, _ in self.checkpoints.newest_first), default=0)

    def finish(self, model: Params) -> None:
        self.folder.finish(model, self.identity)

    def close(self) -> None:
        self.folder.close()


def require(folder: Path, experiment: Experiment, objects: Collection[str]) -> None:
    """Raise RunError if a run cannot be resumed with these settings and arguments; called before anything is built."""
    if (stored := stored_identity(folder)) is None:
        return
    if names := _missing(stored, objects):
        raise RunError(
            f"{folder}: this run was started in Python with its own {_listed(names)}; resume it there with "
            f"{_call(folder, names)}"
        )
    stored.compare_settings(experiment, folder, objects)


def require_settings(folder: Path, experiment: Experiment) -> None:
    """Raise RunError if a run, finished or not, was started with other settings."""
    if stored := stored_identity(folder):
        stored.compare_settings(experiment, folder, ())


def taken(folder: Path) -> RunError:
    """Error for a folder that already contains a run."""
    if finished(folder):
        return RunError(
            f"{folder}: already contains a finished run; `fedshift report {folder}` shows it, and a new run needs "
            "another folder"
        )
    if (stored := stored_identity(folder)) and (names := _missing(stored, ())):
        return RunError(f"{folder}: already contains a run; resume it in Python with {_call(folder, names)}")
    return RunError(f"{folder}: already contains a run; resume it with `fedshift resume {folder}`")


def _missing(stored: RunIdentity, objects: Collection[str]) -> list[str]:
    """Arguments that must be passed again to resume a run, except data that can be loaded by name."""
    return [name for name in stored.given if name not in objects and not (name == "data" and _found_by_name(stored))]


def _found_by_name(stored: RunIdentity) -> bool:
    try:
        settings = tomllib.loads(stored.settings)["data"]
        return data_id(load(settings["name"], settings.get("args", {}))) == stored.data
    except Exception:  # an invalid name may raise anything
        return False


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["model"]), _listed(["model", "data", "loss"])
    ('model', 'model, data and loss')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _call(folder: Path, names: Sequence[str]) -> str:
    return f"fedshift.resume({str(folder)!r}, {', '.join(f'{name}=...' for name in names)})"
