"""Folders and archives as the files in them.

Archives are read in memory and never unpacked, so the paths in them lead nowhere, and nothing may be larger
than what is published.
"""

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from fedshift.data.catalog import DataError

LARGEST = 200 << 20  # bytes; the largest published file has 155 MB, the largest archive 170 MB
DEPTH = 3  # levels of folders below a source in which to look
BROKEN = (OSError, EOFError, tarfile.TarError, zlib.error)  # what damaged archives raise


class Folder(NamedTuple):
    """Files that lie together."""

    where: str
    files: Mapping[str, Callable[[], bytes]]
    md5: str = ""  # of the archive in which they lie, if any


def places(source: Path, archives: tuple[str, ...]) -> list[Path]:
    """Folders and archives to look into: the source itself, or all below it; beside it, if it is one file of many."""
    if source.name.endswith((".tar.gz", ".tgz", ".tar")):
        return [source]
    if source.is_file():
        return [source.parent]
    folders = [source, *(p for d in range(1, DEPTH + 1) for p in sorted(source.glob("/".join("*" * d))) if p.is_dir())]
    return folders + [folder / name for folder in folders for name in archives if (folder / name).is_file()]


def look(place: Path) -> list[Folder]:
    """The folder, or every folder of the archive."""
    if not place.is_dir():
        return unpack(_read(place), str(place))
    try:
        return [Folder(str(place), {p.name: partial(_read, p) for p in place.iterdir() if p.is_file()})]
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({error.strerror})") from error


def unpack(data: bytes, where: str) -> list[Folder]:
    """Every folder of a tar archive."""
    found: dict[str, dict[str, Callable[[], bytes]]] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                total += member.size
                if total > 2 * LARGEST:
                    raise DataError(f"{where}: holds more than {2 * LARGEST:,} bytes, no published archive does")
                if reader := tar.extractfile(member) if member.isfile() else None:
                    path = PurePosixPath(member.name)
                    found.setdefault(str(path.parent), {})[path.name] = partial(bytes, reader.read())
    except BROKEN as error:
        raise DataError(f"{where}: the archive is damaged ({error})") from error
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return [Folder(f"{where}:{folder}", files, md5) for folder, files in found.items()]


def gunzip(data: bytes) -> bytes:
    """Decompressed if it was compressed."""
    if data[:2] != b"\x1f\x8b":
        return data
    with gzip.open(io.BytesIO(data)) as stream:
        plain = stream.read(LARGEST + 1)
    if len(plain) > LARGEST:
        raise DataError(f"decompresses to more than {LARGEST:,} bytes, no published file does")
    return plain


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path}: has {path.stat().st_size:,} bytes, no published file has more than {LARGEST:,}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
