"""Published formats (CIFAR as binary, pickle and PNG; MNIST as IDX; texts) and verification of copies.

The content of CIFAR is verified in its binary layout, whatever its source. Per image, it has one byte for the label
and 3,072 bytes for the rows of the red, green and blue planes. CIFAR-100 has a coarse label first.
"""

import hashlib
import io
import json
import math
import pickle
import pickletools
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.data import files as limits
from fedshift.data.catalog import DataError, Entry
from fedshift.data.files import FileFolder, gunzip

Bytes = NDArray[np.uint8]
Arrays = tuple[Bytes, ...]  # x (n, C, H, W), y (n,), test_x, test_y; or the bytes of each text
Reader = Callable[[Entry, list[bytes]], Arrays]

IMAGES, LABELS = 0x0803, 0x0801  # first bytes of IDX files: unsigned bytes, three axes or one
SLACK = 64 << 10  # bytes of a pickle or a list of labels that do not depend on its number of examples

# opcodes of pickled numbers, texts, lists, dictionaries and arrays, as written by Python 2 and 3
STEPS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINSTRING SHORT_BINSTRING BINBYTES
    SHORT_BINBYTES BINUNICODE SHORT_BINUNICODE EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
PUTS = ("BINPUT", "LONG_BINPUT")


class Copy(NamedTuple):
    """Data set read from a folder, not yet verified."""

    arrays: Arrays
    names: list[str]  # files it was read from


def parse(entry: Entry, folder: FileFolder) -> Copy | None:
    """Read a data set from a folder; None if its files are missing."""
    for read, names in spellings(entry):
        if all(name in folder.files for name in names):
            try:
                contents = _contents(folder, names)
                if read is python:
                    check_published(entry, folder, dict(zip(names, contents, strict=True)))
                return Copy(read(entry, contents), names)
            except DataError:
                raise
            except Exception as error:  # a damaged pickle can raise anything
                raise DataError(f"damaged, or not {entry.name} ({error})") from error
    return None


def _contents(folder: FileFolder, names: list[str]) -> list[bytes]:
    contents: list[bytes] = []
    for name in names:
        contents.append(folder.files[name]())
        if sum(map(len, contents)) > 2 * limits.LARGEST:
            raise DataError(f"its files have more than {2 * limits.LARGEST:,} bytes; no published data set has")
    return contents


def check_published(entry: Entry, folder: FileFolder, contents: Mapping[str, bytes]) -> None:
    """Raise DataError unless pickles, or the archive that contains them, are the published files."""
    if entry.files and folder.md5 not in entry.files.values():
        for name, data in contents.items():
            _same(entry, name, _md5(data), entry.files.get(name, "that of a published file"))


def counts(entry: Entry) -> list[int]:
    """Number of examples per part.

    >>> from fedshift.data.catalog import find
    >>> counts(find("cifar10")), counts(find("cifar100"))
    ([10000, 10000, 10000, 10000, 10000, 10000], [50000, 10000])
    """
    parts = len(entry.parts) - 1
    return [entry.train // parts] * parts + [entry.test]


def spellings(entry: Entry) -> Iterator[tuple[Reader, list[str]]]:
    """Readers of a data set, with the names of the files that each needs."""
    if entry.layout == "text":
        yield text, list(entry.parts)
    elif entry.layout == "idx":
        for suffix in ("", ".gz"):
            yield idx, [f"{part}{suffix}" for part in entry.parts]
            yield idx, [f"{part}{suffix}".replace("-idx", ".idx") for part in entry.parts]  # a common variant
    else:
        yield binary, [f"{part}.bin" for part in entry.parts]
        yield python, list(entry.parts)
        yield png, [*(f"{part}.png" for part in entry.parts), "train_lables.json", "test_lables.json"]  # as published


def verify(entry: Entry, folder: FileFolder, copy: Copy) -> str:
    """Return the kind of verification, the strictest possible; DataError if the copy is not the data set."""
    shapes = [a.shape for a in copy.arrays]
    expected = [(entry.train, *entry.shape), (entry.train,), (entry.test, *entry.shape), (entry.test,)]
    if entry.layout != "text" and shapes != expected:
        raise DataError(f"contains arrays of shape {shapes}; {entry.name} has {expected}")
    if entry.md5:
        for part, data, md5 in zip(entry.parts, standard(entry, copy.arrays), entry.md5, strict=True):
            _same(entry, part, _md5(data), md5)
        return "md5 of the content"
    if entry.files and folder.md5:
        _same(entry, "the archive", folder.md5, *entry.files.values())
        return "md5 of the archive"
    if all(name in entry.files for name in copy.names):
        for name in copy.names:
            _same(entry, name, _md5(folder.files[name]()), entry.files[name])
        return "md5 of the files"
    return _plausible(entry, copy.arrays)


def standard(entry: Entry, arrays: Arrays) -> Iterator[bytes]:
    """Parts of a data set in the published binary layout."""
    if entry.layout == "text":
        yield from (array.tobytes() for array in arrays)
        return
    x, y, test_x, test_y = arrays
    if entry.layout == "idx":
        for images, labels in ((x, y), (test_x, test_y)):
            n, _, h, w = images.shape
            yield struct.pack(">4I", IMAGES, n, h, w) + images.tobytes()
            yield struct.pack(">2I", LABELS, n) + labels.tobytes()
    else:
        parts = len(entry.parts) - 1
        pairs = zip(np.split(x, parts), np.split(y, parts), strict=True)
        for images, labels in (*pairs, (test_x, test_y)):
            yield np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1).tobytes()


