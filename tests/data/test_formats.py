"""Every published format gives the same arrays; damaged and hostile files are refused."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedshift.data import files
from fedshift.data.catalog import DataError, Entry
from fedshift.data.fetch import local
from fedshift.data.formats import Arrays, python
from tests.data import small

CIFAR = [small.binary, small.python, small.png]
Writer = Callable[[Entry, Arrays], dict[str, bytes]]


def same(a: Arrays, b: Arrays) -> bool:
    return all(np.array_equal(left, right) for left, right in zip(a, b, strict=True))


@pytest.mark.parametrize("write", CIFAR)
def test_cifar10_is_the_same_from_every_format_packed_or_not(write: Writer, tmp_path: Path) -> None:
    e = small.entry("cifar10", pinned=True)
    a = small.arrays(e)
    packed = small.tar(tmp_path / "some.tar.gz", write(e, a), "cifar-10")
    unpacked = small.folder(tmp_path / "here" / "cifar-10", write(e, a))
    for source in (packed, unpacked, tmp_path / "here", unpacked / next(iter(write(e, a)))):
        found, checked = local(e, source)
        assert same(found, a)
        assert checked == "md5 of the content"


@pytest.mark.parametrize("write", CIFAR[:2])
def test_cifar100_takes_the_fine_labels(write: Writer, tmp_path: Path) -> None:
    e = small.entry("cifar100")
    found, checked = local(e, small.folder(tmp_path, write(e, small.arrays(e))))
    assert same(found, small.arrays(e))
    assert checked == "shapes, frequency of labels, mean of pixels"


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_gzipped_or_not_under_both_spellings(name: str, tmp_path: Path) -> None:
    e = small.entry(name, pinned=True)
    plain = small.idx(e, small.arrays(e))
    dotted = {key.replace("-idx", ".idx"): value for key, value in plain.items()}
    for i, written in enumerate((plain, small.gzipped(plain), dotted, small.gzipped(dotted))):
        assert same(local(e, small.folder(tmp_path / str(i), written))[0], small.arrays(e))


def test_two_data_sets_in_a_folder_are_distinguished(tmp_path: Path) -> None:
    """MNIST and Fashion-MNIST have files of the same names; their content is different."""
    e = small.entry("mnist", pinned=True)
    small.folder(tmp_path / "FashionMNIST" / "raw", small.idx(e, small.arrays(e, seed=1)))
    small.folder(tmp_path / "MNIST" / "raw", small.idx(e, small.arrays(e)))
    assert same(local(e, tmp_path)[0], small.arrays(e))


def test_an_archive_in_a_folder_is_found_behind_a_damaged_one(tmp_path: Path) -> None:
    e = small.entry("cifar10", pinned=True)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b damaged")
    small.tar(tmp_path / "cifar-10-binary.tar.gz", small.binary(e, small.arrays(e)))
    assert same(local(e, tmp_path)[0], small.arrays(e))


def test_a_pickle_written_by_python_2_is_read() -> None:
    """As in the published archive: texts are byte strings, also inside the array."""
    raw = bytes(range(256)) * 12
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01M\x00\x0c\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<I", len(raw))
        + raw
        + b"tb"
    )
    batch = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x09eu."
    e = small.entry("cifar10", train=5, test=1)
    x, y, test_x, test_y = python(e, [batch] * 6)
    assert x.shape == (5, 3, 32, 32)
    assert y.tolist() == [9] * 5
    assert test_x.tobytes() == raw
    assert test_y.tolist() == [9]


class Hostile:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/owned",)


@pytest.mark.parametrize("evil", [Hostile(), np.frompyfunc, eval, getattr])
def test_a_pickle_that_would_run_code_is_refused(evil: object, tmp_path: Path) -> None:
    e = small.entry("cifar10")
    written = small.python(e, small.arrays(e)) | {"data_batch_1": pickle.dumps(evil)}
    with pytest.raises(DataError, match=r"refused: it imports .*only arrays are read"):
        local(e, small.folder(tmp_path, written))


@pytest.mark.parametrize("write", CIFAR)
@pytest.mark.parametrize(
    "damage", [lambda d: d[:-40], lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"\x80" * 9]
)
def test_a_damaged_file_is_refused(write: Writer, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    e = small.entry("cifar10", pinned=True)
    written = write(e, small.arrays(e))
    first = next(name for name in written if name.startswith("data_batch_1"))
    with pytest.raises(DataError, match="cifar10"):
        local(e, small.folder(tmp_path, written | {first: damage(written[first])}))


def test_one_wrong_pixel_is_found(tmp_path: Path) -> None:
    e = small.entry("cifar10", pinned=True)
    a = small.arrays(e)
    a[0][17, 1, 2, 3] ^= 1
    with pytest.raises(DataError, match="data_batch_2 is damaged or not part of cifar10: its md5 is"):
        local(e, small.folder(tmp_path, small.binary(e, a)))


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[:3], lambda d: b"\x1f\x8b" + d, lambda d: b"<html>" + d]
)
def test_a_damaged_idx_file_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    e = small.entry("mnist")
    written = small.idx(e, small.arrays(e))
    with pytest.raises(DataError, match=r"mnist|IDX"):
        local(e, small.folder(tmp_path, written | {e.parts[0]: damage(written[e.parts[0]])}))


def test_an_archive_without_content_digest_is_verified_by_its_own_digest(tmp_path: Path) -> None:
    e = small.entry("cifar100")
    packed = small.tar(tmp_path / "cifar-100-binary.tar.gz", small.binary(e, small.arrays(e)))
    with pytest.raises(DataError, match="the archive is damaged or not part of cifar100: its md5 is"):
        local(replace(e, files={"cifar-100-binary.tar.gz": "0" * 32}), packed)
    right = files.look(packed)[0].md5
    assert local(replace(e, files={"cifar-100-binary.tar.gz": right}), packed)[1] == "md5 of the archive"


def test_unpacked_pickles_without_content_digest_are_verified_by_their_own_digests(tmp_path: Path) -> None:
    e = small.entry("cifar100")
    written = small.python(e, small.arrays(e))
    source = small.folder(tmp_path, written)
    known = {name: hashlib.md5(data).hexdigest() for name, data in written.items()}
    assert local(replace(e, files=known), source)[1] == "md5 of the files"
    with pytest.raises(DataError, match="test is damaged"):
        local(replace(e, files=known | {"test": "0" * 32}), source)


def test_a_copy_without_any_digest_must_have_the_known_mean_and_label_counts(tmp_path: Path) -> None:
    e = small.entry("cifar100")
    a = small.arrays(e)
    with pytest.raises(DataError, match="its mean pixel is"):
        local(replace(e, mean=(0.1, 0.2, 0.3)), small.folder(tmp_path / "a", small.binary(e, a)))
    a[1][0] += 1
    with pytest.raises(DataError, match="labels are equally frequent"):
        local(e, small.folder(tmp_path / "b", small.binary(e, a)))


def test_paths_in_an_archive_are_not_written_to(tmp_path: Path) -> None:
    e = small.entry("cifar10")
    for inside in ("../../outside", "/outside"):
        packed = small.tar(tmp_path / "some.tar.gz", small.binary(e, small.arrays(e)), inside)
        assert same(local(e, packed)[0], small.arrays(e))
    assert [p.name for p in tmp_path.rglob("*")] == ["some.tar.gz"]


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    e = small.entry("cifar10")
    written = small.binary(e, small.arrays(e))
    link = tarfile.TarInfo("data_batch_1.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "some.tar", "w") as out:
        out.addfile(link)
        for name in [*written][1:]:
            member = tarfile.TarInfo(name)
            member.size = len(written[name])
            out.addfile(member, io.BytesIO(written[name]))
    with pytest.raises(DataError, match="cifar10 is not in it"):
        local(e, tmp_path / "some.tar")


def test_files_larger_than_any_published_one_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "LARGEST", 1000)
    e = small.entry("mnist")
    zeros = dict.fromkeys(e.parts, bytes(5000))
    with pytest.raises(DataError, match="no published file"):
        local(e, small.folder(tmp_path / "a", zeros))
    with pytest.raises(DataError, match="no published file"):
        local(e, small.folder(tmp_path / "b", small.gzipped(zeros)))
    with pytest.raises(DataError, match="no published archive"):
        local(e, small.tar(tmp_path / "c.tgz", zeros))


def test_a_source_that_is_missing_or_has_other_content_is_refused(tmp_path: Path) -> None:
    e = small.entry("cifar10")
    with pytest.raises(DataError, match=r"nowhere: no such file or folder; it must be cifar-10-python.tar.gz"):
        local(e, tmp_path / "nowhere")
    with pytest.raises(DataError, match="cifar10 is not in it; it must be"):
        local(e, tmp_path)
    (tmp_path / "x.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="the archive is damaged"):
        local(e, tmp_path / "x.tar.gz")
