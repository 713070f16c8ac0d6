"""Algorithms: client rules and server rules, one module per paper."""

from fedshift.algorithms.base import Algorithm, Chain, ClientRule, ServerRule, chain, defines
from fedshift.algorithms.centring import centre
from fedshift.algorithms.fedavg import Average, Plain, fedavg
from fedshift.algorithms.fedprox import Prox, fedprox
from fedshift.algorithms.fedshift import Shift, centred, layers, shift, shifted, shorter
from fedshift.algorithms.scaffold import Control, Controlled, ControlledExactly, scaffold
from fedshift.algorithms.weights import Filters, filters, weights

__all__ = [
    "Algorithm",
    "Average",
    "Chain",
    "ClientRule",
    "Control",
    "Controlled",
    "ControlledExactly",
    "Filters",
    "Plain",
    "Prox",
    "ServerRule",
    "Shift",
    "centre",
    "centred",
    "chain",
    "defines",
    "fedavg",
    "fedprox",
    "filters",
    "layers",
    "scaffold",
    "shift",
    "shifted",
    "shorter",
    "weights",
]
