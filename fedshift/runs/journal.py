"""What a recorded run writes as it goes: a line a round, checkpoints, clients' memory; and the way back in."""

import math
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from fedshift.core.files import RunError
from fedshift.core.types import Params
from fedshift.data.datasets import load
from fedshift.experiment.settings import Experiment
from fedshift.rounds.federation import Federation, Outcome, State
from fedshift.runs.about import machine
from fedshift.runs.checkpoint import Checkpoints, known
from fedshift.runs.identity import IDENTITY, RunIdentity, data_id
from fedshift.runs.memory import StoredMemory
from fedshift.runs.record import MODEL, SETTINGS, RunFolder, finished, remains


class Journal:
    """The folder of one run, its checkpoints and the memory of its clients; begun or restored before it is used."""

    memory: StoredMemory

    def __init__(self, path: Path, experiment: Experiment, fed: Federation, given: Sequence[str] = ()) -> None:
        """`given` are the arguments of the caller, like 'model', that the settings cannot rebuild."""
        self.folder, self.experiment, self.fed = RunFolder(path), experiment, fed
        self.checkpoints = Checkpoints(self.folder.path)
        self.in_ram = experiment.record.memory == "ram"
        self.saved = 0  # the last round there is a checkpoint of
        self.identity = RunIdentity.of(experiment, fed, given)

    @property
    def session(self) -> str:
        """One run, however often it is stopped: nodes elsewhere know it by this."""
        return self.identity.run

    def begin(self) -> State:
        """The state of a new run, in a folder that is nobody else's."""
        where = self.folder.path
        if self.folder.begun:
            raise taken(where)
        if foreign := self.folder.foreign:
            self.folder.leave()
            raise RunError(f"{where}: holds {foreign}, which is not a run's; choose an empty folder")
        if left := remains(where):
            raise RunError(f"{where}: holds {left} of a run whose {SETTINGS} is missing; choose an empty folder")
        about = machine() | {"seed": str(self.experiment.seed), "data": self.fed.task.data.checksum}
        self.folder.begin(self.experiment, self.fed, about | {"shifted": self.fed.shifted}, self.identity)
        self.memory = StoredMemory.restored(where / "memory", self.identity.run, keep=self.in_ram)
        return self.fed.start()

    def restore(self, tell: Callable[[str], None], latest: int | None = None) -> State:
        """The state to resume from: that of the newest checkpoint up to the latest, or the first where there is none.

        All is checked before anything is changed: RunError leaves the folder as it was.
        """
        where, state = self.folder.path, self.fed.start()
        was = known(where)
        if was is None:
            raise RunError(
                f"{where}: which run this is cannot be told, because {IDENTITY} and all checkpoints are missing or "
                f"damaged, or were written by an earlier version of fedshift; start a new run in another folder from "
                f"{where / SETTINGS}"
            )
        was.compare(self.identity, where)
        records = self.folder.records(self.experiment, self.fed)
        found = self.checkpoints.restore(state, was, records, self.in_ram, math.inf if latest is None else latest)
        if found:
            state = found.state
            for warning in found.warnings:
                tell(f"{warning}; resuming from round {state.number}")
        else:
            self._check_start(was, len(records) - 1, tell)
        if found and self.folder.model.exists():
            tell(f"{self.folder.model}: is damaged or not the model that the run ended with; it is made again")
        self.identity = was._replace(model="")
        if RunIdentity.read(where) is None:
            self.identity.write(where)
            tell(f"{where / IDENTITY}: was missing or damaged, and is repaired")
        self.memory = found.memory if found else StoredMemory.restored(where / "memory", was.run, keep=self.in_ram)
        for sentence in self.folder.rewind(state.number, self.experiment, self.fed):
            tell(sentence)
        self.saved = state.number
        return state

    def _check_start(self, was: RunIdentity, recorded: int, tell: Callable[[str], None]) -> None:
        """RunError where a run without a checkpoint cannot start again from round 0 to the same result."""
        where = self.folder.path
        if self.folder.model.exists():
            raise RunError(
                f"{where / MODEL}: is damaged or not the model that the run ended with, and there is no checkpoint; "
                f"start a new run in another folder from {where / SETTINGS}"
            )
        if was.start != self.identity.start:
            raise RunError(
                f"{where}: there is no checkpoint, and the model's first weights are not those the run was started "
                "with; give it the same model, or start a new run in another folder"
            )
        if recorded >= self.experiment.record.checkpoint:
            tell(f"{where}: the checkpoints are missing; resuming from round 0")

    def add(self, state: State, outcome: Outcome) -> None:
        """A round: its line, and a checkpoint when it is time for one."""
        self.folder.add(self.experiment, self.fed, outcome)
        if outcome.number % self.experiment.record.checkpoint == 0:
            self.checkpoint(state)
        elif not self.in_ram:
            self.memory.save(outcome.number)

    def checkpoint(self, state: State) -> None:
        """Make this round one to go on from, if it is not."""
        if self.saved != state.number:
            self.checkpoints.save(state, self.memory, self.identity, self.folder.record)
            self.saved = state.number

    @property
    def oldest(self) -> int:
        """The round of the oldest checkpoint that is kept: the run may go back to it should a later one be damaged."""
        return min((number for number, _ in self.checkpoints.newest_first), default=0)

    def finish(self, model: Params) -> None:
        self.folder.finish(model, self.identity)

    def close(self) -> None:
        self.folder.close()


def require(folder: Path, experiment: Experiment, own: Collection[str]) -> None:
    """RunError where a run cannot resume with these settings and the arguments `own`, before anything is built."""
    if (was := known(folder)) is None:
        return
    if names := _missing(was, own):
        raise RunError(
            f"{folder}: this run was started in Python with its own {_listed(names)}; resume it there with "
            f"{_call(folder, names)}"
        )
    was.compare_settings(experiment, folder, own)


def require_settings(folder: Path, experiment: Experiment) -> None:
    """RunError where a run, finished or not, was started with other settings than these."""
    if was := known(folder):
        was.compare_settings(experiment, folder, ())


def taken(folder: Path) -> RunError:
    """Error for a folder that already contains a run."""
    if finished(folder):
        return RunError(
            f"{folder}: already contains a finished run; `fedshift report {folder}` shows it, and a new run needs "
            "another folder"
        )
    if (was := known(folder)) and (names := _missing(was, ())):
        return RunError(f"{folder}: already contains a run; resume it in Python with {_call(folder, names)}")
    return RunError(f"{folder}: already contains a run; resume it with `fedshift resume {folder}`")


def _missing(was: RunIdentity, own: Collection[str]) -> list[str]:
    """Arguments that a run needs again, as objects; not data that are found by their name."""
    return [name for name in was.given if name not in own and not (name == "data" and _found_by_name(was))]


def _found_by_name(was: RunIdentity) -> bool:
    try:
        return data_id(load(tomllib.loads(was.settings)["data"]["name"])) == was.data
    except Exception:  # whatever a name that stands for nothing leads to
        return False


def _listed(names: Sequence[str]) -> str:
    """
    >>> _listed(["model"]), _listed(["model", "data", "loss"])
    ('model', 'model, data and loss')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _call(folder: Path, names: Sequence[str]) -> str:
    return f"fedshift.resume({str(folder)!r}, {', '.join(f'{name}=...' for name in names)})"
