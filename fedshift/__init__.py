"""Federated learning when the uplink is the bottleneck."""

__version__ = "0.1.0"

from fedshift.accumulate import Mean
from fedshift.algorithms import Algorithm, chain, fedavg, fedprox, scaffold, shift, shifted
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
from fedshift.data import Dataset, dataset
from fedshift.frame import Header, WireError
from fedshift.loop import Outcome
from fedshift.running import Run, resume, run
from fedshift.settings import Experiment
from fedshift.types import Broadcast, Params, Round
from fedshift.uplink import Uplink
from fedshift.wire import header, pack, size, unpack

__all__ = [
    "Algorithm",
    "BitPack",
    "Broadcast",
    "Cast",
    "Codec",
    "Dataset",
    "Experiment",
    "Header",
    "Identity",
    "KMeans",
    "Mean",
    "Outcome",
    "Params",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "Range",
    "Round",
    "Run",
    "Stochastic",
    "Uniform",
    "Uplink",
    "WireError",
    "Zstd",
    "__version__",
    "chain",
    "dataset",
    "fedavg",
    "fedprox",
    "header",
    "pack",
    "resume",
    "run",
    "scaffold",
    "shift",
    "shifted",
    "size",
    "unpack",
]
