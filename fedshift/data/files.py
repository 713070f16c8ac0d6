"""Files in folders and archives.

Archives are read in memory and never extracted, so their paths have no effect. Sizes of files, of all files together
and of headers are limited by those of the published files.
"""

import gzip
import hashlib
import io
import lzma
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Self

from fedshift.data.catalog import DataError

GZIP, XZ, ZIP, AR = b"\x1f\x8b", b"\xfd7zXZ\0", b"PK\3\4", b"!<arch>\n"  # first bytes of files
SUFFIXES = (".tar.gz", ".tgz", ".tar", ".deb", ".egg", ".zip")  # of archives
LARGEST = 200 << 20  # bytes; the largest published file has 155 MB, the largest archive 170 MB
MEMBERS = 10_000  # maximum number in an archive; published ones have up to 20
ZIPPED = 64 << 20  # maximum bytes of the files in a zip archive; the published one has 11 MB
DICTIONARY = 128 << 20  # maximum bytes of memory to decompress an xz file; Debian's need 9 MB
EXTENDED = 64 << 10  # maximum bytes of an extended header
DEPTH = 3  # levels of folders below a source that are searched
# raised for damaged archives; tarfile reads a chain of extended headers recursively
BROKEN = (
    *(OSError, EOFError, RecursionError, NotImplementedError, RuntimeError, ValueError),
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


class FileFolder(NamedTuple):
    """Files of one folder."""

    where: str
    files: Mapping[str, Callable[[], bytes]]
    md5: str = ""  # of the archive that contains them, if any


def places(source: Path, archives: tuple[str, ...]) -> list[Path]:
    """Folders and archives to search: an archive itself, a folder and those below it, or the folder of a file."""
    if source.name.endswith(SUFFIXES):
        return [source]
    if source.is_file():
        return [source.parent]
    folders = [source, *(p for d in range(1, DEPTH + 1) for p in sorted(source.glob("/".join("*" * d))) if p.is_dir())]
    return folders + [p for folder in folders for name in archives for p in sorted(folder.glob(name)) if p.is_file()]


def look(place: Path) -> list[FileFolder]:
    """A folder, or all folders of an archive."""
    if not place.is_dir():
        return unpack(_read(place), str(place))
    try:
        return [FileFolder(str(place), {p.name: partial(_read, p) for p in place.iterdir() if p.is_file()})]
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({error.strerror})") from error


class Member(tarfile.TarInfo):
    """Archive member with a limited extended header; tarfile would read one of any length at once."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        extended = member.type not in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE)
        if member.size < 0 or (extended and member.size > EXTENDED):
            raise DataError(f"an extended header of {member.size:,} bytes; at most {EXTENDED:,} are read")
        return member


def unpack(data: bytes, where: str) -> list[FileFolder]:
    """All folders of a tar archive, gzipped or not, of a zip archive, or of a Debian package."""
    folders: dict[str, dict[str, Callable[[], bytes]]] = {}
    try:
        members = _zip(data) if data.startswith(ZIP) else _tar(_debian(data) if data.startswith(AR) else data)
        for name, content in members:
            path = PurePosixPath(name)
            folders.setdefault(str(path.parent), {})[path.name] = partial(bytes, content)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except BROKEN as error:
        raise DataError(f"{where}: the archive is damaged ({error})") from error
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return [FileFolder(f"{where}:{folder}", files, md5) for folder, files in folders.items()]


def _tar(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a tar archive, gzipped or not."""
    mode: Literal["r:gz", "r:"] = "r:gz" if data.startswith(GZIP) else "r:"
    total = 0
    with tarfile.open(fileobj=io.BytesIO(data), mode=mode, tarinfo=Member) as tar:
        for number, member in enumerate(tar):
            total += member.size
            if number >= MEMBERS:
                raise DataError(f"more than {MEMBERS:,} members; no published archive has that many")
            if member.size < 0 or total > 2 * LARGEST:
                raise DataError(f"contains more than {2 * LARGEST:,} bytes; no published archive does")
            if reader := tar.extractfile(member) if member.isfile() else None:
                yield member.name, reader.read()


def _zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in a zip archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if len(members) > MEMBERS:
            raise DataError(f"more than {MEMBERS:,} members; no published archive has that many")
        if sum(member.file_size for member in members) > ZIPPED:
            raise DataError(f"contains more than {ZIPPED:,} bytes; no published archive does")
        for member in members:
            if not member.is_dir():
                yield member.filename, archive.read(member)


def _debian(data: bytes) -> bytes:
    """The tar archive with the files of a Debian package, which is an ar archive."""
    at = len(AR)
    while (head := data[at : at + 60])[58:] == b"`\n" and head[48:58].strip().isdigit():
        start, size = at + 60, int(head[48:58])
        if head.startswith(b"data.tar"):
            if start + size > len(data):
                raise EOFError("it ends within data.tar")
            return _unxz(data[start : start + size])
        at = start + size + size % 2
    raise DataError("the archive is damaged: it contains no data.tar")


def _unxz(data: bytes) -> bytes:
    """Decompress if necessary, into at most `LARGEST` bytes."""
    if not data.startswith(XZ):
        return data
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DICTIONARY)
    plain = reader.decompress(data, LARGEST + 1)
    if len(plain) > LARGEST:
        raise DataError(f"decompresses to more than {LARGEST:,} bytes; no published file does")
    if not reader.eof:
        raise EOFError("its compressed data are incomplete")
    return plain


def gunzip(data: bytes, most: int) -> bytes:
    """Decompress if necessary; DataError if the result is longer than `most` bytes."""
    if not data.startswith(GZIP):
        return data
    most = min(most, LARGEST)
    with gzip.open(io.BytesIO(data)) as stream:
        plain = stream.read(most + 1)
    if len(plain) > most:
        raise DataError(f"decompresses to more than {most:,} bytes; no published file does")
    return plain


def memory() -> int:
    """Maximum memory of this process in bytes: that of the machine, or a lower limit."""
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
        if not path.is_file():  # a device or a pipe may have no end
            raise DataError(f"{path}: {'not a file' if path.exists() else 'there is no such file'}")
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path}: has {path.stat().st_size:,} bytes; no published file has more than {LARGEST:,}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
