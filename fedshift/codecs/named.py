"""Codecs by the names that settings use."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from fedshift.codecs.base import Coder, Groups, Quantizer
from fedshift.codecs.bitpack import BitPack
from fedshift.codecs.codec import Codec, PerBlock, PerChannel, PerTensor
from fedshift.codecs.entropy import Range, Zstd
from fedshift.codecs.exact import Cast, Identity
from fedshift.codecs.kmeans import KMeans
from fedshift.codecs.normal import eden, fixed
from fedshift.codecs.qsgd import qsgd
from fedshift.codecs.random_step import RandomStep
from fedshift.codecs.sign import sign
from fedshift.codecs.sparse import fedzip, qsparse
from fedshift.codecs.step import Step, common_step
from fedshift.codecs.ternary import Ternary, topk
from fedshift.codecs.uniform import Stochastic, Uniform


class NamedQuantizer(NamedTuple):
    """A quantizer of 1 to 8 bits: a function of `bits` and `sizes`, and one line about it."""

    make: Callable[..., Quantizer]
    line: str
    sizes: Mapping[str, float | None] = MappingProxyType({})  # further settings, and their defaults


QUANTIZERS = {
    "kmeans": NamedQuantizer(KMeans, "2^bits means of the values, and the nearest mean of each value."),
    "kmeans-random": NamedQuantizer(
        partial(KMeans, random=True), "The same means; values are rounded at random, without bias."
    ),
    "uniform": NamedQuantizer(Uniform, "Evenly spaced values between minimum and maximum, nearest rounding."),
    "stochastic": NamedQuantizer(Stochastic, "The same grid; values are rounded at random, without bias (QSGD)."),
    "step": NamedQuantizer(
        Step,
        "Nearest multiples of a step, most codes zero: `rate` bits per value, or `step` times the root mean square.",
        {"step": Step.step, "rate": Step.rate},
    ),
    "step-random": NamedQuantizer(
        RandomStep,
        "Multiples of a step, rounded at random, without bias: `rate` bits per value.",
        {"rate": RandomStep.rate},
    ),
    "ternary": NamedQuantizer(
        Ternary, "The fraction `keep` of largest values as two numbers, all others zero (STC).", {"keep": Ternary.keep}
    ),
}
# codecs with arguments of their own: `codec = {name = "...", ...}`
CODECS: dict[str, Callable[..., Codec]] = {
    "qsgd": qsgd,
    "sign": sign,
    "eden": eden,
    "fixed": fixed,
    "fedzip": fedzip,
    "qsparse": qsparse,
    "topk": topk,
    "common-step": common_step,
}
CODERS: dict[str, Callable[[], Coder]] = {"bitpack": BitPack, "zstd": Zstd, "range": Range}
GROUPS: dict[str, Groups] = {"tensor": PerTensor(), "channel": PerChannel()}
# bits per code before the coder; most codes are zero
WIDTH = {"step": Step.bits, "step-random": RandomStep.bits, "ternary": Ternary.bits}


def make_codec(
    quantizer: str,
    bits: int,
    *,
    step: float | None = None,
    rate: float | None = None,
    keep: float | None = None,
    coder: str = "auto",
    per: str | int = "tensor",
    biases: bool = False,
) -> Codec:
    """Codec with these settings; ValueError if they contradict each other.

    >>> make_codec("step", 8, rate=0.5) == Codec(Step(rate=0.5), Range())
    True
    """
    codes = CODERS[default_coder(quantizer, bits) if coder == "auto" else coder]()
    if bits == 32:
        return Codec(Identity(), codes)
    if bits == 16:
        return Codec(Cast("bfloat16"), codes)
    chosen, given = QUANTIZERS[quantizer], {"step": step, "rate": rate, "keep": keep}
    sizes = {name: given[name] for name in chosen.sizes if given[name] is not None}
    groups = PerBlock(per) if isinstance(per, int) else GROUPS[per]
    return Codec(chosen.make(bits, **sizes), codes, groups, min_axes=1 if biases else 2)


def default_coder(quantizer: str, bits: int) -> str:
    """Name of the default coder: the range coder below 4 bits and for quantizers whose codes are mostly zero."""
    return "range" if bits < 4 or (bits <= 8 and quantizer in WIDTH) else "bitpack"
