"""Fetched data sets, one safetensors file each, checked whenever they are read."""

import contextlib
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedshift.core.files import replace
from fedshift.data.catalog import DataError, Entry

Four = tuple[Tensor, Tensor, Tensor, Tensor]  # x, y, test_x, test_y
NAMES = ("x", "y", "test_x", "test_y")


def folder() -> Path:
    """$FEDSHIFT_DATA, else the user's cache folder."""
    if own := os.environ.get("FEDSHIFT_DATA"):
        return Path(own).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("fedshift")


def path(entry: Entry) -> Path:
    return folder() / f"{entry.name}.safetensors"


def read(entry: Entry) -> Four:
    """The four tensors of a data set that was stored before, if they are what was stored."""
    file, again = path(entry), f"delete it and run `fedshift data {entry.name}`"
    if not file.exists():
        raise DataError(f"{entry.name} is not in {folder()}; run `fedshift data {entry.name}` to fetch it")
    try:
        with safe_open(file, framework="pt") as stored:
            x, y, test_x, test_y = (stored.get_tensor(name) for name in NAMES)
            wanted = (stored.metadata() or {}).get("crc32")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file}: cannot be read ({error}); {again}") from error
    if wanted != checksum(x, y, test_x, test_y):
        raise DataError(f"{file}: damaged, its checksum is wrong; {again}")
    return x, y, test_x, test_y


def store(entry: Entry, tensors: Four, checked: str) -> Path:
    """Written under another name and renamed when whole: a data set is in the cache or it is not."""
    file = path(entry)
    data = save(dict(zip(NAMES, tensors, strict=True)), {"crc32": checksum(*tensors), "checked": checked})
    with writing():
        sweep(file)
        beside = file.with_name(f".{file.name}-{secrets.token_hex(4)}")  # several processes may store it at once
        replace(file, data, beside, sync=True)
    return file


def probe() -> None:
    """Finds out whether the cache can be written, before anything large is on its way."""
    with writing(), tempfile.TemporaryFile(dir=folder()):
        pass


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Makes the folder; a full disk or a read-only folder becomes one sentence."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"{folder()}: cannot be written ({why}); FEDSHIFT_DATA names another folder") from error


def sweep(file: Path) -> None:
    """Removes what killed processes left behind; no write takes an hour."""
    for left in file.parent.glob(f".{file.name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 3600:
                left.unlink()


def checksum(*tensors: Tensor) -> str:
    """Finds damage, not forgery, several times as fast as a digest would."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().numpy().data, crc)
    return f"{crc:08x}"