def binary(entry: Entry, files: list[bytes]) -> Arrays:
    """Read CIFAR's binary files."""
    c, h, w = entry.shape
    before = 2 if entry.classes == 100 else 1  # bytes before the pixels; the last of them is the label
    rows = [np.frombuffer(data, np.uint8).reshape(-1, before + c * h * w) for data in files]
    return _join(entry, [r[:, before:] for r in rows], [r[:, before - 1] for r in rows])


def python(entry: Entry, files: list[bytes]) -> Arrays:
    """Read CIFAR's pickles."""
    pixels, label = math.prod(entry.shape), b"fine_labels" if entry.classes == 100 else b"labels"
    x, y = [], []
    for data, n in zip(files, counts(entry), strict=True):
        check_pickle(data, n, pixels)
        batch = PlainUnpickler(data).load()
        stored, labels = batch[b"data"], batch[label]
        if not isinstance(stored, StoredArray) or not isinstance(labels, list):
            raise DataError("damaged: its data must be an array and its labels a list")
        x.append(stored.array)
        y.append(np.frombuffer(bytes(labels), np.uint8))
    return _join(entry, x, y)


def check_pickle(data: bytes, n: int, pixels: int) -> None:
    """Refuse a pickle that is longer, has more or other opcodes, or larger memo indices than one of n images.

    Any other pickle takes memory in proportion to its length, since no opcode produces more than its own data.
    """
    most = n * (2 * pixels + 256) + SLACK  # Python 3 writes bytes as text, with two bytes for half of them
    if len(data) > most:
        raise DataError(f"a pickle of {len(data):,} bytes; {n:,} images take at most {most:,}")
    known, steps = frozenset(STEPS.split()), 8 * n + 1000  # three or four per label and file name
    for number, (step, argument, _) in enumerate(pickletools.genops(data)):
        if step.name not in known:
            raise DataError(f"refused: its opcode {number} is {step.name}; only arrays are read")
        if number >= steps:
            raise DataError(f"a pickle of more than {steps:,} opcodes; {n:,} images take fewer")
        if step.name in PUTS and int(argument or 0) > number:
            raise DataError(f"a pickle whose opcode {number} has the memo index {argument:,}")


class PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts, lists, dictionaries and arrays; other names are refused, so no code is run."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.left = len(data)  # remaining bytes for decoded texts

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return lambda kind, shape, dtype: StoredArray()  # filled in by the pickle's next opcode
            case ("numpy", "ndarray"):
                return None  # only passed to _reconstruct
            case ("numpy", "dtype"):
                return lambda kind, *how: Kind(kind)
            case ("_codecs", "encode"):
                return self._encode  # bytes written by Python 3 for Python 2
        raise DataError(f"refused: it imports {module}.{name}; only arrays are read")

    def _encode(self, text: str, encoding: str) -> bytes:
        self.left -= len(text)
        if self.left < 0:
            raise DataError("a pickle that expands to more bytes than it contains")
        return text.encode("latin1")


