"""What a recorded run writes as it goes: a line a round, checkpoints, clients' memory; and the way back in."""

import secrets
from collections.abc import Callable
from pathlib import Path

from fedshift.about import machine
from fedshift.checkpoint import Checkpoints
from fedshift.federation import Federation, Outcome, State
from fedshift.files import RunError
from fedshift.memory import Stored
from fedshift.record import Folder, about
from fedshift.settings import Experiment
from fedshift.types import Params


class Journal:
    """The folder of one run, its checkpoints and the memory of its clients; begun or restored before it is used."""

    memory: Stored

    def __init__(self, path: Path, experiment: Experiment, fed: Federation) -> None:
        self.folder, self.experiment, self.fed = Folder(path), experiment, fed
        self.checkpoints = Checkpoints(self.folder.path)
        self.in_ram = experiment.record.memory == "ram"
        self.saved = 0  # the last round there is a checkpoint of
        self.session = secrets.token_hex(8)  # one run, however often it is stopped: nodes elsewhere know it by this

    def begin(self) -> State:
        """The state of a new run, in a folder that is nobody else's."""
        where = self.folder.path
        if self.folder.begun:
            raise RunError(f"{where}: holds a run already; `fedshift resume {where}` goes on with it")
        if foreign := self.folder.foreign:
            self.folder.leave()
            raise RunError(f"{where}: holds {foreign}, which is not a run's; choose an empty folder")
        known = machine() | {"seed": str(self.experiment.seed), "data": self.fed.task.data.checksum}
        self.folder.begin(self.experiment, self.fed, known | {"session": self.session, "shifted": self.fed.shifted})
        self.memory = Stored(where / "memory", 0, self.in_ram)
        return self.fed.start()

    def restore(self, tell: Callable[[str], None], latest: int | None = None) -> State:
        """The state to go on from: that of the newest checkpoint up to the latest, or the first where there is none."""
        where, state = self.folder.path, self.fed.start()
        known = about(where)
        self.session = known.get("session", self.session)
        if known.get("data", "") not in ("", self.fed.task.data.checksum):
            raise RunError(f"{where}: was run with other data than it is given now")
        if latest is not None:
            self.checkpoints.forget(latest)
        found = self.checkpoints.restore(state, self.folder.recorded(), self.in_ram)
        if found:
            state = found.state
            for warning in found.warnings:
                tell(f"{warning}; going on from round {state.number}")
        self.memory = found.memory if found else Stored(where / "memory", 0, self.in_ram)
        self.folder.rewind(state.number)
        self.saved = state.number
        return state

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
            self.checkpoints.save(state, self.memory)
            self.saved = state.number

    @property
    def oldest(self) -> int:
        """The round of the oldest checkpoint that is kept: the run may go back to it should a later one be damaged."""
        return min((number for number, _ in self.checkpoints.newest_first), default=0)

    def finish(self, model: Params) -> None:
        self.folder.finish(model)

    def close(self) -> None:
        self.folder.close()
