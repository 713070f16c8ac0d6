"""For all tests of Flower."""

import gc
import random

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def _old_objects_stay() -> None:
    """Some strategies of Flower's collect garbage after every array, which would look through all that was imported."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Flower draws nodes and noise from generators that nobody seeds."""
    random.seed(3)
    np.random.seed(3)
