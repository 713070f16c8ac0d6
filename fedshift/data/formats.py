"""The published formats, CIFAR as binary, pickle and PNG, MNIST as IDX; and whether a copy is the real thing.

CIFAR's binary layout, in which its content is known whatever it was read from, is for every image the label,
one byte, and 3,072 bytes: the rows of the red plane, of the green, of the blue. CIFAR-100 has a coarse label first.
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
Arrays = tuple[Bytes, Bytes, Bytes, Bytes]  # x (n, C, H, W), y (n,), test_x, test_y
Reader = Callable[[Entry, list[bytes]], Arrays]

IMAGES, LABELS = 0x0803, 0x0801  # how IDX files begin: unsigned bytes, three axes or one
SLACK = 64 << 10  # bytes of a pickle or a list of labels that do not depend on how many examples it holds

# of a pickle of numbers, texts, lists, dictionaries and arrays, as Python 2 and 3 write it
STEPS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINSTRING SHORT_BINSTRING BINBYTES
    SHORT_BINBYTES BINUNICODE SHORT_BINUNICODE EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    EMPTY_DICT DICT SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""
PUTS = ("BINPUT", "LONG_BINPUT")


class Copy(NamedTuple):
    """What a folder holds of a data set, not yet verified."""

    arrays: Arrays
    names: list[str]  # the files it was read from


def parse(entry: Entry, folder: FileFolder) -> Copy | None:
    """None if the files are not there."""
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
            raise DataError(f"its files have more than {2 * limits.LARGEST:,} bytes, no published data set has")
    return contents


def check_published(entry: Entry, folder: FileFolder, contents: Mapping[str, bytes]) -> None:
    """Pickles are read only if they, or the archive in which they lie, are the published ones."""
    if entry.files and folder.md5 not in entry.files.values():
        for name, data in contents.items():
            _same(entry, name, _md5(data), entry.files.get(name, "that of a published file"))


def counts(entry: Entry) -> list[int]:
    """Examples of each part.

    >>> from fedshift.data.catalog import find
    >>> counts(find("cifar10")), counts(find("cifar100"))
    ([10000, 10000, 10000, 10000, 10000, 10000], [50000, 10000])
    """
    parts = len(entry.parts) - 1
    return [entry.train // parts] * parts + [entry.test]


def spellings(entry: Entry) -> Iterator[tuple[Reader, list[str]]]:
    """Ways to read a data set, with the files needed for each."""
    if entry.layout == "idx":
        for suffix in ("", ".gz"):
            yield idx, [f"{part}{suffix}" for part in entry.parts]
            yield idx, [f"{part}{suffix}".replace("-idx", ".idx") for part in entry.parts]  # also in use
    else:
        yield binary, [f"{part}.bin" for part in entry.parts]
        yield python, list(entry.parts)
        yield png, [*(f"{part}.png" for part in entry.parts), "train_lables.json", "test_lables.json"]  # their spelling


def verify(entry: Entry, folder: FileFolder, copy: Copy) -> str:
    """Raises unless the copy is the data set; returns what was checked, the most that can be."""
    shapes = [a.shape for a in copy.arrays]
    wanted = [(entry.train, *entry.shape), (entry.train,), (entry.test, *entry.shape), (entry.test,)]
    if shapes != wanted:
        raise DataError(f"holds arrays of shape {shapes}; {entry.name} has {wanted}")
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
    """The parts of a data set in the binary layout in which they are published."""
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
    c, h, w = entry.shape
    before = 2 if entry.classes == 100 else 1  # bytes before the pixels; the last of them is the label
    rows = [np.frombuffer(data, np.uint8).reshape(-1, before + c * h * w) for data in files]
    return _join(entry, [r[:, before:] for r in rows], [r[:, before - 1] for r in rows])


def python(entry: Entry, files: list[bytes]) -> Arrays:
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
    """Refuse a pickle that is longer, has more or other steps, or numbers its memo otherwise than one of n images.

    What is left takes memory in proportion to its length: each step makes at most what it holds.
    """
    most = n * (2 * pixels + 256) + SLACK  # Python 3 writes bytes as text, in which half of them take two
    if len(data) > most:
        raise DataError(f"a pickle of {len(data):,} bytes; {n:,} images take no more than {most:,}")
    known, steps = frozenset(STEPS.split()), 8 * n + 1000  # three or four a label and file name
    for number, (step, argument, _) in enumerate(pickletools.genops(data)):
        if step.name not in known:
            raise DataError(f"refused, because its step {number} is {step.name}: only arrays are read")
        if number >= steps:
            raise DataError(f"a pickle of more than {steps:,} steps, which {n:,} images do not take")
        if step.name in PUTS and int(argument or 0) > number:
            raise DataError(f"a pickle whose step {number} is number {argument:,} of its memo")


class PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists, dictionaries and arrays; nothing else can be named, so nothing else is run."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.left = len(data)  # bytes that texts may still become

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return lambda kind, shape, dtype: StoredArray()  # filled in by the pickle's next step
            case ("numpy", "ndarray"):
                return None  # only ever handed to _reconstruct
            case ("numpy", "dtype"):
                return lambda kind, *how: Kind(kind)
            case ("_codecs", "encode"):
                return self._encode  # how Python 3 writes bytes for Python 2
        raise DataError(f"refused, because it asks for {module}.{name}: only arrays are read")

    def _encode(self, text: str, encoding: str) -> bytes:
        self.left -= len(text)
        if self.left < 0:
            raise DataError("a pickle that holds fewer bytes than it makes of them")
        return text.encode("latin1")


class Kind:
    """The dtype of a pickled array, of which only bytes are read."""

    def __init__(self, kind: str | bytes) -> None:
        if kind not in ("u1", b"u1", "uint8", b"uint8"):
            raise DataError(f"an array of {kind!r}; only arrays of bytes (u1) are read")

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which bytes do not have."""


