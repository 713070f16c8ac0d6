"""The studies of the documentation run and write the published columns."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parent.parent / "studies" / "centring"


@pytest.mark.parametrize(
    ("command", "file", "rows"),
    [
        (["networks.py", "--part", "final", "--match", "tanh"], "networks_final.csv", 3),
        (["ablations.py", "bits"], "bits.csv", 3),
        (["why.py", "theorem"], "why_theorem.csv", 1),
    ],
)
def test_a_study_writes_the_published_columns(tmp_path: Path, command: list[str], file: str, rows: int) -> None:
    script, *options = command
    short = ["--rounds", "3", "--seeds", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(STUDIES / script), *options, *short],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(STUDIES.parent.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    ours, published = (
        [*csv.DictReader((folder / file).read_text().splitlines())] for folder in (tmp_path, STUDIES / "results")
    )
    assert len(ours) >= rows
    assert ours[0].keys() == published[0].keys()


def test_the_frontier_is_drawn_from_the_published_records(tmp_path: Path) -> None:
    root = STUDIES.parent.parent
    done = subprocess.run(
        [sys.executable, "studies/frontier.py", "--out", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
