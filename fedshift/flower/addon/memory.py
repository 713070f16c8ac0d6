"""What a node remembers between rounds: an error to feed back, a control; in the state Flower keeps for it, or on disk.

Both ends have to agree on it. An upload may be lost or refused, a SuperNode may be restarted and its
state gone with it, a server may go back to a checkpoint. So a memory carries the round it was made
in; the server says which of a node's uploads it accepted last and what it could go back to; and the
node takes the memory of just that round, or says that it is lost.
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


class Told(NamedTuple):
    """What the server says to a node about its memory."""

    number: int  # of the round that is on
    session: str  # one training, across restarts of the server
    accepted: int  # the round of the node's last upload that was used; 0 for none, -1 for a node that is new to it
    saved: int  # a round the server may go back to

    def config(self) -> dict[str, int | str]:
        return {f"{OURS}{name}": value for name, value in self._asdict().items()}

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Told":
        """KeyError where nothing was told."""
        return cls(*(config[f"{OURS}{name}"] for name in cls._fields))


class Recalled(NamedTuple):
    memory: Params  # {} for a node that starts anew
    lost: bool  # whether the server counts on a memory that is not there


class NodeMemory:
    """The memories of one node, by whose and of which round; `name` is of what takes part, a client or a mod."""

    def __init__(self, context: Context, folder: Path | str | None = None) -> None:
        self.state = context.state
        self.folder = None if folder is None else Path(folder)
        self.owner = context.node_config.get("partition-id", context.node_id)

    def recall(self, name: str, told: Told) -> Recalled:
        """The memory the server counts on; those it does not, and will not again, are removed."""
        rounds = self._rounds(name, told.session)
        needed = max((number for number in rounds if number <= min(told.saved, told.accepted)), default=0)
        for number in rounds:
            if not needed <= number <= told.accepted:
                self._remove(name, told.session, number)
        if told.accepted <= 0:  # where a node is new to the server, but not the server to it, the node has a new id
            return Recalled({}, told.accepted < 0 and any(number < told.number for number in rounds))
        memory = self._read(name, told.session, told.accepted) if told.accepted in rounds else None
        return Recalled(memory or {}, memory is None)

    def keep(self, name: str, session: str, number: int, memory: Params) -> None:
        """What to remember should the upload of this round be used."""
        if self.folder is None:
            content = save({key: x.contiguous() for key, x in memory.items()})
            kept = ArrayRecord({KEY: Array("uint8", (len(content),), "safetensors", content)})
            self.state[f"{PREFIX}/{name}/{session}/{number}"] = kept
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove(name, session, number)
        write_tensors(self.folder, f"{self._stem(name, session)}.{number}", memory, {})

    def _rounds(self, name: str, session: str) -> list[int]:
        """The rounds there is a memory of."""
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
        except (RunError, IndexError):  # damaged, or gone meanwhile: lost
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
