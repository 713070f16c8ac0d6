"""Checkpoints: save the state of a run after a round, and restore it.

    checkpoint.ROUND.CHECKSUM.safetensors     tensors of the server's state, such as `params/`; the two newest are kept
    memory/                                   memory of clients

The memory of a round is written before its checkpoint, and files that an earlier checkpoint needs are removed only when
a later one is complete: whenever a process is stopped, the newest complete checkpoint is a valid state of the run.

A checkpoint contains the identity of its run, its round, the names of the memory files that belong to it, and a
checksum of the record up to its round, so that a mismatch is detected.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.core.files import (
    TEMPORARY,
    RunError,
    newest_first,
    read_about,
    read_tensors,
    remove,
    set_aside,
    write_tensors,
)
from fedshift.core.types import Broadcast, Params
from fedshift.rounds.federation import State
from fedshift.rounds.uplink import NODE, split_memory, split_server
from fedshift.runs.identity import SETTINGS, RunIdentity
from fedshift.runs.memory import Files, StoredMemory, Version

KEPT = 2


class CheckpointAbout(NamedTuple):
    """Metadata of a checkpoint."""

    identity: RunIdentity
    number: int  # of finished rounds
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
        """Parse the metadata of a file; RunError if they are damaged or contradict the round in its name."""
        try:
            identity = RunIdentity.parse(about["identity"])
            memory = {int(client): Version(int(n), str(checksum)) for client, (n, checksum) in about["memory"].items()}
            saved = cls(identity, int(about["number"]), int(about["skipped"]), memory, str(about["record"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RunError(f"{path}: damaged: its metadata do not name a run and a round") from None
        if saved.number != int(path.name.split(".")[1]):
            raise RunError(f"{path}: is the checkpoint of round {saved.number}, which contradicts its file name")
        return saved


class Restored(NamedTuple):
    """State of a run from a checkpoint."""

    state: State
    memory: StoredMemory
    warnings: list[str]  # checkpoints that could not be used, and why


class Checkpoints:
    """Checkpoints of one run directory, which is listed once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest_first = newest_first(folder, "checkpoint")

    def save(self, state: State, memory: StoredMemory, identity: RunIdentity, record: str) -> None:
        memory.save(state.number)
        saved = CheckpointAbout(identity, state.number, state.skipped, memory.newest, record)
        path = write_tensors(self.folder, f"checkpoint.{state.number:06d}", _flat(state), saved.about())
        others = [entry for entry in self.newest_first if entry[1] != path]
        self.newest_first = [(state.number, path), *others]
        oldest = sorted({number for number, _ in self.newest_first})[-KEPT:][0]
        for number, old in others:
            if number < oldest:
                old.unlink(missing_ok=True)
        self.newest_first = [entry for entry in self.newest_first if entry[0] >= oldest]
        memory.prune(oldest)

    def identity(self) -> RunIdentity | None:
        """Identity in the newest readable checkpoint; None without one."""
        for _, path in self.newest_first:
            try:
                return CheckpointAbout.parse(path, read_about(path)).identity
            except RunError:
                continue
        return None

    def restore(
        self,
        like: State,
        memory_like: Params,
        identity: RunIdentity,
        records: Sequence[str],
        keep: bool,
        latest: float = math.inf,
    ) -> Restored | None:
        """Restore the newest valid checkpoint of this run up to round `latest`; None if there are no checkpoints.

        The state must have the tensors of `like`, and the client rule's part of memories those of `memory_like`.
        `records` are the checksums of the record after 0, 1, ... rounds. The record must reach the round of the
        checkpoint; a checkpoint whose checksum matches the record is preferred. Unusable checkpoints are renamed, not
        removed. If no usable one is left, RunError is raised and nothing is changed.
        """
        unusable: dict[Path, str] = {}
        disagreeing: list[tuple[Path, State, CheckpointAbout]] = []
        chosen: tuple[State, CheckpointAbout] | None = None
        for number, path in self.newest_first:
            if number > latest:
                continue
            try:
                if number >= len(records):
                    raise RunError(f"{path}: is later than the record, which ends at round {len(records) - 1}")
                state, saved = self._read(path, like, memory_like, identity)
            except RunError as problem:
                unusable[path] = str(problem)
                continue
            if saved.record == records[number]:
                chosen = state, saved
                break
            disagreeing.append((path, state, saved))
        warnings = list(unusable.values())
        if chosen is None and disagreeing:
            number = disagreeing[0][2].number
            warnings.append(f"{self.folder}: the record up to round {number} does not match the checkpoint")
            chosen = disagreeing[0][1:]
        elif chosen:
            for path, _, saved in disagreeing:
                warnings.append(f"{path}: the record up to round {saved.number} does not match this checkpoint")
                unusable[path] = warnings[-1]
        if chosen is None and unusable:
            raise RunError(
                f"{'; '.join(unusable.values())}; no usable checkpoint is left; start a new run in another folder "
                f"from {self.folder / SETTINGS}"
            )
        remove(self.folder, f"*{TEMPORARY}")
        if chosen is None:
            return None
        for other in unusable:
            set_aside(other)
        for number, path in self.newest_first:
            if number > latest:
                path.unlink(missing_ok=True)
        state, saved = chosen
        self.newest_first = [entry for entry in self.newest_first if entry[0] <= latest and entry[1] not in unusable]
        memory = StoredMemory.restored(self.folder / "memory", identity.run, saved.number, saved.memory, keep)
        return Restored(state, memory, warnings)

    def _read(
        self, path: Path, like: State, memory_like: Params, identity: RunIdentity
    ) -> tuple[State, CheckpointAbout]:
        """Read a checkpoint, and verify the checksums of it and of its memory files."""
        tensors, about = read_tensors(path)
        saved = CheckpointAbout.parse(path, about)
        if saved.identity.run != identity.run:
            raise RunError(f"{path}: belongs to another run (id {saved.identity.run} instead of {identity.run})")
        state = _state(path, tensors, like, saved)
        files = Files(self.folder / "memory", identity.run)
        try:
            for client, version in saved.memory.items():
                _check_memory(client, files.read(client, version), memory_like)
        except RunError as problem:
            raise RunError(f"{path}: cannot be used: {problem}") from None
        return state, saved


