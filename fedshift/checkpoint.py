"""The state of a run after a round, and the way back to it.

    checkpoint.ROUND.CHECKSUM.safetensors     tensors `params/`, `control/` and `server/`; the two newest are kept
    memory/                                   what clients remember

A round's memory is written before its checkpoint, and nothing an earlier checkpoint needs is removed before
a later one is complete: wherever a process is stopped, the newest whole checkpoint is a true state of the run.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load

from fedshift.files import TEMPORARY, RunError, Sync, read_content, write_tensors
from fedshift.loop import State
from fedshift.memory import Stored
from fedshift.types import Broadcast, Params

KEPT = 2


class Restored(NamedTuple):
    state: State
    memory: Stored
    warnings: list[str]  # checkpoints that could not be used, and why


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sync = folder, Sync()

    def save(self, state: State, memory: Stored) -> None:
        memory.save(state.number)
        about = {"number": state.number, "skipped": state.skipped, "remembered": len(memory)}
        stem = f"checkpoint.{state.number:06d}"
        write_tensors(self.folder, stem, _flat(state), {"state": json.dumps(about)}, self.sync.due())
        numbers = [number for number, _ in self.newest_first()]
        for number, path in self.newest_first():
            if number not in numbers[:KEPT]:
                path.unlink(missing_ok=True)
        memory.prune(numbers[:KEPT][-1])

    def restore(self, like: State, recorded: int, keep: bool) -> Restored | None:
        """The newest whole checkpoint of the first `recorded` rounds; None when there is none.

        One that cannot be used is put aside, not removed.
        """
        for path in self.folder.glob(f"*{TEMPORARY}"):
            path.unlink()
        warnings: list[str] = []
        for number, path in list(self.newest_first()):
            try:
                if number > recorded:
                    raise RunError(f"{path}: the record ends before it, at round {recorded}")
                state, remembered = _read(path, like)
                memory = Stored(self.folder / "memory", number, keep)
                if len(memory) != remembered:
                    seen = f"the memory of {len(memory)} clients is there, of {remembered} is needed"
                    raise RunError(f"{self.folder / 'memory'}: {seen}")
                memory.verify()
            except RunError as problem:
                warnings.append(str(problem))
                path.rename(path.with_name(path.name + ".unusable"))
                continue
            return Restored(state, memory, warnings)
        if warnings:
            raise RunError("; ".join(warnings) + "; no checkpoint is left to go on from")
        return None

    def newest_first(self) -> Iterator[tuple[int, Path]]:
        found = [(int(path.name.split(".")[1]), path) for path in self.folder.glob("checkpoint.*.safetensors")]
        return iter(sorted(found, reverse=True))


def _read(path: Path, like: State) -> tuple[State, int]:
    content = read_content(path)
    (length,) = struct.unpack_from("<Q", content)
    about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["state"])
    tensors = load(content)
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
