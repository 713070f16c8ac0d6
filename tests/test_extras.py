"""Optional packages that are missing are reported before anything starts, with what to install."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedshift.extras import REQUIREMENTS, needs
from tests.docs.blocks import ROOT

WITHOUT = "import sys; sys.modules['constriction'] = None; "  # as if it were not installed
COMMAND = f"{WITHOUT}from fedshift.cli import app; app()"
NEEDED = "the range coder needs constriction: pip install 'constriction>=0.4'"


def python(program: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)


def test_requirements_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [one for extra in ("entropy", "flower", "report", "track") for one in extras[extra]]
    assert sorted(asked) == sorted(REQUIREMENTS.values())
    assert NEEDED.endswith(needs("constriction"))


def test_a_run_and_a_sweep_without_the_range_coder_end_before_they_begin(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text('[sweep]\n"uplink.coder" = ["bitpack", "range"]\n')
    for arguments in (["run", "--preset", "smoke", "--set", "uplink.coder=range"], ["sweep", grid]):
        done = python(COMMAND, *arguments, "--out", tmp_path / "out")
        assert done.returncode == 2
        assert done.stderr.endswith(f": uplink.coder = 'range': {NEEDED}\n")
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_a_flower_mod_and_a_codec_without_the_range_coder_cannot_be_made() -> None:
    pytest.importorskip("flwr")
    made = (
        "from fedshift import *; from fedshift.flower import QuantizeMod; QuantizeMod(codec=Codec(KMeans(4), Range()))"
    )
    done = python(WITHOUT + made)
    assert done.returncode == 1
    assert done.stderr.endswith(f"ModuleNotFoundError: {NEEDED}\n")


def test_a_frame_of_a_missing_coder_is_refused_with_a_sentence() -> None:
    pytest.importorskip("constriction")
    read = """
import sys, torch
from fedshift import Codec, KMeans, Range, WireError, pack, unpack
w = {"w": torch.ones(3, 4)}
frame = pack(Codec(KMeans(4), Range()), w)
sys.modules["constriction"] = None
try:
    unpack(frame, w)
except WireError as problem:
    print(problem)
"""
    assert python(read).stdout == f"w: {NEEDED}\n"


def test_plan_says_which_codecs_it_leaves_out() -> None:
    done = python(COMMAND, "plan", "--uplink", "1MB/s", "--weights", "1000")
    assert done.returncode == 0, done.stderr
    assert f"fedshift: Codecs with a range coder are left out: it {needs('constriction')}.\n" in done.stderr
    assert "Range" not in done.stdout
