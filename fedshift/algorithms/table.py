"""Algorithms by the names that settings use."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

from fedshift.algorithms.agreement import agreement
from fedshift.algorithms.base import Algorithm
from fedshift.algorithms.cmfl import cmfl
from fedshift.algorithms.ef21 import ef21
from fedshift.algorithms.fedavg import fedavg
from fedshift.algorithms.fedavgm import fedavgm
from fedshift.algorithms.fedcom import fedcom, fedcomgate
from fedshift.algorithms.feddyn import feddyn
from fedshift.algorithms.fedexp import fedexp
from fedshift.algorithms.fedhq import fedhq
from fedshift.algorithms.fedopt import fedadagrad, fedadam, fedyogi
from fedshift.algorithms.fedprox import fedprox
from fedshift.algorithms.fedvarp import fedvarp
from fedshift.algorithms.fedwsq import fedwsq
from fedshift.algorithms.grouped import grouped
from fedshift.algorithms.ldawa import ldawa
from fedshift.algorithms.scaffold import scaffold
from fedshift.algorithms.scallion import scafcom, scallion
from fedshift.algorithms.signsgd import signsgd

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedexp": fedexp,
    "feddyn": feddyn,
    "fedvarp": fedvarp,
    "fedcom": fedcom,
    "fedcomgate": fedcomgate,
    "scallion": scallion,
    "scafcom": scafcom,
    "ef21": ef21,
    "signsgd": signsgd,
    "fedhq": fedhq,
    "agreement": agreement,
    "grouped": grouped,
    "ldawa": ldawa,
    "cmfl": cmfl,
    "fedwsq": fedwsq,
}


def arguments(name: str) -> dict[str, object]:
    """Arguments of an algorithm and their defaults.

    >>> arguments("fedprox")
    {'mu': 0.01}
    """
    return {key: found.default for key, found in inspect.signature(ALGORITHMS[name]).parameters.items()}


class Method(NamedTuple):
    """Description of an algorithm."""

    name: str
    line: str  # first line of the function's docstring
    reference: str  # first line of the module's docstring
    settings: dict[str, object]


def described(name: str) -> Method:
    """Description of an algorithm, from its docstrings.

    >>> described("fedprox").reference
    'FedProx: Li et al., Federated Optimization in Heterogeneous Networks, 2020.'
    """
    make = ALGORITHMS[name]
    line, reference = (
        inspect.cleandoc(thing.__doc__ or "").partition("\n")[0] for thing in (make, inspect.getmodule(make))
    )
    return Method(name, line, reference, arguments(name))
