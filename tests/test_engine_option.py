"""`--engine NAME` for a run and for a sweep."""

from pathlib import Path

import pytest

from fedshift.cli import running
from tests.runs import fedshift, file_of, small


def test_without_flower_a_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "find_spec", lambda name: None)
    path = file_of(tmp_path / "a.toml", small())
    done = fedshift("run", path, "--engine", "flower", "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert done.stderr.strip().endswith("needs flwr: pip install 'flwr[simulation]>=1.41,<1.43'")
    assert not (tmp_path / "run").exists()
    done = fedshift("run", path, "--engine", "flour")
    assert done.exit_code == 2
    assert "engine.name = 'flour': must be 'auto', 'sequential', 'processes', 'batched' or 'flower'" in done.stderr


def test_an_engine_can_be_chosen_for_a_run_and_a_sweep(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.toml", small({"train": {"rounds": 1}, "engine": {"name": "auto"}}))
    assert fedshift("run", path, "--engine", "sequential", "--out", tmp_path / "run", "-q").exit_code == 0
    path = file_of(tmp_path / "b.toml", small({"train": {"rounds": 1}}), "\n[sweep]\nseed = [0]\n")
    assert fedshift("sweep", path, "--engine", "sequential", "--out", tmp_path / "grid", "-q").exit_code == 0
    for found in (tmp_path / "run" / "settings.toml", *tmp_path.glob("grid/*/settings.toml")):
        assert '[engine]\nname = "sequential"' in found.read_text()
