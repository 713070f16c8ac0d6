"""Files that are there whole or not at all: written beside their place, then renamed into it.

A name ends in the checksum of its content, so a file says by itself whether it is what was written.
"""

import json
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Self

from safetensors.torch import load, save

from fedshift.names import printable
from fedshift.types import Params

try:
    import fcntl
except ImportError:  # not on Windows: there, two processes in one folder are not told apart
    fcntl = None  # type: ignore[assignment]

TEMPORARY, LOCK = ".unfinished", ".lock"
_held: set[Path] = set()  # folders this process writes to: a lock does not keep a process from itself


class RunError(RuntimeError):
    """What went wrong with the files of a run, in a sentence."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, keep="\n"))  # the end of a log may follow the sentence


class Lock:
    """A folder, made if it is not there, that nobody else writes to until this is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if self.path in _held:  # before the file is opened: closing it again would give up the lock
            raise RunError(f"{path}: another run is writing to this folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path / LOCK, "a")  # noqa: SIM115 (held until close)
        except OSError as problem:
            raise RunError(f"{path}: cannot be written to: {problem.strerror or problem}") from None
        try:
            if fcntl:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise RunError(f"{path}: another run is writing to this folder") from None
        _held.add(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.file.closed:  # once: by the second time the folder may be another run's
            self.file.close()
            _held.discard(self.path)


def write(path: Path, content: bytes, sync: bool = False) -> None:
    """The whole content or a RunError; whatever was at the path stays until the new content is complete."""
    beside = path.with_name(path.name + TEMPORARY)
    try:
        with open(beside, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as problem:
        with suppress(OSError):  # a folder that cannot be written to has nothing to remove
            beside.unlink()
        raise RunError(f"{path}: cannot be written: {problem.strerror or problem}") from None


def write_tensors(folder: Path, stem: str, params: Params, about: dict[str, str]) -> Path:
    """folder/stem.CHECKSUM.safetensors"""
    content = save({name: x.cpu().contiguous() for name, x in params.items()}, about)
    path = folder / f"{stem}.{zlib.crc32(content):08x}.safetensors"
    write(path, content)
    return path


def read_tensors(path: Path) -> tuple[Params, dict[str, str]]:
    """What `write_tensors` wrote; a file does not keep the order of tensors."""
    content = read_content(path)
    (length,) = struct.unpack_from("<Q", content)
    about = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return load(content), about


def read_content(path: Path) -> bytes:
    """What was written to a file with a checksum in its name; RunError when it is something else by now."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise RunError(f"{path}: cannot be read: {problem.strerror or problem}") from None
    if f"{zlib.crc32(content):08x}" != path.name.split(".")[-2]:
        raise RunError(f"{path}: damaged: its content does not match its checksum")
    return content
