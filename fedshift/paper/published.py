"""The paper's numbers as printed: top-1 accuracy in percent, ± a spread that the paper does not define."""

import math
from typing import NamedTuple


class Figure(NamedTuple):
    """mean ± spread; the mean is None if the paper reports a failed training."""

    mean: float | None
    spread: float | None = None

    def __str__(self) -> str:
        """
        >>> str(Figure(59.7, 1.3)), str(Figure(66.2)), str(Figure(None))
        ('59.7 ± 1.3', '66.2', 'fails')
        """
        if self.mean is None:
            return "fails"
        return f"{self.mean:.1f}" + ("" if self.spread is None else f" ± {self.spread:.1f}")


BITS = (4, 5, 6, 7, 8)
ALPHAS = (0.1, 0.5, 100.0)
FEDAVG = Figure(66.2)  # 32+32

# Table 1, by algorithm: for 4, 5, 6, 7 and 8 bits, without and with the shift
_TABLE1 = {
    "fedpaq": (
        ("59.7±1.3", "62.7±1.1", "64.3±0.9", "65.4±1.0", "66.0±0.9"),
        ("62.5±1.3", "66.9±0.9", "69.3±1.1", "70.2±0.8", "70.4±0.8"),
    ),
    "fedef": (
        ("64.8±1.6", "65.3±1.7", "64.9±1.8", "64.9±2.6", "65.5±1.9"),
        ("65.5±3.6", "67.0±0.5", "68.8±1.0", "70.3±0.6", "70.1±0.7"),
    ),
    "fedprox": (
        ("60.1±1.3", "63.5±0.9", "65.2±0.9", "66.4±0.7", "66.6±0.6"),
        ("62.6±1.2", "66.6±1.0", "69.0±0.7", "70.5±0.6", "70.5±0.6"),
    ),
    "scaffold": (
        ("62.9±2.0", "66.5±2.7", "66.9±1.4", "66.7±1.8", "66.8±1.7"),
        ("65.9±1.5", "67.9±1.6", "68.8±1.3", "69.7±1.5", "69.6±1.5"),
    ),
}

# Table 2, by quantizer and alpha: the same columns, FedPAQ
_TABLE2 = {
    ("uniform", 0.1): (
        ("fails", "45.6±6.79", "59.0±1.83", "62.5±1.35", "62.5±1.64"),
        ("fails", "58.3±2.70", "61.5±1.91", "64.3±1.35", "64.7±1.58"),
    ),
    ("uniform", 0.5): (
        ("fails", "43.2±28.63", "67.3±1.11", "68.9±0.60", "68.8±0.94"),
        ("fails", "59.4±2.27", "70.1±0.98", "71.5±0.82", "72.1±0.71"),
    ),
    ("uniform", 100.0): (
        ("fails", "64.3±1.97", "71.1±0.46", "72.2±0.49", "72.1±0.12"),
        ("fails", "67.4±2.89", "74.1±0.40", "75.5±0.85", "75.5±0.57"),
    ),
    ("kmeans", 0.1): (
        ("53.3±1.17", "57.3±1.86", "60.1±1.32", "61.5±1.46", "62.1±1.32"),
        ("53.3±2.31", "57.8±1.83", "61.5±1.36", "63.7±1.11", "64.1±1.24"),
    ),
    ("kmeans", 0.5): (
        ("63.3±1.06", "65.7±1.00", "66.9±1.16", "68.1±0.66", "66.1±0.96"),
        ("65.2±1.14", "66.6±0.97", "70.0±0.65", "71.4±0.43", "71.7±0.69"),
    ),
    ("kmeans", 100.0): (
        ("68.5±0.39", "70.2±0.26", "71.1±0.87", "71.7±0.29", "71.9±0.25"),
        ("70.6±0.58", "72.3±0.38", "74.2±0.26", "75.2±0.32", "75.5±0.51"),
    ),
}


def _figure(text: str) -> Figure:
    return Figure(None) if text == "fails" else Figure(*map(float, text.split("±")))


TABLE1: dict[tuple[str, int, bool], Figure] = {
    (algorithm, bits, shift): _figure(text)
    for algorithm, halves in _TABLE1.items()
    for shift, half in zip((False, True), halves, strict=True)
    for bits, text in zip(BITS, half, strict=True)
}
TABLE2: dict[tuple[str, float, int, bool], Figure] = {
    (quantizer, alpha, bits, shift): _figure(text)
    for (quantizer, alpha), halves in _TABLE2.items()
    for shift, half in zip((False, True), halves, strict=True)
    for bits, text in zip(BITS, half, strict=True)
}


class Cost(NamedTuple):
    """Line of Table 3, measured on an M1 Pro."""

    kilobytes: float  # codes
    side: float  # kilobytes of side data
    seconds: float  # to encode

    @property
    def bytes(self) -> float:
        """Size rounded up to whole kilobytes, as in the paper's rule."""
        return 1e3 * math.ceil(self.kilobytes + self.side)


# the paper's KB of fp32 weights are KiB; its rule counts them as KB, and so does this table
TABLE3 = {
    "Identity": Cost(8421, 0, 0),
    "Uniform(4)": Cost(1052, 0.25, 0.010),
    "Uniform(8)": Cost(2105, 0.25, 0.010),
    "KMeans(4)": Cost(1052, 6.19, 0.179),
    "KMeans(8)": Cost(2105, 88.82, 2.172),
}
