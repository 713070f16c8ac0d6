"""The state of a run after a round, and the way back to it.

    checkpoint.ROUND.CHECKSUM.safetensors     tensors `params/`, `control/` and `server/`; the two newest are kept
    memory/                                   what clients remember

A round's memory is written before its checkpoint, and nothing an earlier checkpoint needs is removed before
a later one is complete: wherever a process is stopped, the newest whole checkpoint is a true state of the run.

A checkpoint names its run, its round, the files of clients' memory that belong to it, and a checksum of the record up
to its round. What does not agree with it is noticed.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.core.files import TEMPORARY, RunError, read_about, read_tensors, remove, write_tensors
from fedshift.core.types import Broadcast, Params
from fedshift.rounds.federation import State
from fedshift.runs.identity import SETTINGS, RunIdentity
from fedshift.runs.memory import Files, StoredMemory, Version

KEPT = 2


class CheckpointAbout(NamedTuple):
    """Metadata of a checkpoint."""

    identity: RunIdentity
    number: int  # rounds done
    skipped: int
    memory: dict[int, Version]  # by client
    record: str  # checksum of the record up to this round

    def about(self) -> dict[str, Any]:
        return {
            "identity": self.identity._asdict(),
            "number": self.number,
            "skipped": self.skipped,
            "memory": {str(client): list(version) for client, version in self.memory.items()},
            "record": self.record,
        }

    @classmethod
    def parse(cls, path: Path, about: dict[str, Any]) -> "CheckpointAbout":
        """RunError where it is not what a checkpoint says, or not of the round that the name says."""
        try:
            identity = RunIdentity.parse(about["identity"])
            memory = {int(client): Version(int(n), str(checksum)) for client, (n, checksum) in about["memory"].items()}
            saved = cls(identity, int(about["number"]), int(about["skipped"]), memory, str(about["record"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RunError(f"{path}: damaged: it does not say which run and round it is of") from None
        if saved.number != int(path.name.split(".")[1]):
            raise RunError(f"{path}: is the checkpoint of round {saved.number}, which is not the one its name says")
        return saved


class Restored(NamedTuple):
    state: State
    memory: StoredMemory
    warnings: list[str]  # checkpoints that could not be used, and why


class Checkpoints:
    """The checkpoints of one run directory, known by their names from one look into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = [
            (path.name.split(".")[1], path) for path in folder.glob("checkpoint.*.*.safetensors") if not path.is_dir()
        ]
        self.newest_first = sorted(((int(number), path) for number, path in found if number.isdecimal()), reverse=True)

    def save(self, state: State, memory: StoredMemory, identity: RunIdentity, record: str) -> None:
        memory.save(state.number)
        saved = CheckpointAbout(identity, state.number, state.skipped, memory.newest, record)
        path = write_tensors(self.folder, f"checkpoint.{state.number:06d}", _flat(state), saved.about())
        others = [one for one in self.newest_first if one[1] != path]
        self.newest_first = [(state.number, path), *others]
        oldest = sorted({number for number, _ in self.newest_first})[-KEPT:][0]
        for number, old in others:
            if number < oldest:
                old.unlink(missing_ok=True)
        self.newest_first = [one for one in self.newest_first if one[0] >= oldest]
        memory.prune(oldest)

    def identity(self) -> RunIdentity | None:
        """The run that the newest readable checkpoint is of."""
        for _, path in self.newest_first:
            try:
                return CheckpointAbout.parse(path, read_about(path)).identity
            except RunError:
                continue
        return None

    def restore(
        self, like: State, identity: RunIdentity, records: Sequence[str], keep: bool, latest: float = math.inf
    ) -> Restored | None:
        """The newest checkpoint up to round `latest` that is whole and of this run; None when there is none.

        `records` are the checksums of the record after 0, 1, ... rounds. A checkpoint is needed that the record
        reaches; one that the record agrees with is preferred. Checkpoints that cannot be used are put aside, not
        removed; when no other is left, nothing is changed.
        """
        unusable: dict[Path, str] = {}
        disagreeing: list[tuple[Path, State, CheckpointAbout]] = []
        chosen: tuple[State, CheckpointAbout] | None = None
        for number, path in self.newest_first:
            if number > latest:
                continue
            try:
                if number >= len(records):
                    raise RunError(f"{path}: the record ends before it, at round {len(records) - 1}")
                state, saved = self._read(path, like, identity)
            except RunError as problem:
                unusable[path] = str(problem)
                continue
            if saved.record == records[number]:
                chosen = state, saved
                break
            disagreeing.append((path, state, saved))
        warnings = list(unusable.values())
        if chosen is None and disagreeing:
            warnings.append(f"{self.folder}: the record is not what was written up to round {disagreeing[0][2].number}")
            chosen = disagreeing[0][1:]
        elif chosen:
            for path, _, saved in disagreeing:
                warnings.append(f"{path}: the record up to round {saved.number} is not what was written")
                unusable[path] = warnings[-1]
        if chosen is None and unusable:
            raise RunError(
                "; ".join(unusable.values()) + "; no usable checkpoint is left; start a new run in another "
                f"folder from {self.folder / SETTINGS}"
            )
        remove(self.folder, f"*{TEMPORARY}")
        if chosen is None:
            return None
        for other in unusable:
            other.rename(other.with_name(other.name + ".unusable"))
        for number, path in self.newest_first:
            if number > latest:
                path.unlink(missing_ok=True)
        state, saved = chosen
        self.newest_first = [one for one in self.newest_first if one[0] <= latest and one[1] not in unusable]
        memory = StoredMemory.restored(self.folder / "memory", identity.run, saved.number, saved.memory, keep)
        return Restored(state, memory, warnings)

    def _read(self, path: Path, like: State, identity: RunIdentity) -> tuple[State, CheckpointAbout]:
        """A checkpoint and what belongs to it, every byte of which is checked."""
        tensors, about = read_tensors(path)
        saved = CheckpointAbout.parse(path, about)
        if saved.identity.run != identity.run:
            raise RunError(f"{path}: is of another run (id {saved.identity.run}, not {identity.run})")
        state = _state(path, tensors, like, saved)
        files = Files(self.folder / "memory", identity.run)
        try:
            for client, version in saved.memory.items():
                files.read(client, version)
        except RunError as problem:
            raise RunError(f"{path}: cannot be used without {problem}") from None
        return state, saved


def known(folder: Path) -> RunIdentity | None:
    """Identity of the run in a folder: that of `identity.json`, or of the newest checkpoint if the file is damaged."""
    return RunIdentity.read(folder) or Checkpoints(folder).identity()


def _state(path: Path, tensors: Params, like: State, saved: CheckpointAbout) -> State:
    """RunError where the tensors are not those of a state like this one."""
    expected = _flat(like)
    kinds, needed = ({name: (x.shape, x.dtype) for name, x in flat.items()} for flat in (tensors, expected))
    if kinds != needed:
        raise RunError(f"{path}: is of another model or algorithm than the settings say")
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all() and expected[name].isfinite().all():
            raise RunError(f"{path}: {name} holds NaN or infinite values, which no round leaves there")
    trees: dict[str, Params] = {"params": {}, "control": {}, "server": {}}
    for name in expected:  # in the order of the model, which a file does not keep
        tree, _, key = name.partition("/")
        trees[tree][key] = tensors[name]
    return State(saved.number, Broadcast(trees["params"], trees["control"]), trees["server"], saved.skipped)


def _flat(state: State) -> Params:
    trees = {"params": state.out.params, "control": state.out.control, "server": state.server}
    return {f"{name}/{key}": x for name, tree in trees.items() for key, x in tree.items()}
