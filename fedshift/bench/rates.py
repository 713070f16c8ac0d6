"""Error of every codec at about 0.5, 1 and 2 bits per value, on one client's update of the paper's CNN, beside theory.

The largest layer of the update is encoded as a frame of its own. Codecs are compared with the best entropy-coded scalar
quantizer of a generalised normal distribution that is fitted to it, and with that of the values themselves, which does
not depend on the quality of the fit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedshift.bench.codecs import Target
from fedshift.bench.theory import RateCurve, best_scalar, fitted, scalar, shannon_bound
from fedshift.codecs import Codec, KMeans, RandomStep, Range, Step, Stochastic, Ternary, Uniform
from fedshift.codecs.named import CODECS
from fedshift.core.rng import key
from fedshift.core.tables import Listing
from fedshift.core.types import Params
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import merge
from fedshift.rounds.uplink import read
from fedshift.runs.run import Run, resume
from fedshift.wire.measure import squared
from fedshift.wire.writer import pack, unpack

TARGETS = (0.5, 1.0, 2.0)  # bits per value
CLOSE = 0.25  # largest relative difference of a rate from its target
GAP = 0.1  # bits: the bar for the best codec
OF = ("the fit", "the values")  # data for which the reference quantizers are optimal
Make = Callable[[float], Codec]

# codecs whose rate depends on a number, which is searched; those of integers have a list of them
SEARCHED: dict[str, tuple[Make, float, float]] = {
    "step": (lambda rate: Codec(Step(rate=rate), Range()), 0.05, 4.0),
    "step-random": (lambda rate: Codec(RandomStep(rate=rate), Range()), 0.05, 4.0),
    "common-step": (lambda rate: CODECS["common-step"](rate=rate), 0.05, 4.0),
    "ternary": (lambda keep: Codec(Ternary(keep=keep), Range()), 1e-4, 0.9),
    "topk": (lambda keep: CODECS["topk"](keep=keep), 1e-4, 0.9),
    "fedzip": (lambda keep: CODECS["fedzip"](keep=keep), 1e-4, 0.9),
    "qsparse": (lambda keep: CODECS["qsparse"](keep=keep), 1e-4, 0.9),
}
LISTED: dict[str, tuple[Callable[[int], Codec], Sequence[int]]] = {
    "kmeans": (lambda bits: Codec(KMeans(bits), Range()), (1, 2, 3)),
    "kmeans-random": (lambda bits: Codec(KMeans(bits, random=True), Range()), (1, 2, 3)),
    "uniform": (lambda bits: Codec(Uniform(bits), Range()), (1, 2, 3, 4, 5, 6)),
    "stochastic": (lambda bits: Codec(Stochastic(bits), Range()), (1, 2, 3, 4, 5, 6)),
    "qsgd": (lambda s: CODECS["qsgd"](s=s), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)),
    "qsgd, l2": (lambda s: CODECS["qsgd"](s=s, norm="l2", bucket=0), (1, 2, 4, 8, 16, 32, 64, 127)),
    "eden": (lambda bits: CODECS["eden"](bits=bits), (1, 2, 3)),
    "sign": (lambda _: CODECS["sign"](), (1,)),
}


class RatePoint(NamedTuple):
    """One codec near one target rate."""

    codec: str
    target: float
    bits: float  # per value, of a real frame
    distortion: float  # squared error, relative to the values
    gaps: tuple[float, ...]  # bits more than scalar quantizers need for the same distortion, for each given curve


def update_of(folder: Path | None) -> tuple[Params, int]:
    """Update of the first client of the next round of a recorded run, or of the paper's first round; and the round."""
    if folder is not None:
        run = resume(folder)
    else:
        changes = {"uplink": {"bits": "32+32"}, "shift": {"on": False}, "engine": {"name": "sequential"}}
        run = Run(Experiment(**merge(PRESETS["paper"], changes)))
    with run:
        opened = run.begin()
        assert opened.job is not None
        start, upload = opened.job.sent.params, next(iter(run.engine.train([opened.job])[0]))
        w = read(upload.frame, start)
        return {name: (w[name] - start[name]).cpu() for name in run.fed.task.trained}, opened.job.number


