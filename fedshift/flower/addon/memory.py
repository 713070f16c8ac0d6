"""Memory of a node between rounds (error feedback, control), in the state that Flower keeps for it or on disk.

Server and node must agree on it, although an upload may be lost or rejected, a SuperNode may be restarted without its
state, and a server may resume from a checkpoint. Therefore each memory is labelled with the round of its upload. The
server sends the round of the node's last accepted upload and the oldest round it may resume from. The node uses the
memory of exactly that round, or reports that it is lost.

Flower gives a ClientApp that ends five seconds to return the state to its SuperNode, in one request
(`FORCE_EXIT_TIMEOUT_SECONDS`). A state that takes longer is lost, and the SuperNode later reports "ClientApp stopped
responding" for the message of the next round. Therefore large memories are files.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, Context
from safetensors.torch import load

from fedshift.core.files import RunError, make_folder, read_tensors, serialized, write_tensors
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import KEY, OURS

LOG = getLogger("flwr.fedshift")
PREFIX = "fedshift"
IN_STATE = 32_000_000  # bytes of memories in Flower's state; 30 MB were returned in 0.4 s, 100 MB in 2.5 to 2.9 s
OUTDATED = 30 * 86_400  # seconds after which a memory of another training is removed from the default folder


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
    """The memories of one node, by name (of a client or a mod), session and round.

    With a folder they are files, named after the node's partition-id, so that a node with a new id finds them. Without,
    they are in Flower's state while they are small, and otherwise in files of the default folder.
    """

    def __init__(self, context: Context, folder: Path | str | None = None) -> None:
        self.state, self.chosen = context.state, folder is not None
        self.folder = default_folder() if folder is None else Path(folder)
        self.owner = context.node_config.get("partition-id", context.node_id) if self.chosen else context.node_id

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
        size = sum(x.nbytes for x in memory.values())
        self._remove(name, session, number)
        stored, others = self._stored(name, session)
        # the next memory will be stored beside this one: space for two at least
        if not self.chosen and size + max(size, stored) + others <= IN_STATE:
            content = b"".join(serialized(memory))
            record = ArrayRecord({KEY: Array("uint8", (len(content),), "safetensors", content)})
            self.state[f"{PREFIX}/{name}/{session}/{number}"] = record
            return
        make_folder(self.folder, "state_dir")
        if not self.chosen and not self._files(f"{PREFIX}-{self.owner}-*-{_clean(session)}.*"):
            self._begin(size)
        write_tensors(self.folder, f"{self._stem(name, session)}.{number}", memory, {})

    def _begin(self, size: int) -> None:
        """Tidy the default folder, and report its use, before the first file of a training."""
        LOG.warning(
            "a memory of %d MB is too large for Flower's state of this node and is kept in files under %s; "
            "set state_dir to choose the folder",
            size / 1e6,
            self.folder,
        )
        for path in self._files(f"{PREFIX}-*.safetensors*"):
            with suppress(OSError):  # removed by another node in the meantime
                if path.stat().st_mtime < time.time() - OUTDATED:
                    path.unlink()

    def _stored(self, name: str, session: str) -> tuple[int, int]:
        """Bytes of the memories of other rounds, and of all other arrays, in Flower's state."""
        start, sizes = f"{PREFIX}/{name}/{session}/", [0, 0]
        for key, record in self.state.array_records.items():
            sizes[not key.startswith(start)] += sum(len(array.data) for array in record.values())
        return sizes[0], sizes[1]

    def _rounds(self, name: str, session: str) -> list[int]:
        """Rounds for which there is a memory."""
        start = f"{PREFIX}/{name}/{session}/"
        found = [key.removeprefix(start) for key in self.state if key.startswith(start)]
        start = f"{self._stem(name, session)}."
        found += [path.name.removeprefix(start).split(".")[0] for path in self._files(f"{start}*.safetensors")]
        return sorted({int(number) for number in found if number.isdecimal()})

    def _read(self, name: str, session: str, number: int) -> Params | None:
        record = self.state.array_records.get(f"{PREFIX}/{name}/{session}/{number}")
        if record is not None:
            return load(record[KEY].data)
        try:
            return read_tensors(self._files(f"{self._stem(name, session)}.{number}.*.safetensors")[0])[0]
        except (RunError, IndexError):  # damaged or deleted
            return None

    def _remove(self, name: str, session: str, number: int) -> None:
        self.state.pop(f"{PREFIX}/{name}/{session}/{number}", None)
        for path in self._files(f"{self._stem(name, session)}.{number}.*"):
            path.unlink(missing_ok=True)

    def _files(self, pattern: str) -> list[Path]:
        return list(self.folder.glob(pattern))

    def _stem(self, name: str, session: str) -> str:
        return _clean(f"{PREFIX}-{self.owner}-{name}-{session}")


def _clean(text: str) -> str:
    """Replace characters that have a meaning in a path or a pattern."""
    return re.sub(r"[^\w-]", "_", text)


def default_folder() -> Path:
    """Folder of large memories in Flower's folder on this machine."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / PREFIX
