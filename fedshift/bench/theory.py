"""Rate and distortion of the best scalar quantizers, in theory and of given values.

In theory values are generalised normal, p(x) proportional to exp(-(|x| / a)^beta), with variance 1:

    beta = 2 is normal, 1 Laplace, below 1 has heavy tails, like updates of a network

Distortion is the mean squared error, relative to the mean square of the values.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gamma, gammainc, gammaln

Floats = NDArray[np.float64]

DEAD_ZONES = np.arange(0.5, 0.76, 0.025)  # half of the zero level's width, in steps
LEVELS = 400  # per sign
STEPS = np.geomspace(0.02, 60.0, 240)
BORDERS = np.exp2(np.arange(-12 * 64, 12 * 64 + 1) / 64)  # of intervals of magnitudes, in root mean squares
PRICES = np.geomspace(1e-4, 16.0, 60)  # of a bit, in mean squares


def fitted(values: Floats) -> float:
    """beta of the generalised normal distribution with the same E[x^2] / E[|x|]^2, between 0.2 and 4.

    >>> round(fitted(np.random.default_rng(0).laplace(size=200_000)), 1)
    1.0
    """
    size = np.abs(values)
    ratio = float((size * size).mean() / size.mean() ** 2)

    def excess(beta: float) -> float:
        return float(np.exp(gammaln(1 / beta) + gammaln(3 / beta) - 2 * gammaln(2 / beta))) - ratio

    low, high = 0.2, 4.0
    if excess(low) <= 0 or excess(high) >= 0:
        return low if excess(low) <= 0 else high
    return float(brentq(excess, low, high))


def shannon_bound(beta: float, rate: float) -> float:
    """D >= 2^(2 h - 2 R) / (2 pi e), with h the differential entropy: no code has a lower distortion.

    For normal values it is 2^(-2 R):

    >>> round(shannon_bound(2.0, 1.0), 4)
    0.25
    """
    a = _scale(beta)
    h = 1 / (beta * math.log(2)) - math.log2(beta / (2 * a * gamma(1 / beta)))
    return float(2 ** (2 * h - 2 * rate) / (2 * math.pi * math.e))


class RateCurve(NamedTuple):
    """Points of the best entropy-coded scalar quantizers, by ascending rate."""

    rates: Floats  # bits per value
    distortions: Floats

    def distortion(self, rate: float) -> float:
        return float(np.exp(np.interp(rate, self.rates, np.log(self.distortions))))

    def rate(self, distortion: float) -> float:
        """Bits per value that the best scalar quantizer needs for this distortion."""
        return float(np.interp(-math.log(distortion), -np.log(self.distortions), self.rates))


@cache
def scalar(beta: float) -> RateCurve:
    """Entropy-coded uniform quantization with a dead zone and centroids (Gish and Pierce 1968), for many steps.

    >>> [round(scalar(2.0).distortion(rate), 2) for rate in (0.5, 1, 2)]
    [0.62, 0.35, 0.09]
    """
    points = [_point(beta, step, dead) for step in STEPS for dead in DEAD_ZONES]
    points.sort()
    rates, distortions, lowest = [], [], math.inf
    for rate, distortion in points:  # the lower envelope
        if distortion < lowest:
            lowest = distortion
            rates.append(rate)
            distortions.append(distortion)
    return RateCurve(np.array(rates), np.array(distortions))


def best_scalar(values: Floats) -> RateCurve:
    """Entropy-coded scalar quantizers of these values with the least D + price H, for many prices.

    An interval with a share p of the values and their mean m reduces D by p m^2 and adds -p log2 p to H. The best
    division into intervals is therefore a shortest path between borders (Muresan and Effros 2008). It assumes nothing
    about the distribution. The rate does not include the levels, which take few of the bits of many values.

    >>> curve = best_scalar(np.random.default_rng(0).normal(size=100_000))
    >>> [round(curve.distortion(rate), 2) for rate in (1, 2)]
    [0.35, 0.09]
    """
    x = values / math.sqrt((values * values).mean())
    place = np.searchsorted(np.concatenate([-BORDERS[::-1], BORDERS]), x)
    counts, sums = np.bincount(place), np.bincount(place, x)
    used = counts > 0
    share, first = (np.append(0.0, part[used].cumsum() / len(x)) for part in (counts, sums))
    points = sorted({segmented(share, first, price) for price in PRICES}, key=lambda point: (point[0], -point[1]))
    return RateCurve(*np.array(points).T)


def segmented(share: Floats, first: Floats, price: float) -> tuple[float, float]:
    """Rate and distortion of the best intervals, from the shares and the sums of x below each border."""
    least, start = np.zeros(len(share)), np.zeros(len(share), np.int64)  # cost below a border, and the border before it
    for end in range(1, len(share)):
        p, m = share[end] - share[:end], first[end] - first[:end]
        cost = least[:end] - m * m / p - price * p * np.log2(p)
        start[end] = cost.argmin()
        least[end] = cost[start[end]]
    borders = [len(share) - 1]
    while borders[-1]:
        borders.append(int(start[borders[-1]]))
    p, m = -np.diff(share[borders]), -np.diff(first[borders])
    return float(-(p * np.log2(p)).sum()) + 0.0, max(1 - float((m * m / p).sum()), 1e-12)


def _point(beta: float, step: float, dead: float) -> tuple[float, float]:
    """Rate and distortion for one step: entropy of the codes, and 1 minus the energy of the centroids."""
    edges = np.concatenate([[0.0], step * (dead + np.arange(LEVELS))])
    power = (edges / _scale(beta)) ** beta
    mass = np.diff(gammainc(1 / beta, power), append=1.0)  # both signs; append: beyond the last edge
    first = np.diff(_scale(beta) * gamma(2 / beta) / gamma(1 / beta) * gammainc(2 / beta, power))
    first = np.append(first, _scale(beta) * gamma(2 / beta) / gamma(1 / beta) - first.sum())
    zero, share = mass[0], mass[1:] / 2
    used = share > 1e-300
    entropy = -2 * float((share[used] * np.log2(share[used])).sum())
    entropy -= zero * math.log2(zero) if zero > 0 else 0.0
    kept = float((first[1:][used] ** 2 / mass[1:][used]).sum())
    return entropy, max(1 - kept, 1e-12)


def _scale(beta: float) -> float:
    """a, for variance 1."""
    return math.exp((gammaln(1 / beta) - gammaln(3 / beta)) / 2)
