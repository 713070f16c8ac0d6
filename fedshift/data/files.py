"""Folders and archives as the files in them.

Archives are read in memory and never unpacked, so the paths in them lead nowhere, and nothing may be larger
than what is published: neither a file, nor all files together, nor what an archive says about them.
"""

import gzip
import hashlib
import io
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Self

from fedshift.data.catalog import DataError

GZIP = b"\x1f\x8b"  # how gzipped files begin
LARGEST = 200 << 20  # bytes; the largest published file has 155 MB, the largest archive 170 MB
MEMBERS = 10_000  # of an archive; no published one has more than 20
EXTENDED = 64 << 10  # bytes of an extended header, which says more about one member
DEPTH = 3  # levels of folders below a source in which to look
# what damaged archives raise; a chain of extended headers is read recursively
BROKEN = (OSError, EOFError, RecursionError, tarfile.TarError, zlib.error)


class FileFolder(NamedTuple):
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


def look(place: Path) -> list[FileFolder]:
    """The folder, or every folder of the archive."""
    if not place.is_dir():
        return unpack(_read(place), str(place))
    try:
        return [FileFolder(str(place), {p.name: partial(_read, p) for p in place.iterdir() if p.is_file()})]
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({error.strerror})") from error


class Member(tarfile.TarInfo):
    """Refused where its header claims what no archive needs: tarfile reads an extended header of any length at once."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        extended = member.type not in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
        if member.size < 0 or (extended and member.size > EXTENDED):
            raise DataError(f"an extended header of {member.size:,} bytes; at most {EXTENDED:,} are read")
        return member


def unpack(data: bytes, where: str) -> list[FileFolder]:
    """Every folder of a tar archive, gzipped or not."""
    found: dict[str, dict[str, Callable[[], bytes]]] = {}
    mode: Literal["r:gz", "r:"] = "r:gz" if data.startswith(GZIP) else "r:"
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode=mode, tarinfo=Member) as tar:
            for number, member in enumerate(tar):
                total += member.size
                if number >= MEMBERS:
                    raise DataError(f"more than {MEMBERS:,} members; no published archive has as many")
                if member.size < 0 or total > 2 * LARGEST:
                    raise DataError(f"holds more than {2 * LARGEST:,} bytes, no published archive does")
                if reader := tar.extractfile(member) if member.isfile() else None:
                    path = PurePosixPath(member.name)
                    found.setdefault(str(path.parent), {})[path.name] = partial(bytes, reader.read())
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except BROKEN as error:
        raise DataError(f"{where}: the archive is damaged ({error})") from error
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return [FileFolder(f"{where}:{folder}", files, md5) for folder, files in found.items()]


def gunzip(data: bytes, most: int) -> bytes:
    """Decompressed if it was compressed; DataError where it is longer than `most` bytes."""
    if not data.startswith(GZIP):
        return data
    most = min(most, LARGEST)
    with gzip.open(io.BytesIO(data)) as stream:
        plain = stream.read(most + 1)
    if len(plain) > most:
        raise DataError(f"decompresses to more than {most:,} bytes, no published file does")
    return plain


def memory() -> int:
    """Bytes that this process can use at most: the machine's, or fewer where it is limited."""
    most = sys.maxsize
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        import resource
    except ImportError:  # not on Windows
        return most
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return most if limit == resource.RLIM_INFINITY else min(most, limit)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path}: has {path.stat().st_size:,} bytes, no published file has more than {LARGEST:,}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
