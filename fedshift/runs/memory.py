"""Memory of clients between rounds (SCAFFOLD controls, errors of error feedback), in RAM or on disk.

Only clients that have trained have a memory. On disk it is one file per client and round,
`CLIENT.ROUND.CHECKSUM.safetensors`, whose metadata name its run, client and round. A checkpoint lists the files that
belong to it. Writing a round does not change files that an earlier checkpoint needs.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fedshift.core.files import TEMPORARY, RunError, read_tensors, remove, write_tensors
from fedshift.core.types import Params


class Version(NamedTuple):
    """Version of the memory of a client, stored in one file."""

    number: int  # the round it was written in
    checksum: str  # in the file name


class Files(NamedTuple):
    """Memory files of the clients of one run."""

    folder: Path
    run: str  # the id of the run

    def path(self, client: int, version: Version) -> Path:
        return self.folder / f"{client}.{version.number}.{version.checksum}.safetensors"

    def read(self, client: int, version: Version) -> Params:
        """Read a file; RunError if it is missing, damaged, or of another run, client or round."""
        path = self.path(client, version)
        memory, about = read_tensors(path)
        if about != self._about(client, version.number):
            raise RunError(f"{path}: is not the memory of client {client} after round {version.number} of this run")
        return memory

    def write(self, client: int, number: int, memory: Params) -> Version:
        path = write_tensors(self.folder, f"{client}.{number}", memory, self._about(client, number))
        return Version(number, path.name.split(".")[2])

    def found(self) -> Iterator[tuple[int, Version]]:
        """Clients and versions according to the file names."""
        for path in list(self.folder.glob("*.*.*.safetensors")):
            client, number, checksum = path.name.removesuffix(".safetensors").split(".", 2)
            if client.isdecimal() and number.isdecimal() and str(int(client)) == client and str(int(number)) == number:
                yield int(client), Version(int(number), checksum)

    def _about(self, client: int, number: int) -> dict[str, int | str]:
        return {"run": self.run, "client": client, "round": number}


class StoredMemory:
    """Memory in files, and with `keep` also in RAM."""

    def __init__(self, folder: Path, run: str, keep: bool = True) -> None:
        self.files, self.keep = Files(folder, run), keep
        self.held: dict[int, Params] = {}
        self.changed: set[int] = set()
        self.newest: dict[int, Version] = {}  # by client
        self.older: dict[int, list[Version]] = {}  # by client, in the order of rounds

    @classmethod
    def restored(
        cls, folder: Path, run: str, number: int = 0, needed: Mapping[int, Version] | None = None, keep: bool = True
    ) -> "StoredMemory":
        """Memory that the checkpoint of round `number` needs; later files are removed."""
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
        if memory or client in self.held or client in self.newest:
            self.held[client] = memory
            self.changed.add(client)

    def save(self, number: int) -> None:
        """Write the memory that changed since the last call."""
        if self.changed:
            try:
                self.files.folder.mkdir(exist_ok=True)
            except OSError as problem:
                raise RunError(f"{self.files.folder}: cannot be created: {problem.strerror}") from None
        for client in sorted(self.changed):
            version = self.files.write(client, number, self.held[client])
            if client in self.newest:
                self.older.setdefault(client, []).append(self.newest[client])
            self.newest[client] = version
        self.changed.clear()
        if not self.keep:
            self.held.clear()

    def prune(self, number: int) -> None:
        """Remove files that no checkpoint from round `number` on needs; looks only at clients with several files."""
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
