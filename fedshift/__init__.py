"""Federated learning when the uplink is the bottleneck."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedshift.algorithms import (
        Algorithm,
        ClientRule,
        ServerRule,
        centre,
        centred,
        chain,
        fedavg,
        fedprox,
        scaffold,
        shift,
        shifted,
    )
    from fedshift.codecs import (
        QSGD,
        BitPack,
        Cast,
        Codec,
        Coder,
        FixedCode,
        Hadamard,
        Identity,
        KMeans,
        Lookup,
        Normal,
        PerBlock,
        PerChannel,
        PerTensor,
        Quantizer,
        RandomStep,
        Range,
        Sign,
        Step,
        Stochastic,
        Ternary,
        TopK,
        Transform,
        Uniform,
        Zstd,
    )
    from fedshift.core.types import Broadcast, DecodedUpload, GroupMean, Params, Round
    from fedshift.data import Dataset, Partition, dataset
    from fedshift.experiment.settings import Experiment
    from fedshift.rounds.federation import Outcome
    from fedshift.rounds.policy import Policy, PolicyStats
    from fedshift.rounds.uplink import Uplink
    from fedshift.runs.run import Run, resume, run
    from fedshift.wire.frame import Header, WireError
    from fedshift.wire.mean import Mean
    from fedshift.wire.writer import header, pack, size, unpack

__version__ = "0.1.0"

__all__ = [
    "QSGD",
    "Algorithm",
    "BitPack",
    "Broadcast",
    "Cast",
    "ClientRule",
    "Codec",
    "Coder",
    "Dataset",
    "DecodedUpload",
    "Experiment",
    "FixedCode",
    "GroupMean",
    "Hadamard",
    "Header",
    "Identity",
    "KMeans",
    "Lookup",
    "Mean",
    "Normal",
    "Outcome",
    "Params",
    "Partition",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "Policy",
    "PolicyStats",
    "Quantizer",
    "RandomStep",
    "Range",
    "Round",
    "Run",
    "ServerRule",
    "Sign",
    "Step",
    "Stochastic",
    "Ternary",
    "TopK",
    "Transform",
    "Uniform",
    "Uplink",
    "WireError",
    "Zstd",
    "__version__",
    "centre",
    "centred",
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

# A name is imported when it is first used: `fedshift --help` need not wait for torch.
_NAMES = {
    "fedshift.wire.mean": "Mean",
    "fedshift.algorithms": "Algorithm ClientRule ServerRule centre centred chain fedavg fedprox scaffold shift shifted",
    "fedshift.codecs": "BitPack Cast Codec Coder FixedCode Hadamard Identity KMeans Lookup Normal PerBlock PerChannel "
    "PerTensor QSGD Quantizer RandomStep Range Sign Step Stochastic Ternary TopK Transform Uniform Zstd",
    "fedshift.data": "Dataset Partition dataset",
    "fedshift.wire.frame": "Header WireError",
    "fedshift.rounds.federation": "Outcome",
    "fedshift.rounds.policy": "Policy PolicyStats",
    "fedshift.runs.run": "Run resume run",
    "fedshift.experiment.settings": "Experiment",
    "fedshift.core.types": "Broadcast DecodedUpload GroupMean Params Round",
    "fedshift.rounds.uplink": "Uplink",
    "fedshift.wire.writer": "header pack size unpack",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fedshift' has no attribute '{name}'")
    thing = getattr(import_module(_HOME[name]), name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return __all__
