"""What clients remember between rounds (a SCAFFOLD control, an error to feed back), in RAM or on disk.

Only clients that have trained have a memory. On disk it is one file a client and round,
`CLIENT.ROUND.CHECKSUM.safetensors`: the newest that is not newer than a checkpoint belongs to it, so
writing a round never touches what an earlier checkpoint needs.
"""

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load

from fedshift.files import TEMPORARY, RunError, read_content, write_tensors
from fedshift.types import Params


class Ram:
    """Without files: forgotten with the process."""

    def __init__(self) -> None:
        self.held: dict[int, Params] = {}

    def get(self, client: int) -> Params:
        return self.held.get(client, {})

    def put(self, client: int, memory: Params) -> None:
        if memory:
            self.held[client] = memory


class Stored:
    """In files, and in RAM as well where `keep` says so."""

    def __init__(self, folder: Path, number: int = 0, keep: bool = True) -> None:
        """The memory as it was after round `number`; what was written later is removed."""
        self.folder, self.keep = folder, keep
        self.held: dict[int, Params] = {}
        self.changed: set[int] = set()
        self.files: dict[int, dict[int, Path]] = {}  # client -> round -> file
        self.several: set[int] = set()  # clients with more than one file: a round costs its cohort, not all who trained
        for path in folder.glob(f"*{TEMPORARY}"):
            path.unlink()
        for client, written, path in _found(folder):
            if written > number:
                path.unlink()
            else:
                self._keep(client, written, path)

    def __len__(self) -> int:
        """Clients that remember something."""
        return len(self.files) + sum(client not in self.files for client in self.changed)

    def get(self, client: int) -> Params:
        if client in self.held:
            return self.held[client]
        if client not in self.files:
            return {}
        versions = self.files[client]
        memory = load(read_content(versions[max(versions)]))
        if self.keep:
            self.held[client] = memory
        return memory

    def put(self, client: int, memory: Params) -> None:
        if memory:
            self.held[client] = memory
            self.changed.add(client)

    def save(self, number: int) -> None:
        """Write what changed since the last time."""
        if self.changed:
            try:
                self.folder.mkdir(exist_ok=True)
            except OSError as problem:
                raise RunError(f"{self.folder}: cannot be made: {problem.strerror}") from None
        for client in sorted(self.changed):
            path = write_tensors(self.folder, f"{client}.{number}", self.held[client], {})
            self._keep(client, number, path)
        self.changed.clear()
        if not self.keep:
            self.held.clear()

    def prune(self, number: int) -> None:
        """Remove what no checkpoint from round `number` on needs."""
        for client in list(self.several):
            versions = self.files[client]
            for old in sorted(written for written in versions if written <= number)[:-1]:
                versions.pop(old).unlink(missing_ok=True)
            if len(versions) == 1:
                self.several.discard(client)

    def _keep(self, client: int, number: int, path: Path) -> None:
        versions = self.files.setdefault(client, {})
        versions[number] = path
        if len(versions) > 1:
            self.several.add(client)


def check(folder: Path, number: int, remembered: int) -> None:
    """RunError where the memory of so many clients after round `number` is not there whole; changes nothing."""
    newest: dict[int, tuple[int, Path]] = {}
    for client, written, path in _found(folder):
        if written <= number:
            newest[client] = max(newest.get(client, (written, path)), (written, path))
    if len(newest) != remembered:
        raise RunError(f"{folder}: the memory of {len(newest)} clients is there, of {remembered} is needed")
    for _, path in newest.values():
        read_content(path)


def _found(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Client, round and file."""
    for path in list(folder.glob("*.*.*.safetensors")):
        client, written = path.name.split(".")[:2]
        if client.isdecimal() and written.isdecimal():
            yield int(client), int(written), path
