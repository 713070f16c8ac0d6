"""Atomic files: written under a temporary name, then renamed.

Files of tensors contain a digest of all their bytes in their metadata, and its first digits in their name, so that
damage is detected from the file alone.
"""

import errno
import hashlib
import json
import os
import platform
import struct
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedshift.core.names import printable
from fedshift.core.types import Params

try:
    import fcntl
except ImportError:  # not on Windows, where two processes in one folder are not detected
    fcntl = None  # type: ignore[assignment]

TEMPORARY, LOCK = ".unfinished", ".lock"
METADATA = "fedshift"  # one key: the order of several keys varies
DIGEST, NAMED = 32, 8  # hexadecimal digits of a digest, and of its part in a file's name
BLANK = b"0" * DIGEST  # placeholder of the digest while it is computed
LENGTH = struct.Struct("<Q")  # of the header, at the start of a safetensors file
Part = bytes | memoryview  # of the content of a file
_held: set[Path] = set()  # folders that this process writes to: a lock does not exclude its own process


class RunError(RuntimeError):
    """Error about the files of a run."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text, keep="\n"))  # the end of a log may follow the message


def no_link(path: str, flags: int) -> int:
    """Opener for files that are appended to; it does not follow symbolic links."""
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{os.path.basename(path)} is a symbolic link, which is not followed") from None
        raise


class Lock:
    """Exclusive access to a folder, which is created if missing, until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if self.path in _held:  # before the file is opened: closing it would release the lock
            raise RunError(f"{path}: another run is writing to this folder (in this process, {os.getpid()})")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path / LOCK, "a+", opener=no_link)  # noqa: SIM115 (open until close)
        except OSError as problem:
            raise RunError(f"{path}: cannot be written to: {problem.strerror or problem}") from None
        try:
            if fcntl:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(self.file)
            self.file.close()
            raise RunError(f"{path}: another run is writing to this folder{holder}") from None
        _held.add(self.path)
        with suppress(OSError):  # a full disk does not affect the lock
            os.ftruncate(self.file.fileno(), 0)
            os.write(self.file.fileno(), f"{os.getpid()} {platform.node()}".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.file.closed:  # only once: another run may have locked the folder since
            self.file.close()
            _held.discard(self.path)


def write(path: Path, *parts: Part, sync: bool = False) -> None:
    """Write a file atomically, or raise RunError; an existing file is kept until the new content is complete.

    Symbolic links are replaced and never followed, neither at the path nor at the temporary name.
    """
    beside = path.with_name(path.name + TEMPORARY)
    try:
        beside.unlink(missing_ok=True)  # left by a process that was killed
        replace(path, beside, *parts, sync=sync)
    except OSError as problem:
        raise RunError(f"{path}: cannot be written: {problem.strerror or problem}") from None


def replace(path: Path, beside: Path, *parts: Part, sync: bool = False) -> None:
    """Write a new file of these parts at `beside` and rename it to `path`; an OSError leaves what was at the path."""
    try:
        with open(beside, "xb") as file:
            file.writelines(parts)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):  # a folder that cannot be written to has nothing to remove
            beside.unlink()
        raise


