"""Data sets of a few images in every published format."""

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedshift.data.catalog import Entry, find
from fedshift.data.formats import Arrays, standard


def entry(name: str, *, pinned: bool = False, **changes: Any) -> Entry:
    """A data set like the one of that name, with 5 training images for each class and 1 to test."""
    full = find(name)
    few = replace(full, train=5 * full.classes, test=full.classes, md5=(), files={}, home=(), package="", mean=())
    if pinned:
        few = replace(few, md5=tuple(hashlib.md5(data).hexdigest() for data in standard(few, arrays(few))))
    return replace(few, **changes)


def arrays(e: Entry, seed: int = 0) -> Arrays:
    g = np.random.default_rng(seed)
    x, test_x = (g.integers(0, 256, (n, *e.shape), np.uint8) for n in (e.train, e.test))
    y, test_y = ((np.arange(n) % e.classes).astype(np.uint8) for n in (e.train, e.test))
    return x, g.permutation(y), test_x, test_y


def binary(e: Entry, a: Arrays) -> dict[str, bytes]:
    parts = dict(zip([f"{part}.bin" for part in e.parts], standard(e, a), strict=True))
    if e.classes == 100:  # a coarse label before the fine one
        size = 1 + int(np.prod(e.shape))
        rows = {k: np.frombuffer(v, np.uint8).reshape(-1, size) for k, v in parts.items()}
        parts = {k: np.insert(v, 0, 7, axis=1).tobytes() for k, v in rows.items()}
    return parts


def python(e: Entry, a: Arrays) -> dict[str, bytes]:
    key = b"fine_labels" if e.classes == 100 else b"labels"
    return {
        part: pickle.dumps({b"data": x.reshape(len(x), -1), key: y.tolist(), b"batch_label": b"a part"}, protocol=2)
        for part, x, y in parts(e, a)
    }


def png(e: Entry, a: Arrays) -> dict[str, bytes]:
    files = {
        "train_lables.json": json.dumps(a[1].tolist()).encode(),
        "test_lables.json": json.dumps(a[3].tolist()).encode(),
    }
    for part, x, _ in parts(e, a):
        out = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(x.reshape(len(x), 3, -1).transpose(0, 2, 1))).save(out, "png")
        files[f"{part}.png"] = out.getvalue()
    return files


def idx(e: Entry, a: Arrays) -> dict[str, bytes]:
    return dict(zip(e.parts, standard(e, a), strict=True))


def gzipped(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(data) for name, data in files.items()}


def parts(e: Entry, a: Arrays) -> list[tuple[str, np.ndarray, np.ndarray]]:
    n = len(e.parts) - 1
    return list(zip(e.parts, [*np.split(a[0], n), a[2]], [*np.split(a[1], n), a[3]], strict=True))


def folder(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def tar(path: Path, files: dict[str, bytes], inside: str = "package") -> Path:
    with tarfile.open(path, "w:gz") as out:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path
