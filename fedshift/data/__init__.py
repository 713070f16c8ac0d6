"""Data sets, partitions among clients, and augmentation."""

from fedshift.data.augment import crop_and_flip
from fedshift.data.catalog import CATALOG, DataError
from fedshift.data.datasets import Dataset, dataset, load
from fedshift.data.fetch import fetch
from fedshift.data.partition import Partition, dirichlet, iid, labels, natural, shards

__all__ = [
    "CATALOG",
    "DataError",
    "Dataset",
    "Partition",
    "crop_and_flip",
    "dataset",
    "dirichlet",
    "fetch",
    "iid",
    "labels",
    "load",
    "natural",
    "shards",
]