def points(x: Tensor, curves: Sequence[RateCurve], tick: Callable[[str], None]) -> Iterator[RatePoint]:
    """Points of every codec, at the parameter whose rate is nearest to each target; none if it is not near."""
    for name in (*SEARCHED, *LISTED):
        for target in TARGETS:
            tick(f"{name}, {target:g} bits")
            bits, distortion = _searched(x, *SEARCHED[name], target) if name in SEARCHED else _listed(x, name, target)
            if abs(bits - target) <= CLOSE * target and distortion < 1:
                gaps = tuple(bits - curve.rate(distortion) for curve in curves)
                yield RatePoint(name, target, bits, distortion, gaps)


def _measured(x: Tensor, codec: Codec) -> tuple[float, float]:
    """Bits per value of a frame, and the distortion."""
    params = {"x": x}
    frame = pack(codec, params, key=key(0, "rates"))
    return 8 * len(frame) / x.numel(), squared(x, unpack(frame, params)["x"]) / squared(x, 0 * x[:1])


def _searched(x: Tensor, make: Make, low: float, high: float, target: float) -> tuple[float, float]:
    """Rate and distortion at the number whose rate, which rises with it, is nearest to the target: by bisection."""
    for _ in range(12):
        middle = (low * high) ** 0.5
        bits, distortion = _measured(x, make(middle))
        if abs(bits - target) < 0.005 * target:
            break
        low, high = (middle, high) if bits < target else (low, middle)
    return bits, distortion


def _listed(x: Tensor, name: str, target: float) -> tuple[float, float]:
    make, numbers = LISTED[name]
    return min((_measured(x, make(number)) for number in numbers), key=lambda found: abs(found[0] - target))


def measure(folder: Path | None, tick: Callable[[str], None]) -> tuple[dict[str, str], list[Target], Listing]:
    """Update and its fit, targets, and the table of all codecs."""
    tick("the update of a client")
    params, number = update_of(folder)
    name, x = max(params.items(), key=lambda item: item[1].numel())
    values = x.double().numpy().ravel().astype(np.float64)
    beta = fitted(values)
    curves = dict(zip(OF, (scalar(round(beta, 3)), best_scalar(values)), strict=True))
    found = list(points(x, list(curves.values()), tick))
    about = {"update": f"{name}, {x.numel():,} values, round {number}", "fitted beta": f"{beta:.2f}"}
    targets, lines = [], list[tuple[str, ...]]()
    for target in TARGETS:
        near = sorted((point for point in found if point.target == target), key=lambda point: point.gaps[::-1])
        theory = {f"best scalar quantizer of {of}": curve.distortion(target) for of, curve in curves.items()}
        theory["Shannon's bound of the fit"] = shannon_bound(beta, target)
        lines += [(f"{target:g}", what, f"{target:.2f}", f"{least:.4f}", "", "") for what, least in theory.items()]
        for point in near:
            gaps = (f"{gap:+.2f}" for gap in point.gaps)
            lines.append((f"{target:g}", point.codec, f"{point.bits:.2f}", f"{point.distortion:.4f}", *gaps))
        for i, of in enumerate(OF):
            gap = min((point.gaps[i] for point in near), default=math.inf)
            what = f"bits of the best codec beyond scalar quantization of {of}, {target:g} bits"
            targets.append(Target(what, f"<= {GAP}", round(gap, 3), gap <= GAP))
    columns = "about", "codec", "bits per\nvalue", "relative\nsquared error", *(f"bits beyond\n{of}" for of in OF)
    return about, targets, Listing(f"Codecs on the update of {name}", columns, lines, 2)
