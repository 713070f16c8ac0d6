"""Algorithms by the names that settings use."""

import inspect
from collections.abc import Callable

from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.fedavg import fedavg
from fedshift.algorithms.fedprox import fedprox
from fedshift.algorithms.scaffold import scaffold

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
}


def arguments(name: str) -> dict[str, object]:
    """Arguments of an algorithm and their defaults.

    >>> arguments("fedprox")
    {'mu': 0.01}
    """
    return {key: found.default for key, found in inspect.signature(ALGORITHMS[name]).parameters.items()}
