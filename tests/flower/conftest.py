"""For all tests of Flower."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _old_objects_stay() -> None:
    """Some strategies of Flower's collect garbage after every array, which would look through all that was imported."""
    gc.freeze()