def make_folder(path: Path, option: str = "") -> None:
    """Make a folder and those above it; RunError where that fails, which names the option that asked for it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        where = f"{option} {path}" if option else str(path)
        raise RunError(f"{where}: cannot be written to: {problem.strerror or problem}") from None


def remove(folder: Path, pattern: str) -> None:
    """Remove the files, but not folders, that match a pattern; RunError if one cannot be removed."""
    for path in list(folder.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as problem:
            raise RunError(f"{path}: cannot be removed: {problem.strerror or problem}") from None


def serialized(params: Params, metadata: dict[str, str] | None = None) -> list[Part]:
    """Parts of the bytes of `safetensors.torch.save`; those of the tensors share their memory.

    >>> tensors = {"weight": torch.ones(2, 3), "steps": torch.tensor(7)}
    >>> b"".join(serialized(tensors)) == save(tensors)
    True
    """
    tensors = {name: x.detach().cpu().contiguous() for name, x in params.items()}
    outline = save({name: torch.empty(0, dtype=x.dtype) for name, x in tensors.items()}, metadata)
    entries = json.loads(outline[LENGTH.size :])  # order and dtypes; shapes and offsets of the tensors are added here
    start, order = 0, [name for name in entries if name != "__metadata__"]
    for name in order:
        end = start + tensors[name].nbytes
        entries[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH.size)
    values = [tensors[name].view(-1).view(torch.uint8).numpy().data for name in order]
    return [LENGTH.pack(len(header)), header, *values]


def seal(params: Params, about: dict[str, Any]) -> tuple[list[Part], str]:
    """Serialize tensors to safetensors, with `about` and a digest in the metadata; return the parts and the digest."""
    length, header, *values = serialized(params, {METADATA: json.dumps({"digest": BLANK.decode()} | about)})
    digest = hash_of(length, header, *values)
    return [length, bytes(header).replace(BLANK, digest.encode(), 1), *values], digest


def unseal(path: Path, content: bytes) -> tuple[dict[str, Any], str]:
    """Return `about` and the digest of bytes made by `seal`; RunError if they have changed."""
    damaged = RunError(f"{path}: damaged: its content does not match its checksum")
    try:
        (length,) = LENGTH.unpack_from(content)
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        if METADATA not in metadata:
            raise RunError(f"{damaged}, or it was written by an earlier version of fedshift")
        about = json.loads(metadata[METADATA])
        digest = about.pop("digest")
        at = content.index(digest.encode(), 8, 8 + length)
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise damaged from None
    if len(digest) != DIGEST or hash_of(content[:at], BLANK, memoryview(content)[at + DIGEST :]) != digest:
        raise damaged
    return about, digest


def hash_of(*parts: Part) -> str:
    """Hexadecimal digest of the concatenated parts."""
    digest = hashlib.blake2b(digest_size=DIGEST // 2)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def digest_of(params: Params) -> str:
    """Digest of names, types, shapes and values, also for tensors that safetensors does not support."""
    parts: list[bytes] = []
    for name, x in params.items():
        flat = x.detach().cpu().to_dense().contiguous().flatten()
        parts += [f"{name} {x.dtype} {tuple(x.shape)} ".encode(), flat.view(torch.uint8).numpy().tobytes()]
    return hash_of(*parts)


def write_tensors(folder: Path, stem: str, params: Params, about: dict[str, Any]) -> Path:
    """Write folder/stem.CHECKSUM.safetensors and return its path."""
    parts, digest = seal(params, about)
    path = folder / f"{stem}.{digest[:NAMED]}.safetensors"
    write(path, *parts)
    return path


def newest_first(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """Files that `write_tensors` wrote as KIND.ROUND, and their rounds."""
    found = [(path.name.split(".")[1], path) for path in folder.glob(f"{kind}.*.*.safetensors") if not path.is_dir()]
    return sorted(((int(number), path) for number, path in found if number.isdecimal()), reverse=True)


def set_aside(path: Path) -> None:
    """Rename a file that cannot be used, so that it is neither read again nor lost."""
    path.rename(path.with_name(path.name + ".unusable"))


def read_tensors(path: Path) -> tuple[Params, dict[str, Any]]:
    """Read a file of `write_tensors`; the order of tensors is not preserved."""
    content, about = _read(path)
    try:
        return load(content), about
    except (SafetensorError, ValueError, KeyError, OverflowError) as problem:
        raise RunError(f"{path}: damaged: {' '.join(str(problem).split())}") from None


def read_about(path: Path) -> dict[str, Any]:
    """Read the `about` of a file of `write_tensors`; the whole file is checked."""
    return _read(path)[1]


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    content = content_of(path)
    about, digest = unseal(path, content)
    if digest[:NAMED] != path.name.split(".")[-2]:
        raise RunError(f"{path}: damaged: its content does not match the checksum in its name")
    return content, about


def content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise RunError(f"{path}: cannot be read: {problem.strerror or problem}") from None


def _holder(lock: IO[str]) -> str:
    """Holder of a lock, if known: ' (process 12: fedshift sweep grid.toml)'."""
    try:
        lock.seek(0)
        pid, _, host = lock.read(300).partition(" ")
    except (OSError, ValueError):
        return ""
    if not pid.isdecimal():
        return ""
    if host != platform.node():
        return f" (process {pid} on {host})"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # not on every system
        words = []
    command = " ".join(word for word in words if word)
    return f" (process {pid}: {command[:100]})" if command else f" (process {pid})"
