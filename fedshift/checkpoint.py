"""The state of a run after a round, and the way back to it.

    checkpoint.ROUND.CHECKSUM.safetensors     tensors `params/`, `control/` and `server/`; the two newest are kept
    memory/                                   what clients remember

A round's memory is written before its checkpoint, and nothing an earlier checkpoint needs is removed before
a later one is complete: wherever a process is stopped, the newest whole checkpoint is a true state of the run.
"""

import json
from pathlib import Path
from typing import NamedTuple

from fedshift.federation import State
from fedshift.files import TEMPORARY, RunError, read_tensors, write_tensors
from fedshift.memory import Stored, check
from fedshift.types import Broadcast, Params

KEPT = 2


class Restored(NamedTuple):
    state: State
    memory: Stored
    warnings: list[str]  # checkpoints that could not be used, and why


class Checkpoints:
    """The checkpoints of one run directory, known by their names from one look into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = [(path.name.split(".")[1], path) for path in folder.glob("checkpoint.*.*.safetensors")]
        self.newest_first = sorted(((int(number), path) for number, path in found if number.isdecimal()), reverse=True)

    def save(self, state: State, memory: Stored) -> None:
        memory.save(state.number)
        about = {"number": state.number, "skipped": state.skipped, "remembered": len(memory)}
        stem = f"checkpoint.{state.number:06d}"
        path = write_tensors(self.folder, stem, _flat(state), {"state": json.dumps(about)})
        others = [one for one in self.newest_first if one[1] != path]
        self.newest_first = [(state.number, path), *others]
        oldest = sorted({number for number, _ in self.newest_first})[-KEPT:][0]
        for number, old in others:
            if number < oldest:
                old.unlink(missing_ok=True)
        self.newest_first = [one for one in self.newest_first if one[0] >= oldest]
        memory.prune(oldest)

    def forget(self, after: int) -> None:
        """Remove those of later rounds: the run is to go on from an earlier one."""
        for number, path in self.newest_first:
            if number > after:
                path.unlink(missing_ok=True)
        self.newest_first = [one for one in self.newest_first if one[0] <= after]

    def restore(self, like: State, recorded: int, keep: bool) -> Restored | None:
        """The newest whole checkpoint of the first `recorded` rounds; None when there is none.

        Those that cannot be used are put aside, not removed; when no other is left, nothing is changed.
        """
        for path in self.folder.glob(f"*{TEMPORARY}"):
            path.unlink()
        unusable: dict[Path, str] = {}
        for number, path in self.newest_first:
            try:
                if number > recorded:
                    raise RunError(f"{path}: the record ends before it, at round {recorded}")
                state, remembered = _read(path, like)
                check(self.folder / "memory", number, remembered)
            except RunError as problem:
                unusable[path] = str(problem)
                continue
            for other in unusable:
                other.rename(other.with_name(other.name + ".unusable"))
            self.newest_first = [one for one in self.newest_first if one[1] not in unusable]
            return Restored(state, Stored(self.folder / "memory", number, keep), list(unusable.values()))
        if unusable:
            raise RunError("; ".join(unusable.values()) + "; no checkpoint is left to go on from")
        return None


def _read(path: Path, like: State) -> tuple[State, int]:
    tensors, said = read_tensors(path)
    about = json.loads(said["state"])
    expected = _flat(like)
    if {name: x.shape for name, x in tensors.items()} != {name: x.shape for name, x in expected.items()}:
        raise RunError(f"{path}: is of another model or algorithm than the settings say")
    trees: dict[str, Params] = {"params": {}, "control": {}, "server": {}}
    for name in expected:  # in the order of the model, which a file does not keep
        tree, _, key = name.partition("/")
        trees[tree][key] = tensors[name]
    out = Broadcast(trees["params"], trees["control"])
    return State(about["number"], out, trees["server"], about["skipped"]), about["remembered"]


def _flat(state: State) -> Params:
    trees = {"params": state.out.params, "control": state.out.control, "server": state.server}
    return {f"{name}/{key}": x for name, tree in trees.items() for key, x in tree.items()}
