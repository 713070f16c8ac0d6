"""The command line as a person meets it: real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedshift

COMMAND = str(Path(sys.executable).with_name("fedshift"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, fedshift.__version__)


def test_quick_bench_prints_the_table() -> None:
    done = run("bench", "codecs", "--quick")
    assert done.returncode == 0, done.stderr
    for expected in ("Identity", "KMeans(4)", "1,078,400", "Uniform(8) + Zstd", "Stochastic(4)", "commit"):
        assert expected in done.stdout


def test_quick_bench_as_json() -> None:
    done = run("bench", "codecs", "--quick", "--json")
    result = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    sizes = {row["codec"]: row["bytes"] for row in result["codecs"]}
    assert sizes["KMeans(8)"] == 2_160_176
    assert sizes["Uniform(4) + Zstd"] < sizes["Uniform(4)"] < sizes["KMeans(4)"] < sizes["Identity"]
    assert {"cpu", "commit", "command"} <= set(result["machine"])


def test_bad_arguments_get_a_sentence_and_exit_two() -> None:
    for arguments in ["nonsense"], ["bench", "codecs", "--repeats", "0"], ["bench", "codecs", "--repeats", "many"]:
        done = run(*arguments)
        assert done.returncode == 2
        assert "Error" in done.stderr
        assert "Traceback" not in done.stderr
