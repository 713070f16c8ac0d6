"""Federated learning when the uplink is the bottleneck."""

from fedshift.accumulate import Mean
from fedshift.codecs import (
    BitPack,
    Cast,
    Codec,
    Identity,
    KMeans,
    PerBlock,
    PerChannel,
    PerTensor,
    Range,
    Stochastic,
    Uniform,
    Zstd,
)
from fedshift.frame import Header, WireError
from fedshift.types import Params
from fedshift.wire import header, pack, size, unpack

__version__ = "0.1.0"

__all__ = [
    "BitPack",
    "Cast",
    "Codec",
    "Header",
    "Identity",
    "KMeans",
    "Mean",
    "Params",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "Range",
    "Stochastic",
    "Uniform",
    "WireError",
    "Zstd",
    "__version__",
    "header",
    "pack",
    "size",
    "unpack",
]
