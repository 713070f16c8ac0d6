"""Quantizers (numbers <-> codes), coders (codes <-> bytes) and the groups they work on."""

from fedshift.codecs.base import Coder, Groups, Lookup, Quantizer, Transform
from fedshift.codecs.bitpack import BitPack
from fedshift.codecs.codec import Codec, PerBlock, PerChannel, PerTensor
from fedshift.codecs.entropy import Range, Zstd
from fedshift.codecs.exact import Cast, Identity
from fedshift.codecs.kmeans import KMeans
from fedshift.codecs.normal import FixedCode, Normal
from fedshift.codecs.qsgd import QSGD
from fedshift.codecs.random_step import RandomStep
from fedshift.codecs.rotation import Hadamard
from fedshift.codecs.sign import Sign
from fedshift.codecs.sparse import TopK
from fedshift.codecs.step import Step
from fedshift.codecs.ternary import Ternary
from fedshift.codecs.uniform import Stochastic, Uniform

__all__ = [
    "QSGD",
    "BitPack",
    "Cast",
    "Codec",
    "Coder",
    "FixedCode",
    "Groups",
    "Hadamard",
    "Identity",
    "KMeans",
    "Lookup",
    "Normal",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "Quantizer",
    "RandomStep",
    "Range",
    "Sign",
    "Step",
    "Stochastic",
    "Ternary",
    "TopK",
    "Transform",
    "Uniform",
    "Zstd",
]
