"""Files are there whole or not at all, and say by themselves when they are not what was written."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedshift.files import RunError, read_about, read_tensors, write, write_tensors
from tests.runs import ended, fork

linux = pytest.mark.skipif(sys.platform != "linux", reason="mounts and limits as Linux has them")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    if mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)):
        pytest.skip("needs the right to mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def mount(*arguments: str) -> int:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode
    except FileNotFoundError:
        return 1


def fill(disk: Path, leave: int) -> Path:
    """A file that takes all but a few bytes of the disk."""
    ballast = disk / "ballast"
    space = os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, space.f_bavail * space.f_bsize - leave)))
    return ballast


@linux
def test_on_a_full_disk_what_was_there_stays(disk: Path) -> None:
    write(disk / "a", b"old")
    ballast = fill(disk, 8192)
    with pytest.raises(RunError, match=r"disk/a: cannot be written: No space left on device"):
        write(disk / "a", bytes(100_000))
    assert (disk / "a").read_bytes() == b"old"
    assert sorted(os.listdir(disk)) == ["a", "ballast"]
    ballast.unlink()
    write(disk / "a", bytes(100_000))
    assert (disk / "a").read_bytes() == bytes(100_000)


@linux
def test_on_a_read_only_disk_what_was_there_stays(disk: Path) -> None:
    write(disk / "a", b"old")
    assert not mount("-o", "remount,ro", str(disk))
    with pytest.raises(RunError, match=r"disk/a: cannot be written: Read-only file system"):
        write(disk / "a", b"new")
    assert (disk / "a").read_bytes() == b"old"


@linux
def test_a_write_that_goes_beyond_a_limit_is_taken_back(tmp_path: Path) -> None:
    write(tmp_path / "a", b"old")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        with pytest.raises(RunError, match="a: cannot be written: File too large"):
            write(tmp_path / "a", bytes(10_000), sync=True)

    assert ended(fork(work)) == 0
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere/a: cannot be written: No such file or directory"):
        write(tmp_path / "nowhere" / "a", b"")
    with pytest.raises(RunError, match=r"nowhere: cannot be read: No such file or directory"):
        read_about(tmp_path / "nowhere")


def test_any_changed_byte_and_any_missing_end_is_noticed(tmp_path: Path) -> None:
    path = write_tensors(tmp_path, "x", {"w": torch.arange(4.0)}, {"a": "b"})
    content = path.read_bytes()
    tensors, about = read_tensors(path)
    assert (tensors["w"].tolist(), about) == ([0, 1, 2, 3], {"a": "b"})
    for i in range(len(content)):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(RunError, match="damaged: its content does not match its checksum"):
            read_about(path)
        path.write_bytes(content[:i])
        with pytest.raises(RunError, match="damaged"):
            read_about(path)


def test_the_same_tensors_have_the_same_name(tmp_path: Path) -> None:
    one = write_tensors(tmp_path, "x", {"w": torch.arange(6.0).view(2, 3)}, {})
    two = write_tensors(tmp_path, "x", {"w": torch.arange(6.0).view(2, 3).t().contiguous().t()}, {})
    assert one == two
    assert [path.name for path in tmp_path.iterdir()] == [one.name]