class StoredArray:
    """A pickled array of bytes, built from its parts by none of numpy's own code for that."""

    array: Bytes

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, backwards, raw = state
        if backwards or not isinstance(kind, Kind):
            raise DataError("an array that is not of bytes with its last axis fastest")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape)


def png(entry: Entry, files: list[bytes]) -> Arrays:
    """An image is one row of a PNG, its pixels from the top left; the labels of all training parts are in one list."""
    from PIL import Image

    x, (_, height, width) = [], entry.shape
    for data, n in zip(files[:-2], counts(entry), strict=True):
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if (image.size, image.mode) != ((height * width, n), "RGB"):
                raise DataError(f"a PNG of {image.size} {image.mode} pixels where {height * width, n} RGB are expected")
            x.append(np.asarray(image).transpose(0, 2, 1))  # (n, 3, H * W)
    train, test = (_listed(data, n) for data, n in zip(files[-2:], (entry.train, entry.test), strict=True))
    return _join(entry, x, [*np.split(train, len(x) - 1), test])


def _listed(data: bytes, n: int) -> Bytes:
    """A list of labels in JSON."""
    most = 16 * n + SLACK
    if len(data) > most:
        raise DataError(f"a list of {len(data):,} bytes; {n:,} labels take no more than {most:,}")
    labels = json.loads(data)
    if not isinstance(labels, list):
        raise DataError("its labels are not a list")
    return np.frombuffer(bytes(labels), np.uint8)


def idx(entry: Entry, files: list[bytes]) -> Arrays:
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


def _join(entry: Entry, x: list[Bytes], y: list[Bytes]) -> Arrays:
    """Parts, of which the last is the test set."""
    images = [np.asarray(part, np.uint8).reshape(-1, *entry.shape) for part in x]
    return np.concatenate(images[:-1]), np.concatenate(y[:-1]), images[-1], y[-1]


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _same(entry: Entry, where: str, md5: str, *allowed: str) -> None:
    if md5 not in allowed:
        raise DataError(
            f"{where} is damaged, or not that of {entry.name}: its md5 is {md5}, not {' or '.join(allowed)}"
        )


def _plausible(entry: Entry, arrays: Arrays) -> str:
    """All that can be checked of a copy without a published digest."""
    x, y, _, test_y = arrays
    for labels in (y, test_y):
        if (np.bincount(labels, minlength=entry.classes) * entry.classes != len(labels)).any():
            raise DataError(f"not {entry.name}, whose {entry.classes} labels are equally frequent")
    mean = x.mean(axis=(0, 2, 3)) / 255
    if entry.mean and np.abs(mean - entry.mean).max() > 1e-4:
        raise DataError(f"damaged, or not {entry.name}: its pixels have mean {mean.round(4)}, not {entry.mean}")
    return "shapes, frequency of labels, mean of pixels"
