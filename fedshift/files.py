"""Files that are there whole or not at all: written beside their place, then renamed into it.

A name ends in the checksum of its content, so a file says by itself whether it is what was written.
"""

import json
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path

from safetensors.torch import load, save

from fedshift.types import Params

TEMPORARY = ".unfinished"


class RunError(RuntimeError):
    """What went wrong with the files of a run, in a sentence."""


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
    content = save({name: x.contiguous() for name, x in params.items()}, about)
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
