"""Commands end with a report; a report that cannot be written does not fail the run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedshift.runs.record import finished
from tests.runs import fedshift, file_of, small

BARE = """
import sys
from importlib.machinery import PathFinder

class Bare(PathFinder):  # as if optional packages were not installed
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {"matplotlib", "mlflow", "wandb", "tensorboard", "flwr"}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
from fedshift.cli import app
app(sys.argv[1:])
"""
DIVERGES = '[sweep]\n"train.lr" = [0.1, 1e30]\n'


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """Run stopped after its first round, in a folder whose name has spaces and brackets."""
    out = tmp_path / "a [b] c"
    done = fedshift("run", file_of(tmp_path / "one.toml", small()), "--out", out, "--minutes", "0", "-q")
    assert done.exit_code == 0, done.stderr
    assert not (out / "report.html").exists()
    return out


def test_a_run_ends_with_the_path_of_its_report(stopped: Path) -> None:
    page = stopped / "report.html"
    done = fedshift("resume", stopped, "--quiet")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.endswith(f"Report: {page}\n")
    first = page.read_bytes()
    page.unlink()
    again = fedshift("resume", stopped, "--json")
    assert json.loads(again.stdout)["report"] == str(page)
    assert page.read_bytes() == first


def test_a_report_that_cannot_be_written_does_not_fail_the_run(stopped: Path) -> None:
    page = stopped / "report.html"
    page.write_text("mine")
    done = fedshift("resume", stopped, "--quiet")
    assert done.exit_code == 0
    assert f"Results are in {stopped}" in done.stdout
    why = f"{page}: already exists and is not a report; choose another file with `fedshift report --out`"
    assert done.stderr == f"fedshift: the report could not be written: {why}\n"
    assert page.read_text() == "mine"
    assert finished(stopped)
    page.unlink()
    page.mkdir()
    done = fedshift("resume", stopped, "--json")
    assert (done.exit_code, json.loads(done.stdout)["report"]) == (0, None)
    assert f"{page}: is a folder instead of a file" in done.stderr


def test_a_sweep_with_a_failed_run_has_a_report(tmp_path: Path) -> None:
    grid = file_of(tmp_path / "grid.toml", small({"train": {"rounds": 3}}), DIVERGES)
    done = fedshift("sweep", grid, "--out", tmp_path / "out", "--quiet")
    assert done.exit_code == 1
    assert done.stdout.endswith(f"Report: {tmp_path / 'out' / 'report.html'}\n")
    assert "lr-1e+30_seed-0" in (tmp_path / "out" / "report.html").read_text()


def test_optional_packages_are_not_needed(tmp_path: Path) -> None:
    grid = file_of(tmp_path / "grid.toml", small({"train": {"rounds": 2}}), "[sweep]\nseed = [0, 1]\n")
    for arguments in ["sweep", grid, "--out", tmp_path / "out", "-q"], ["report", tmp_path / "out"]:
        done = subprocess.run([sys.executable, "-c", BARE, *map(str, arguments)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith(f"{tmp_path / 'out' / 'report.html'}\n")
