"""What clients remember between rounds (a SCAFFOLD control, an error to feed back), in RAM or on disk.

Only clients that have trained have a memory. On disk it is one file per client and round,
`CLIENT.ROUND.CHECKSUM.safetensors`, which also names its run, client and round inside. A checkpoint lists the files
that belong to it. Writing a round never touches what an earlier checkpoint needs.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fedshift.core.files import TEMPORARY, RunError, read_tensors, remove, write_tensors
from fedshift.core.types import Params


class Version(NamedTuple):
    """File that holds the memory of a client."""

    number: int  # the round it was written in
    checksum: str  # in its name


class Files(NamedTuple):
    """The memory of the clients of one run."""

    folder: Path
    run: str  # the id of the run

    def path(self, client: int, version: Version) -> Path:
        return self.folder / f"{client}.{version.number}.{version.checksum}.safetensors"

    def read(self, client: int, version: Version) -> Params:
        """RunError where the file is missing, damaged, or of something else."""
        path = self.path(client, version)
        memory, about = read_tensors(path)
        if about != self._about(client, version.number):
            raise RunError(f"{path}: is not the memory of client {client} after round {version.number} of this run")
        return memory

    def write(self, client: int, number: int, memory: Params) -> Version:
        path = write_tensors(self.folder, f"{client}.{number}", memory, self._about(client, number))
        return Version(number, path.name.split(".")[2])

    def found(self) -> Iterator[tuple[int, Version]]:
        """Clients and versions, by the names of files."""
        for path in list(self.folder.glob("*.*.*.safetensors")):
            client, number, checksum = path.name.removesuffix(".safetensors").split(".", 2)
            if client.isdecimal() and number.isdecimal() and str(int(client)) == client and str(int(number)) == number:
                yield int(client), Version(int(number), checksum)

    def _about(self, client: int, number: int) -> dict[str, int | str]:
        return {"run": self.run, "client": client, "round": number}


class StoredMemory:
    """In files, and in RAM as well where `keep` says so."""

    def __init__(self, folder: Path, run: str, keep: bool = True) -> None:
        self.files, self.keep = Files(folder, run), keep
        self.held: dict[int, Params] = {}
        self.changed: set[int] = set()
        self.newest: dict[int, Version] = {}  # by client
        self.older: dict[int, list[Version]] = {}  # by client, in the order of rounds, where there are any

    @classmethod
    def restored(
        cls, folder: Path, run: str, number: int = 0, needed: Mapping[int, Version] | None = None, keep: bool = True
    ) -> "StoredMemory":
        """The memory that the checkpoint of round `number` needs; what was written later is removed."""
        memory = cls(folder, run, keep)
        memory.newest = dict(needed or {})
        remove(folder, f"*{TEMPORARY}")
        for client, version in sorted(memory.files.found()):
            if version.number > number:
                memory.files.path(client, version).unlink()
            elif client in memory.newest and version.number < memory.newest[client].number:
                memory.older.setdefault(client, []).append(version)
        return memory

    def get(self, client: int) -> Params:
        if client in self.held:
            return self.held[client]
        if client not in self.newest:
            return {}
        memory = self.files.read(client, self.newest[client])
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
                self.files.folder.mkdir(exist_ok=True)
            except OSError as problem:
                raise RunError(f"{self.files.folder}: cannot be made: {problem.strerror}") from None
        for client in sorted(self.changed):
            version = self.files.write(client, number, self.held[client])
            if client in self.newest:
                self.older.setdefault(client, []).append(self.newest[client])
            self.newest[client] = version
        self.changed.clear()
        if not self.keep:
            self.held.clear()

    def prune(self, number: int) -> None:
        """Remove what no checkpoint from round `number` on needs; costs clients with several files, not all."""
        for client, versions in list(self.older.items()):
            needed = [version for version in [*versions, self.newest[client]] if version.number <= number][-1:]
            kept = [version for version in versions if version.number > number or version in needed]
            for version in versions:
                if version not in kept:
                    self.files.path(client, version).unlink(missing_ok=True)
            if kept:
                self.older[client] = kept
            else:
                del self.older[client]
