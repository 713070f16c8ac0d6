"""One paper, one file."""

from fedshift.algorithms.base import Algorithm, Chain, ClientRule, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain, fedavg
from fedshift.algorithms.fedprox import Prox, fedprox
from fedshift.algorithms.fedshift import Shift, layers, shift, shifted, shorter
from fedshift.algorithms.scaffold import Control, Controlled, scaffold
from fedshift.algorithms.weights import weights

__all__ = [
    "Algorithm",
    "Average",
    "Chain",
    "ClientRule",
    "Control",
    "Controlled",
    "Plain",
    "Prox",
    "ServerRule",
    "Shift",
    "chain",
    "fedavg",
    "fedprox",
    "layers",
    "scaffold",
    "shift",
    "shifted",
    "shorter",
    "weights",
]
