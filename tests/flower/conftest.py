"""Fixtures for all tests of Flower."""

import gc
import random

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def _old_objects_stay() -> None:
    """Exclude imported objects from garbage collection, which some strategies of Flower run after every array."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Seed the generators from which Flower draws nodes and noise."""
    random.seed(3)
    np.random.seed(3)
