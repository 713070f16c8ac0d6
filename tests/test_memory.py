"""Memory of clients on disk: only changes are written, and checkpoints keep the files they need."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.core.files import RunError
from fedshift.core.types import Params
from fedshift.rounds.loop import Ram
from fedshift.runs.memory import Files, StoredMemory, Version


def w(x: float) -> Params:
    return {"w": torch.full((3,), x)}


def value(memory: Params) -> float | None:
    return float(memory["w"][0]) if memory else None


def written(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.parametrize("keep", [True, False])
def test_only_clients_that_changed_are_written(keep: bool, tmp_path: Path) -> None:
    memory = StoredMemory(tmp_path / "memory", "a", keep)
    memory.save(1)
    assert not (tmp_path / "memory").exists()
    for client in range(5):
        memory.put(client, w(client))
    memory.save(2)
    before = written(tmp_path / "memory")
    assert len(before) == 5
    memory.put(3, w(30))
    memory.put(4, {})  # nothing to remember any more
    memory.put(5, {})  # nothing to remember
    memory.save(3)
    after = written(tmp_path / "memory")
    assert before.items() <= after.items()
    assert sorted(name[:4] for name in after.keys() - before.keys()) == ["3.3.", "4.3."]
    assert [value(memory.get(client)) for client in range(6)] == [0, 1, 2, 30, None, None]
    assert len(memory.newest) == 5


def test_memory_on_disk_takes_no_ram_between_rounds(tmp_path: Path) -> None:
    memory = StoredMemory(tmp_path, "a", keep=False)
    memory.put(0, w(1))
    assert value(memory.get(0)) == 1
    memory.save(1)
    memory.get(0)
    assert memory.held == {}


@given(
    st.lists(st.dictionaries(st.integers(0, 4), st.floats(0, 1, width=32), max_size=3), min_size=1, max_size=8),
    st.integers(1, 3),
    st.booleans(),
)
def test_the_two_newest_checkpoints_find_their_memory(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[dict[int, float]], every: int, keep: bool
) -> None:
    """Rounds change some clients, and some write a checkpoint; restoring either of the last two is exact."""
    folder = tmp_path_factory.mktemp("memory")
    memory, values = StoredMemory(folder, "a", keep), dict[int, float]()
    truth: dict[int, dict[int, float]] = {}  # by round of a checkpoint
    listed: dict[int, dict[int, Version]] = {}
    for number, changes in enumerate(rounds, 1):
        for client, x in changes.items():
            memory.put(client, w(x))
        values |= changes
        assert {client: value(memory.get(client)) for client in values} == values
        if not keep or number % every == 0:
            memory.save(number)
        if number % every == 0:
            truth[number], listed[number] = dict(values), dict(memory.newest)
            memory.prune(sorted(truth)[-2:][0])
    for number in sorted(truth)[-2:][::-1]:  # the older after the newer: what is later is removed
        again = StoredMemory.restored(folder, "a", number, listed[number], keep)
        assert {client: value(again.get(client)) for client in truth[number]} == truth[number]
    if truth:
        again.prune(min(sorted(truth)[-2:]))
        assert len(list(folder.iterdir())) == len(again.newest)


def test_temporary_and_later_files_are_removed(tmp_path: Path) -> None:
    memory, listed = StoredMemory(tmp_path, "a"), dict[int, dict[int, Version]]()
    for number in 1, 2, 3:
        memory.put(7, w(number))
        memory.save(number)
        listed[number] = dict(memory.newest)
    (tmp_path / "7.4.00000000.safetensors.unfinished").write_bytes(b"half")
    assert value(StoredMemory.restored(tmp_path, "a", 2, listed[2]).get(7)) == 2
    assert sorted(name[:4] for name in os.listdir(tmp_path)) == ["7.1.", "7.2."]


def test_a_missing_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    memory, files = StoredMemory(tmp_path, "a"), Files(tmp_path, "a")
    for client in 0, 1:
        memory.put(client, w(client))
    memory.save(1)
    first = dict(memory.newest)
    memory.put(1, w(10))
    memory.save(2)
    newest = memory.newest[1]
    assert [value(files.read(1, first[1])), value(files.read(1, newest))] == [1, 10]
    whose = "is not the memory of client {} after round {} of this run"
    for client, version in (0, newest), (1, newest._replace(number=3)):  # renamed
        files.path(client, version).write_bytes(files.path(1, newest).read_bytes())
        with pytest.raises(RunError, match=whose.format(client, version.number)):
            files.read(client, version)
    with pytest.raises(RunError, match=whose.format(1, 2)):
        Files(tmp_path, "b").read(1, newest)
    with pytest.raises(RunError, match="No such file"):
        files.read(1, newest._replace(checksum="00000000"))
    files.path(1, newest).write_bytes(files.path(1, newest).read_bytes()[:-1])
    before = written(tmp_path)
    with pytest.raises(RunError, match="damaged"):
        files.read(1, newest)
    with pytest.raises(RunError, match="damaged"):
        StoredMemory.restored(tmp_path, "a", 3, {1: newest}).get(1)
    assert written(tmp_path) == before


def test_memory_works_without_files() -> None:
    memory = Ram()
    memory.put(1, w(5))
    memory.put(2, {})
    assert [value(memory.get(client)) for client in (0, 1, 2)] == [None, 5, None]
