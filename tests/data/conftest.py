"""An empty cache, and a CIFAR-10 of 60 images to fetch."""

from pathlib import Path

import pytest

from fedshift.data.catalog import CATALOG, Entry
from tests.data import small


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A CIFAR-10 of 60 images, whose home page and package do not exist."""
    few = small.entry("cifar10", pinned=True, home=("file:///nowhere/cifar-10-binary.tar.gz",))
    monkeypatch.setitem(CATALOG, "cifar10", few)
    return few


@pytest.fixture
def archive(entry: Entry, tmp_path: Path) -> Path:
    return small.tar(tmp_path / "cifar-10-binary.tar.gz", small.binary(entry, small.arrays(entry)))
