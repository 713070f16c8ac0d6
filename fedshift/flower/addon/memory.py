"""Memory of a node between rounds (error feedback, control), in the state that Flower keeps for it or on disk.

Server and node must agree on it, although an upload may be lost or rejected, a SuperNode may be restarted without its
state, and a server may resume from a checkpoint. Therefore each memory is labelled with the round of its upload. The
server sends the round of the node's last accepted upload and the oldest round it may resume from. The node uses the
memory of exactly that round, or reports that it is lost.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Context
from safetensors.torch import load, save

from fedshift.core.files import RunError, read_tensors, write_tensors
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import KEY, OURS

PREFIX = "fedshift"


class RoundInfo(NamedTuple):
    """Round and memory information that the server sends to a node."""

    number: int  # current round
    session: str  # identifies one training, across restarts of the server
    accepted: int  # round of the node's last accepted upload; 0 for none, -1 if the server does not know the node
    saved: int  # oldest round that the server may resume from

    def config(self) -> dict[str, int | str]:
        return {f"{OURS}{name}": value for name, value in self._asdict().items()}

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "RoundInfo":
        """Read the values from a config; KeyError if they are missing."""
        return cls(*(config[f"{OURS}{name}"] for name in cls._fields))


class Recalled(NamedTuple):
    memory: Params  # {} for a node without a memory
    lost: bool  # True if the server expects a memory that is missing


class NodeMemory:
    """The memories of one node, by name (of a client or a mod), session and round."""

    def __init__(self, context: Context, folder: Path | str | None = None) -> None:
        self.state = context.state
        self.folder = None if folder is None else Path(folder)
        self.owner = context.node_config.get("partition-id", context.node_id)

    def recall(self, name: str, info: RoundInfo) -> Recalled:
        """Return the memory that the server expects; remove those that it cannot expect any more."""
        rounds = self._rounds(name, info.session)
        needed = max((number for number in rounds if number <= min(info.saved, info.accepted)), default=0)
        for number in rounds:
            if not needed <= number <= info.accepted:
                self._remove(name, info.session, number)
        if info.accepted <= 0:  # a node with memories that the server does not know has a new id
            return Recalled({}, info.accepted < 0 and any(number < info.number for number in rounds))
        memory = self._read(name, info.session, info.accepted) if info.accepted in rounds else None
        return Recalled(memory or {}, memory is None)

    def keep(self, name: str, session: str, number: int, memory: Params) -> None:
        """Store the memory that belongs to the upload of this round."""
        if self.folder is None:
            content = save({key: x.contiguous() for key, x in memory.items()})
            record = ArrayRecord({KEY: Array("uint8", (len(content),), "safetensors", content)})
            self.state[f"{PREFIX}/{name}/{session}/{number}"] = record
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove(name, session, number)
        write_tensors(self.folder, f"{self._stem(name, session)}.{number}", memory, {})

    def _rounds(self, name: str, session: str) -> list[int]:
        """Rounds for which there is a memory."""
        if self.folder is None:
            start = f"{PREFIX}/{name}/{session}/"
            return sorted(int(key.removeprefix(start)) for key in self.state if key.startswith(start))
        start = f"{self._stem(name, session)}."
        found = [path.name.removeprefix(start).split(".")[0] for path in self._files(f"{start}*.safetensors")]
        return sorted({int(number) for number in found if number.isdecimal()})

    def _read(self, name: str, session: str, number: int) -> Params | None:
        if self.folder is None:
            return load(self.state.array_records[f"{PREFIX}/{name}/{session}/{number}"][KEY].data)
        try:
            return read_tensors(self._files(f"{self._stem(name, session)}.{number}.*.safetensors")[0])[0]
        except (RunError, IndexError):  # damaged or deleted
            return None

    def _remove(self, name: str, session: str, number: int) -> None:
        if self.folder is None:
            self.state.pop(f"{PREFIX}/{name}/{session}/{number}", None)
            return
        for path in self._files(f"{self._stem(name, session)}.{number}.*"):
            path.unlink(missing_ok=True)

    def _files(self, pattern: str) -> list[Path]:
        return list(self.folder.glob(pattern)) if self.folder else []

    def _stem(self, name: str, session: str) -> str:
        return re.sub(r"[^\w-]", "_", f"{PREFIX}-{self.owner}-{name}-{session}")
