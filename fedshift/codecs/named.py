"""Codecs by the names that settings use."""

from collections.abc import Callable

from fedshift.codecs.base import Codec, Coder, Groups, PerBlock, PerChannel, PerTensor, Quantizer
from fedshift.codecs.bitpack import BitPack
from fedshift.codecs.entropy import Range, Zstd
from fedshift.codecs.exact import Cast, Identity
from fedshift.codecs.kmeans import KMeans
from fedshift.codecs.step import Step
from fedshift.codecs.ternary import Ternary
from fedshift.codecs.uniform import Stochastic, Uniform

CODERS: dict[str, Callable[[], Coder]] = {"bitpack": BitPack, "zstd": Zstd, "range": Range}
GROUPS: dict[str, Groups] = {"tensor": PerTensor(), "channel": PerChannel()}
WIDTH = {"step": Step.bits, "ternary": Ternary.bits}  # bits per code before the coder; most codes are zero


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
    quantizers: dict[str, Callable[[], Quantizer]] = {
        "kmeans": lambda: KMeans(bits),
        "kmeans-random": lambda: KMeans(bits, random=True),
        "uniform": lambda: Uniform(bits),
        "stochastic": lambda: Stochastic(bits),
        "step": lambda: Step(bits, Step.step if step is None else step, rate),
        "ternary": lambda: Ternary(bits, Ternary.keep if keep is None else keep),
    }
    groups = PerBlock(per) if isinstance(per, int) else GROUPS[per]
    return Codec(quantizers[quantizer](), codes, groups, min_axes=1 if biases else 2)


def default_coder(quantizer: str, bits: int) -> str:
    """Name of the default coder: the range coder below 4 bits and for quantizers whose codes are mostly zero."""
    return "range" if bits < 4 or (bits <= 8 and quantizer in WIDTH) else "bitpack"
