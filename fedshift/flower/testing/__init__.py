"""Tools to test Flower apps: a grid in this process, and a deployment on this machine."""

from fedshift.flower.testing.deployment import Deployment
from fedshift.flower.testing.grid import LocalGrid

__all__ = ["Deployment", "LocalGrid"]
