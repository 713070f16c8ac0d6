"""Fetching stores a complete data set in the cache or none, from any source."""

import errno
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.data import DataError, cache, fetch, load
from fedshift.data.catalog import Entry, find
from tests.data import small

module = importlib.import_module("fedshift.data.fetch")  # the package's name of the same is the function


def test_from_a_local_copy_to_a_data_set(entry: Entry, archive: Path, folder: Path) -> None:
    assert fetch("cifar10", archive) == folder / "cifar10.safetensors"
    data = load("cifar10")
    x, y, test_x, test_y = small.arrays(entry)
    assert np.array_equal(data.x, x)
    assert np.array_equal(data.test_x, test_x)
    assert data.y.tolist() == y.tolist()
    assert data.test_y.tolist() == test_y.tolist()
    assert (data.x.dtype, data.y.dtype, data.classes) == (torch.uint8, torch.int64, 10)
    assert [p.name for p in folder.iterdir()] == ["cifar10.safetensors"]


def test_a_cached_data_set_is_not_fetched_again(archive: Path) -> None:
    before = fetch("cifar10", archive).stat().st_mtime_ns
    archive.unlink()
    assert fetch("cifar10").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", [lambda d: d[:-9] + b"damaged!!", lambda d: d[:-1], lambda d: d[:50], lambda d: b""])
def test_a_damaged_cache_is_reported_and_replaced(damage: Callable[[bytes], bytes], archive: Path) -> None:
    file = fetch("cifar10", archive)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"cifar10.safetensors: .*delete it and run `fedshift data cifar10`"):
        load("cifar10")
    fetch("cifar10", archive)
    assert len(load("cifar10").x) == 50


def test_a_full_disk_is_reported_and_leaves_no_file(
    archive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); set FEDSHIFT_DATA to another"):
        fetch("cifar10", archive)
    assert list(folder.iterdir()) == []


def test_a_pipe_or_device_is_not_read(tmp_path: Path) -> None:
    """It may have no end."""
    os.mkfifo(tmp_path / "pipe.zip")
    for source in (tmp_path / "pipe.zip", Path("/dev/zero")):
        with pytest.raises(DataError, match=f"{source.name}: not a file"):
            fetch("mnist", source)


def test_a_folder_that_cannot_be_created_is_reported_before_the_download(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"file/cache: cannot be written"):
        fetch("cifar10")


def test_temporary_files_of_killed_processes_are_removed_after_an_hour(archive: Path, folder: Path) -> None:
    folder.mkdir()
    old, new = folder / ".cifar10.safetensors-old", folder / ".cifar10.safetensors-new"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    fetch("cifar10", archive)
    assert sorted(p.name for p in folder.iterdir()) == [new.name, "cifar10.safetensors"]


def test_an_unknown_name_gets_a_suggestion(folder: Path) -> None:
    with pytest.raises(DataError, match="unknown data set 'cifar-10'; did you mean 'cifar10'"):
        fetch("cifar-10")


CIFAR10 = find("cifar10")


@pytest.mark.skipif(
    not cache.path(CIFAR10).exists(), reason="CIFAR-10 is not in the cache; `fedshift data cifar10` fetches it"
)
def test_the_real_cifar10_survives_a_round_trip_through_its_published_layout(tmp_path: Path) -> None:
    """Known from other sources: the first labels, the mean of the pixels, and the md5 of every batch."""
    data = load("cifar10")
    assert data.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.test_y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    mean = data.x.numpy().mean(axis=(0, 2, 3)) / 255
    assert mean == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=1e-8)
    arrays = data.x.numpy(), data.y.byte().numpy(), data.test_x.numpy(), data.test_y.byte().numpy()
    _, checked = module.local(CIFAR10, small.folder(tmp_path, small.binary(CIFAR10, arrays)))
    assert checked == "md5 of the content"
