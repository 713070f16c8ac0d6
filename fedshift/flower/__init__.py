"""fedshift on Flower: an add-on for existing apps, and experiments as Flower apps.

from fedshift.flower import FedShift, QuantizeMod

client = ClientApp(mods=[QuantizeMod("lean")])                         # client_app.py
strategy = FedShift(FedAdam(min_train_nodes=10))                       # server_app.py: any strategy
"""

from fedshift.core.extras import needs

try:
    import flwr  # noqa: F401
except ImportError:
    raise ImportError(f"fedshift.flower {needs('flwr')}") from None

from fedshift.flower.addon.mod import QuantizeMod
from fedshift.flower.addon.outcome import Aggregated, NoUploadsError
from fedshift.flower.addon.partitions import introduce
from fedshift.flower.addon.scaffold import Scaffold, ScaffoldMod, correction
from fedshift.flower.addon.seeded import Seeded
from fedshift.flower.addon.strategy import FedShift
from fedshift.flower.app.apps import client_app, server_app

__all__ = [
    "Aggregated",
    "FedShift",
    "NoUploadsError",
    "QuantizeMod",
    "Scaffold",
    "ScaffoldMod",
    "Seeded",
    "client_app",
    "correction",
    "introduce",
    "server_app",
]