def stored_identity(folder: Path) -> RunIdentity | None:
    """Identity of the run in a folder: that of `identity.json`, or of the newest checkpoint if the file is damaged."""
    return RunIdentity.read(folder) or Checkpoints(folder).identity()


def _check_memory(client: int, memory: Params, like: Params) -> None:
    """Raise RunError if the client rule had another memory when it was stored."""
    if any(name.startswith(NODE) for name in memory):  # the memory itself is on the client's node
        return
    kept = split_memory(split_server(memory)[0])[0]
    if {name: x.shape for name, x in kept.items()} != {name: x.shape for name, x in like.items()}:
        raise RunError(
            f"the memory of client {client} has {_listed(kept)}, but that of the algorithm has {_listed(like)}; "
            "restore the code that the run was started with"
        )


def _listed(params: Params) -> str:
    """
    >>> import torch
    >>> _listed({}), _listed({"w": torch.zeros(2, 3)})
    ('no tensors', 'w (2, 3)')
    """
    names = [f"{name} {tuple(x.shape)}" for name, x in params.items()]
    return ", ".join(names[:3] + ["..."] * (len(names) > 3)) or "no tensors"


def _state(path: Path, tensors: Params, like: State, saved: CheckpointAbout) -> State:
    """State from the tensors of a checkpoint; RunError if they differ from those of `like` in name, shape or type."""
    expected = _flat(like)
    kinds, needed = ({name: (x.shape, x.dtype) for name, x in flat.items()} for flat in (tensors, expected))
    if kinds != needed:
        raise RunError(f"{path}: does not match the model and the algorithm in the settings")
    for name, x in tensors.items():
        if x.is_floating_point() and not x.isfinite().all() and expected[name].isfinite().all():
            raise RunError(f"{path}: {name} contains NaN or infinity")
    trees: dict[str, Params] = {"params": {}, "control": {}, "server": {}, "down": {}, "policy": {}}
    for name in expected:  # in the order of the model; files do not preserve it
        tree, _, key = name.partition("/")
        trees[tree][key] = tensors[name]
    out = Broadcast(trees["params"], trees["control"])
    return State(saved.number, out, trees["server"], saved.skipped, trees["down"], trees["policy"])


def _flat(state: State) -> Params:
    out, server, down, policy = state.out, state.server, state.down, state.policy
    trees = {"params": out.params, "control": out.control, "server": server, "down": down, "policy": policy}
    return {f"{name}/{key}": x for name, tree in trees.items() for key, x in tree.items()}
