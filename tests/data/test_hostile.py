"""Archives, pickles and files of arrays built to exhaust memory are refused with a message and little memory."""

import hashlib
import io
import json
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save_file

from fedshift.data import files
from fedshift.data.catalog import DataError, find
from fedshift.data.datasets import load
from fedshift.data.fetch import local
from fedshift.data.files import unpack
from tests.data import small
from tests.runs import linux

LITTLE = 8 << 20  # bytes


@contextmanager
def refused(message: str, most: int = LITTLE) -> Iterator[None]:
    """Expect a DataError of one line, and at most this much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def header(kind: bytes, size: int, name: str = "data_batch_1.bin") -> bytes:
    """Header of a member that claims this size."""
    member = tarfile.TarInfo(name)
    member.type = kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (b"\xff" if size < 0 else b"\x80") + size.to_bytes(11, "big", signed=True)
    block[148:156] = b" " * 8  # which the checksum takes for it
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def zeros(size: int, *before: bytes) -> bytes:
    """Gzipped zeros, made without holding them in memory."""
    packer = zlib.compressobj(9, wbits=31)
    pieces = [packer.compress(b"".join(before))]
    pieces += [packer.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*pieces, packer.flush()])


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_an_extended_header_of_any_length_is_refused(kind: bytes) -> None:
    bomb = zeros(64 << 20, header(kind, 64 << 20))
    with refused("x: an extended header of 67,108,864 bytes; at most 65,536 are read"):
        unpack(bomb, "x")


def test_sizes_below_zero_are_refused() -> None:
    with refused("x: "):
        unpack(header(tarfile.REGTYPE, -512) * 3, "x")
    path = b"20 size=-1000000000\n"
    pax = header(tarfile.XHDTYPE, len(path)) + path.ljust(512, b"\0") + header(tarfile.REGTYPE, 0)
    with refused("x: "):
        unpack(pax * 3, "x")


def test_a_chain_of_extended_headers_is_refused() -> None:
    with refused("x: the archive is damaged"):
        unpack(b"".join(header(tarfile.XHDTYPE, 0) for _ in range(3000)), "x")


def test_an_archive_of_too_many_members_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MEMBERS", 100)
    with refused("x: more than 100 members; no published archive has that many"):
        unpack(header(tarfile.DIRTYPE, 0) * 1000, "x")


def test_other_compressions_than_gzip_are_not_tried() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    with refused("x: the archive is damaged"):
        unpack(out.getvalue(), "x")


def test_a_gzipped_idx_file_is_unpacked_to_the_size_of_the_real_one_at_most(tmp_path: Path) -> None:
    e = small.entry("mnist")
    written = small.gzipped(small.idx(e, small.arrays(e)))
    bomb = zeros(64 << 20, struct.pack(">4I", 0x0803, e.train, 28, 28))
    small.folder(tmp_path, written | {f"{e.parts[0]}.gz": bomb})
    with refused("decompresses to more than 39,216 bytes; no published file does"):
        local(e, tmp_path)


def put(index: int) -> bytes:
    return b"\x80\x02}r" + struct.pack("<I", index) + b"."


def nested(depth: int) -> bytes:
    """Nested lists of ten times the same list: 10^depth labels."""
    inner = b"](" + b"K\x00" * 10 + b"e" + b"q\x00"
    for level in range(1, depth):
        inner += b"0](" + b"h" + bytes([level - 1]) + (b"h" + bytes([level - 1])) * 9 + b"eq" + bytes([level])
    return b"\x80\x02" + inner + b"."


def repeated() -> bytes:
    """A long text that is decoded to bytes many times, all of which are kept."""
    text = "x" * 50_000
    once = b"h\x00h\x01h\x02\x86R"
    start = b"c_codecs\nencode\nq\x00X" + struct.pack("<I", len(text)) + text.encode() + b"q\x01U\x06latin1q\x02"
    return b"\x80\x02" + start + b"](" + once * 150 + b"e."


PICKLES: dict[str, tuple[bytes, str]] = {
    "memo": (put(2**31 - 2), "a pickle whose opcode 2 has the memo index 2,147,483,646"),
    "bytes of any length": (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".", "cifar10"),
    "a byte array of any length": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "cifar10"),
    "a text of any length": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", "cifar10"),
    "bytes beyond the end": (b"\x80\x03B" + struct.pack("<I", 1 << 31) + b".", "cifar10"),
    "a long number": (b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + bytes(1 << 16) + b".", "cifar10"),
    "a frame of any length": (b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"}.", "cifar10"),
    "tuples in tuples": (b"\x80\x02)" + b"\x85" * 2000 + b".", r"a pickle of more than 1,\d+ opcodes"),
    "copies": (b"\x80\x02}" + b"2" * 500 + b".", "refused: its opcode 2 is DUP; only arrays are read"),
    "lists in lists": (nested(9), "refused: its opcode .* is POP|its data must be|cifar10"),
    "bytes again and again": (repeated(), "a pickle that expands to more bytes than it contains"),
    "a longer file": (bytes(1 << 20), r"a pickle of 1,048,576 bytes; \d+ images take at most"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_built_to_take_memory_is_refused(name: str, tmp_path: Path) -> None:
    e = small.entry("cifar10")
    data, message = PICKLES[name]
    small.folder(tmp_path, small.python(e, small.arrays(e)) | {"data_batch_1": data})
    with refused(message):
        local(e, tmp_path)


def test_labels_in_lists_of_lists_are_refused(tmp_path: Path) -> None:
    """10^9 labels for numpy, of nine lists."""
    e = small.entry("cifar10")
    labels: list[object] = [0] * 10
    for _ in range(8):
        labels = [labels] * 10
    batch = pickle.dumps({b"data": small.arrays(e)[0][:10].reshape(10, -1), b"labels": labels}, protocol=2)
    small.folder(tmp_path, small.python(e, small.arrays(e)) | {"data_batch_1": batch})
    with refused("damaged, or not cifar10"):
        local(e, tmp_path)


def test_a_pickle_is_only_read_if_it_or_its_archive_is_the_published_one(tmp_path: Path) -> None:
    e = small.entry("cifar10", pinned=True)
    written = small.python(e, small.arrays(e))
    digests = {name: hashlib.md5(data).hexdigest() for name, data in written.items()}
    archive, folder = small.tar(tmp_path / "a.tgz", written), small.folder(tmp_path / "a", written)
    inside = {"a.tgz": hashlib.md5(archive.read_bytes()).hexdigest()}
    for known, source in ((digests, folder), (digests, archive), (inside, archive)):
        assert local(replace(e, files=known), source)[1] == "md5 of the content"
    small.folder(folder, {"data_batch_2": b"\x80\x02cos\nsystem\n."})
    for known, source in ((digests, folder), (inside, folder), ({"a.tgz": "0" * 32}, archive)):
        with refused(r"data_batch_\d is damaged or not part of cifar10: its md5 is"):
            local(replace(e, files=known), source)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_digests_of_all_published_pickles_are_known(name: str) -> None:
    entry = find(name)
    assert {*entry.parts, entry.archives[0]} <= set(entry.files)


@pytest.mark.parametrize("kind", ["f8", "O", "V10"])
def test_only_arrays_of_bytes_are_read_from_a_pickle(kind: str, tmp_path: Path) -> None:
    e = small.entry("cifar10")
    batch = pickle.dumps({b"data": np.zeros((10, 4), kind), b"labels": [0] * 10}, protocol=2)
    small.folder(tmp_path, small.python(e, small.arrays(e)) | {"data_batch_1": batch})
    with refused(r"an array of '.*'; only arrays of bytes \(u1\) are read"):
        local(e, tmp_path)


def test_a_png_of_another_size_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    e = small.entry("cifar10")
    out = io.BytesIO()
    Image.new("RGB", (1024, 20_000)).save(out, "png")  # 61 MB of pixels
    small.folder(tmp_path, small.png(e, small.arrays(e)) | {"data_batch_1.png": out.getvalue()})
    with refused(r"a PNG of \(1024, 20000\) RGB pixels; must be \(1024, 10\) RGB"):
        local(e, tmp_path)


@pytest.mark.parametrize("labels", ["[" * 100_000, json.dumps([0] * 40_000), '{"a": 1}', "[[0], [0]]", "12"])
def test_labels_that_are_not_a_short_list_are_refused(labels: str, tmp_path: Path) -> None:
    e = small.entry("cifar10")
    small.folder(tmp_path, small.png(e, small.arrays(e)) | {"train_lables.json": labels.encode()})
    with refused("labels|cifar10"):
        local(e, tmp_path)


def test_files_that_are_too_large_together_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    e = small.entry("cifar10")
    small.folder(tmp_path, dict.fromkeys((f"{part}.bin" for part in e.parts), bytes(900)))
    monkeypatch.setattr(files, "LARGEST", 1000)
    with refused("its files have more than 2,000 bytes; no published data set has"):
        local(e, tmp_path)


def npy(shape: tuple[int, ...], data: bytes, dtype: str = "|u1") -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue() + data


def npz(path: Path, **arrays: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)
    return path


def test_an_array_that_claims_more_than_its_file_holds_is_refused(tmp_path: Path) -> None:
    good = npy((2,), bytes(2))
    path = npz(tmp_path / "a.npz", x=npy((1 << 20, 1 << 20), bytes(9)), y=good, test_x=good, test_y=good)
    with refused(r"x\.npy claims 1,099,511,627,776 bytes and contains 9"):
        load(str(path))


@linux
def test_an_npz_file_that_does_not_fit_into_memory_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """6 GB of zeros in 6 MB, read by a process that may use 4 GB."""
    path, size = tmp_path / "bomb.npz", 6 << 30
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("y", "test_x", "test_y"):
            archive.writestr(f"{name}.npy", npy((2,), bytes(2)))
        archive.writestr("x.npy", b"")
        archive.filelist[-1].file_size = size  # the directory is what a reader goes by
    work = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from fedshift.data.datasets import DataError, load\n"
        "try:\n    load(sys.argv[1])\nexcept DataError as problem:\n    print(problem)"
    )
    done = subprocess.run([sys.executable, "-c", work, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "unpacks to 6,442,4" in done.stdout
    assert "bytes; this machine has 4,294,967,296 bytes of memory" in done.stdout


def test_only_the_four_arrays_of_a_file_are_read(tmp_path: Path) -> None:
    x = np.zeros((2, 3), np.float32)
    arrays: dict[str, NDArray[Any]] = {"x": x, "y": np.arange(2), "test_x": x[:1], "test_y": np.arange(1)}
    good = {name: npy(x.shape, x.tobytes(), x.dtype.str) for name, x in arrays.items()}
    path = npz(tmp_path / "a.npz", other=npy((1 << 40,), b""), **good)
    assert load(str(path)).shape == (3,)
    save_file(arrays | {"other": np.zeros(9)}, tmp_path / "a.safetensors")
    assert load(str(tmp_path / "a.safetensors")).shape == (3,)


@pytest.mark.parametrize("length", [1 << 21, 1 << 40, (1 << 64) - 1])
def test_a_safetensors_header_of_any_length_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b" " * 100)
    with refused("its header claims .* bytes; at most 1,048,576 are read"):
        load(str(path))


@pytest.mark.parametrize("make", [small.binary, small.python, small.png])
def test_honest_archives_with_extended_headers_are_read(make: Callable[..., dict[str, bytes]], tmp_path: Path) -> None:
    e = small.entry("cifar10", pinned=True)
    with tarfile.open(tmp_path / "a.tgz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name, data in make(e, small.arrays(e)).items():
            member = tarfile.TarInfo(f"{'long/' * 30}{name}")
            member.size, member.pax_headers = len(data), {"comment": "ü" * 200}
            tar.addfile(member, io.BytesIO(data))
    assert np.array_equal(local(e, tmp_path / "a.tgz")[0][0], small.arrays(e)[0])
