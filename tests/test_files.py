"""Files are written atomically, and damage is detected from the file alone."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fedshift.core.files import (
    LOCK,
    TEMPORARY,
    Lock,
    RunError,
    read_about,
    read_tensors,
    serialized,
    write,
    write_tensors,
)
from fedshift.data import cache
from fedshift.data.catalog import CATALOG
from fedshift.data.fetch import fetch
from fedshift.runs.run import Run
from tests.data import small as data_sets
from tests.runs import digits, ended, fedshift, fork, small

TYPES = [torch.bool, torch.uint8, torch.int32, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]
linux = pytest.mark.skipif(sys.platform != "linux", reason="mounts and limits as Linux has them")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Disk of one megabyte."""
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
    """File that takes all but `leave` bytes of the disk."""
    ballast = disk / "ballast"
    space = os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, space.f_bavail * space.f_bsize - leave)))
    return ballast


@linux
def test_on_a_full_disk_the_old_file_is_kept(disk: Path) -> None:
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
def test_on_a_read_only_disk_the_old_file_is_kept(disk: Path) -> None:
    write(disk / "a", b"old")
    assert not mount("-o", "remount,ro", str(disk))
    with pytest.raises(RunError, match=r"disk/a: cannot be written: Read-only file system"):
        write(disk / "a", b"new")
    assert (disk / "a").read_bytes() == b"old"


@linux
def test_a_write_beyond_a_limit_leaves_no_file(tmp_path: Path) -> None:
    write(tmp_path / "a", b"old")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        with pytest.raises(RunError, match="a: cannot be written: File too large"):
            write(tmp_path / "a", bytes(10_000), sync=True)

    assert ended(fork(work)) == 0
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nowhere/a: cannot be written: No such file or directory"):
        write(tmp_path / "nowhere" / "a", b"")
    with pytest.raises(RunError, match=r"nowhere: cannot be read: No such file or directory"):
        read_about(tmp_path / "nowhere")


def test_any_changed_byte_and_any_missing_end_is_detected(tmp_path: Path) -> None:
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


@given(st.lists(st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=6), st.text())
def test_the_parts_of_a_file_are_those_of_safetensors(tensors: list[tuple[torch.dtype, list[int]]], name: str) -> None:
    params = {f"{i}{name}": torch.zeros(shape, dtype=dtype) for i, (dtype, shape) in enumerate(tensors)}
    for metadata in (None, {"about": name}):
        assert b"".join(serialized(params, metadata)) == save(params, metadata)


def test_parts_share_the_memory_of_tensors_that_may_share_it_with_others() -> None:
    w = torch.arange(6.0).view(2, 3)
    *_, first, second = serialized({"w": w, "tied": w})
    w[0, 0] = 7
    assert bytes(first) == bytes(second) == w.numpy().tobytes()


def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(b"not ours")
    return path


@pytest.mark.parametrize("there", [True, False])
def test_a_link_at_the_temporary_name_or_the_path_is_replaced_and_not_followed(tmp_path: Path, there: bool) -> None:
    target = victim(tmp_path) if there else tmp_path / "nothing"
    for planted in ("a", f"a{TEMPORARY}"):
        (tmp_path / planted).unlink(missing_ok=True)
        (tmp_path / planted).symlink_to(target)
        write(tmp_path / "a", b"ours")
        assert (tmp_path / "a").read_bytes() == b"ours"
        assert not (tmp_path / "a").is_symlink()
    if there:
        assert target.read_bytes() == b"not ours"
    assert sorted(os.listdir(tmp_path)) == ["a", *(["victim"] if there else [])]


def test_a_temporary_file_that_was_left_is_replaced_and_a_folder_at_its_name_is_reported(tmp_path: Path) -> None:
    (tmp_path / f"a{TEMPORARY}").write_bytes(b"left by a process that was killed")
    write(tmp_path / "a", b"ours")
    (tmp_path / f"b{TEMPORARY}").mkdir()
    with pytest.raises(RunError, match=r"b: cannot be written: "):
        write(tmp_path / "b", b"ours")
    assert sorted(os.listdir(tmp_path)) == ["a", f"b{TEMPORARY}"]


@linux
@pytest.mark.parametrize("there", [True, False])
def test_a_link_at_a_lock_is_not_followed(tmp_path: Path, there: bool) -> None:
    target = victim(tmp_path) if there else tmp_path / "nothing"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(target)
    with pytest.raises(RunError, match=r"run: cannot be written to: \.lock is a symbolic link, which is not followed"):
        Lock(tmp_path / "run")
    assert target.exists() == there
    (tmp_path / "run" / LOCK).unlink()
    Lock(tmp_path / "run").close()


@linux
def test_a_link_at_a_record_that_is_added_to_is_not_followed(tmp_path: Path) -> None:
    out, target = tmp_path / "run", victim(tmp_path)
    run = Run(small(), out, data=digits())
    next(run)
    (out / "rounds.csv").rename(tmp_path / "rounds.csv")
    (out / "rounds.csv").symlink_to(target)
    with pytest.raises(RunError, match=r"rounds\.csv: cannot be written: rounds\.csv is a symbolic link"):
        next(run)
    assert target.read_bytes() == b"not ours"


def test_links_at_the_places_of_a_report_and_its_figures_are_not_followed(tmp_path: Path) -> None:
    out, target = tmp_path / "run", victim(tmp_path)
    list(Run(small({"train": {"rounds": 1}}), out, data=digits()))
    for planted in (out / f"report.html{TEMPORARY}", tmp_path / f"page.html{TEMPORARY}"):
        planted.symlink_to(target)
    assert fedshift("report", out).exit_code == 0
    assert fedshift("report", out, "--out", tmp_path / "page.html").exit_code == 0
    assert b"<html" in (out / "report.html").read_bytes()
    assert target.read_bytes() == b"not ours"
    (tmp_path / "other.html").symlink_to(target)
    refused = fedshift("report", out, "--out", tmp_path / "other.html")
    assert (refused.exit_code, target.read_bytes()) == (2, b"not ours")
    assert "already exists and is not a report" in refused.output


def test_a_link_at_the_place_of_a_cached_data_set_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "cache"))
    entry, target = data_sets.entry("cifar10", pinned=True), victim(tmp_path)
    monkeypatch.setitem(CATALOG, "cifar10", entry)
    (tmp_path / "cache").mkdir()
    cache.path(entry).symlink_to(target)
    archive = data_sets.tar(tmp_path / "a.tgz", data_sets.binary(entry, data_sets.arrays(entry)))
    fetch("cifar10", archive)
    assert not cache.path(entry).is_symlink()
    assert target.read_bytes() == b"not ours"
