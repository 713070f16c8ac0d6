"""Statistics of uploads: drift, relative error and histograms of weights, before and after coding."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedshift.core.types import Params
from fedshift.rounds.engine import Histogram

BINS = 64


def wide(x: Tensor) -> Tensor:
    """x in float32 or float64"""
    return x if x.dtype == torch.float64 else x.float()


def drift(w: Tensor, start: Tensor) -> Tensor:
    """|w_k - w_t| of a layer: () for one client, (K,) for K stacked on a leading axis.

    >>> start = torch.tensor([1.0, 1.0])
    >>> drift(torch.tensor([4.0, 5.0]), start), drift(torch.tensor([[4.0, 5.0], [1.0, 1.0]]), start)
    (tensor(5.), tensor([5., 0.]))
    """
    axes = tuple(range(-start.ndim - 1, 0))  # one more than those of the layer, because () would mean all axes
    norm: Tensor = torch.linalg.vector_norm(wide(w - start).unsqueeze(-1), dim=axes)
    return norm


def relative_error(u: Params, error: Params) -> float:
    """|u - Q(u)| / |u| over all quantized tensors of one client, 0 if nothing was lost.

    `stacked_relative_errors` is the same on a device. The last bits of both differ: `math.hypot` rounds once.
    """
    lost = math.hypot(*(float(torch.linalg.vector_norm(e)) for e in error.values()))
    whole = math.hypot(*(float(torch.linalg.vector_norm(u[name])) for name in error))
    return lost / whole if whole else 0.0


def stacked_relative_errors(u: Params, arrived: Params) -> Tensor:
    """|u - Q(u)| / |u| over all quantized tensors of each of K stacked clients: (K,) float64"""
    first = next(iter(arrived.values()))
    lost, whole = torch.zeros((2, len(first)), dtype=torch.float64, device=first.device)
    for name, x in arrived.items():
        rows = flat(u[name])
        lost += torch.linalg.vector_norm(rows - flat(x), dim=1).double().square()
        whole += torch.linalg.vector_norm(rows, dim=1).double().square()
    return torch.where(whole > 0, (lost / whole).sqrt(), 0.0)


def flat(x: Tensor) -> Tensor:
    """(K, ...) -> (K, n), in float32 or float64"""
    return wide(x.reshape(len(x), -1))


def histograms(u: Params, error: Params, layers: Sequence[str]) -> tuple[Histogram, ...]:
    """Histograms of each quantized layer of one client, before and after the quantizer."""
    result = []
    for name in layers:
        if name in error:
            x = u[name].float()
            low, high = map(float, torch.aminmax(x))
            counts = [_counts(values, low, high) for values in (x, x - error[name].float())]
            result.append(Histogram(name, low, high, *counts))
    return tuple(result)


def _counts(x: Tensor, low: float, high: float) -> list[int]:
    """Number of values in each of equal bins; torch.histc has no deterministic form on a GPU.

    >>> counts = _counts(torch.tensor([0.0, 0.1, 0.9, 1.0]), 0.0, 1.0)
    >>> sum(counts[: BINS // 2]), counts[-1]
    (2, 1)
    """
    at = ((x.flatten() - low) * (BINS / (high - low) if high > low else 0.0)).long().clamp_(0, BINS - 1)
    counts: list[int] = torch.bincount(at, minlength=BINS).tolist()
    return counts
