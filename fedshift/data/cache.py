"""Cache of fetched data sets: one safetensors file each, with a checksum that is verified on every read."""

import contextlib
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedshift.core.files import replace
from fedshift.data.catalog import DataError, Entry


def folder() -> Path:
    """Cache folder: $FEDSHIFT_DATA (default: the user's cache folder)."""
    if variable := os.environ.get("FEDSHIFT_DATA"):
        return Path(variable).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("fedshift")


def path(entry: Entry) -> Path:
    """File of a data set in the cache."""
    return folder() / f"{entry.name}.safetensors"


def read(entry: Entry) -> list[Tensor]:
    """Read the tensors of a stored data set; DataError if it is missing or damaged."""
    file, hint = path(entry), f"delete it and run `fedshift data {entry.name}`"
    if not file.exists():
        raise DataError(f"{entry.name} is not in {folder()}; run `fedshift data {entry.name}` to fetch it")
    try:
        with safe_open(file, framework="pt") as stored:
            tensors = [stored.get_tensor(name) for name in entry.tensors]
            expected = (stored.metadata() or {}).get("crc32")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file}: cannot be read ({error}); {hint}") from error
    if expected != checksum(*tensors):
        raise DataError(f"{file}: damaged, its checksum is wrong; {hint}")
    return tensors


def store(entry: Entry, tensors: Sequence[Tensor], checked: str) -> Path:
    """Store a data set atomically: it is written under a temporary name, then renamed."""
    file = path(entry)
    data = save(dict(zip(entry.tensors, tensors, strict=True)), {"crc32": checksum(*tensors), "checked": checked})
    with writing():
        sweep(file)
        beside = file.with_name(f".{file.name}-{secrets.token_hex(4)}")  # several processes may store it at once
        replace(file, beside, data, sync=True)
    return file


def probe() -> None:
    """Check that the cache is writable, before a large download."""
    with writing(), tempfile.TemporaryFile(dir=folder()):
        pass


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Create the cache folder, and convert errors of writing to DataError."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"{folder()}: cannot be written ({why}); set FEDSHIFT_DATA to another folder") from error


def sweep(file: Path) -> None:
    """Remove temporary files of killed processes; no write takes an hour."""
    for partial in file.parent.glob(f".{file.name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > 3600:
                partial.unlink()


def checksum(*tensors: Tensor) -> str:
    """CRC-32 of tensors: detects damage, not forgery, and is several times faster than a digest."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().numpy().data, crc)
    return f"{crc:08x}"
