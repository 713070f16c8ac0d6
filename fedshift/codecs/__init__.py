"""Quantizers (numbers <-> codes), coders (codes <-> bytes) and the groups they work on."""

from fedshift.codecs.base import Coder, Groups, Lookup, Quantizer, Transform
from fedshift.codecs.bitpack import BitPack
from fedshift.codecs.codec import Codec, PerBlock, PerChannel, PerTensor
from fedshift.codecs.entropy import Range, Zstd
from fedshift.codecs.exact import Cast, Identity
from fedshift.codecs.kmeans import KMeans
from fedshift.codecs.step import Step
from fedshift.codecs.ternary import Ternary
from fedshift.codecs.uniform import Stochastic, Uniform

__all__ = [
    "BitPack",
    "Cast",
    "Codec",
    "Coder",
    "Groups",
    "Identity",
    "KMeans",
    "Lookup",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "Quantizer",
    "Range",
    "Step",
    "Stochastic",
    "Ternary",
    "Transform",
    "Uniform",
    "Zstd",
]