class Kind:
    """Dtype of a pickled array, which must be uint8."""

    def __init__(self, kind: str | bytes) -> None:
        if kind not in ("u1", b"u1", "uint8", b"uint8"):
            raise DataError(f"an array of {kind!r}; only arrays of bytes (u1) are read")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which bytes do not have."""


class StoredArray:
    """Pickled array of bytes, built without the unpickling code of numpy."""

    array: Bytes

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, backwards, raw = state
        if backwards or not isinstance(kind, Kind):
            raise DataError("an array that is not uint8 in C order")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape)


def png(entry: Entry, files: list[bytes]) -> Arrays:
    """Read PNG files with one image per row; one list has the labels of all training parts."""
    from PIL import Image

    x, (_, height, width) = [], entry.shape
    for data, n in zip(files[:-2], counts(entry), strict=True):
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if (image.size, image.mode) != ((height * width, n), "RGB"):
                raise DataError(f"a PNG of {image.size} {image.mode} pixels; must be {height * width, n} RGB")
            x.append(np.asarray(image).transpose(0, 2, 1))  # (n, 3, H * W)
    train, test = (_listed(data, n) for data, n in zip(files[-2:], (entry.train, entry.test), strict=True))
    return _join(entry, x, [*np.split(train, len(x) - 1), test])


def _listed(data: bytes, n: int) -> Bytes:
    """Labels from a JSON list."""
    most = 16 * n + SLACK
    if len(data) > most:
        raise DataError(f"a list of {len(data):,} bytes; {n:,} labels take at most {most:,}")
    labels = json.loads(data)
    if not isinstance(labels, list):
        raise DataError("its labels are not a list")
    return np.frombuffer(bytes(labels), np.uint8)


def idx(entry: Entry, files: list[bytes]) -> Arrays:
    """Read MNIST's IDX files, gzipped or not."""
    arrays = []
    sizes = (entry.train, entry.train, entry.test, entry.test)
    for part, magic, n, packed in zip(entry.parts, (IMAGES, LABELS) * 2, sizes, files, strict=True):
        axes = magic & 0xFF
        data = gunzip(packed, 4 + 4 * axes + n * (math.prod(entry.shape) if magic == IMAGES else 1))
        head = struct.unpack_from(f">{1 + axes}I", data)
        if head[0] != magic:
            raise DataError(f"{part} is not an IDX file of bytes with {axes} axes")
        arrays.append(np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(head[1:]))
    x, y, test_x, test_y = arrays
    return x[:, None], y, test_x[:, None], test_y


def text(entry: Entry, files: list[bytes]) -> Arrays:
    """Read texts as bytes."""
    return tuple(np.frombuffer(data, np.uint8) for data in files)


def _join(entry: Entry, x: list[Bytes], y: list[Bytes]) -> Arrays:
    """Join the parts; the last one is the test set."""
    images = [np.asarray(part, np.uint8).reshape(-1, *entry.shape) for part in x]
    return np.concatenate(images[:-1]), np.concatenate(y[:-1]), images[-1], y[-1]


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _same(entry: Entry, where: str, md5: str, *allowed: str) -> None:
    if md5 not in allowed:
        raise DataError(
            f"{where} is damaged or not part of {entry.name}: its md5 is {md5}; it must be {' or '.join(allowed)}"
        )


def _plausible(entry: Entry, arrays: Arrays) -> str:
    """Check a copy without a published digest: frequency of labels, and mean of pixels."""
    x, y, _, test_y = arrays
    for labels in (y, test_y):
        if (np.bincount(labels, minlength=entry.classes) * entry.classes != len(labels)).any():
            raise DataError(f"not {entry.name}, whose {entry.classes} labels are equally frequent")
    mean = x.mean(axis=(0, 2, 3)) / 255
    if entry.mean and np.abs(mean - entry.mean).max() > 1e-4:
        raise DataError(f"damaged, or not {entry.name}: its mean pixel is {mean.round(4)}; it must be {entry.mean}")
    return "shapes, frequency of labels, mean of pixels"
