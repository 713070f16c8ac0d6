"""The command line, in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedshift
from tests.runs import fedshift as invoke

COMMAND = str(Path(sys.executable).with_name("fedshift"))


SMALL = ["--set", "train.rounds=3", "--set", "model.args={hidden=8}", "--set", "train.epochs=1"]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, cwd=cwd)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, fedshift.__version__)


def test_the_package_runs_as_a_module_under_the_same_name() -> None:
    command = [sys.executable, "-m", "fedshift", "run", "--preset", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, run("run", "--preset", "none").stderr)
    assert done.stderr.startswith("fedshift: --preset none: ")


def test_quick_bench_prints_the_table() -> None:
    done = run("bench", "codecs", "--quick")
    assert done.returncode == 0, done.stderr
    for expected in ("Identity", "KMeans(4)", "1,078,231", "Uniform(8) + Zstd", "Stochastic(4)", "commit"):
        assert expected in done.stdout


def test_quick_bench_as_json() -> None:
    done = run("bench", "codecs", "--quick", "--json")
    result = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    sizes = {row["codec"]: row["bytes"] for row in result["codecs"]}
    assert sizes["KMeans(8)"] == 2_160_007
    assert sizes["Uniform(4) + Zstd"] < sizes["Uniform(4)"] < sizes["KMeans(4)"] < sizes["Identity"]
    assert {"cpu", "commit", "command"} <= set(result["machine"])


def test_bad_arguments_give_one_sentence_and_exit_code_two() -> None:
    for arguments in ["nonsense"], ["bench", "codecs", "--repeats", "0"], ["bench", "codecs", "--repeats", "many"]:
        done = run(*arguments)
        assert done.returncode == 2
        assert "Error" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_run_shows_its_progress_and_ends_in_a_table(tmp_path: Path) -> None:
    done = run("run", "--preset", "smoke", *SMALL, "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Recording in here\nsmoke: round 1 of 3, ")
    assert "smoke: round 3 of 3, " in done.stdout
    assert "Results are in here" in done.stdout
    assert (tmp_path / "here" / "model.safetensors").exists()
    again = run("run", "here/settings.toml", "--out", "again", "--quiet", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "round 1 of 3" not in again.stdout
    for name in ("model.safetensors", "settings.toml"):
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    finished = run("resume", "here", cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "here: this run is already finished.\n")
    assert "Results are in here" in finished.stdout


def test_a_run_as_json(tmp_path: Path) -> None:
    done = run("run", "--preset", "smoke", *SMALL, "--json", cwd=tmp_path)
    *rounds, result = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["round"] for one in rounds] == [1, 2, 3]
    assert rounds[0].keys() == {"run", "round", "score", "loss", "bytes_up"}
    assert (tmp_path / result["out"] / "rounds.csv").exists()
    assert result["rows"][0]["mean"] == pytest.approx(sum(one["score"] for one in rounds) / 3, abs=1e-5)


NAMED = ("exact", "lean", "extreme")


def test_the_demo_compares_full_precision_the_paper_lean_and_extreme(tmp_path: Path) -> None:
    done = run("run", *SMALL, "--out", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for expected in ("paper", "lean", "extreme", "against 32 bits", "The shift per filter", "Results are in demo"):
        assert expected in done.stdout
    assert "times fewer" in done.stdout[done.stdout.index("Report: ") :]  # the answer comes last
    shifts = ("no_uplink-exact", "per-layer_uplink-paper", *(f"per-filter_uplink-{name}" for name in NAMED))
    folders = {path.parent.name for path in (tmp_path / "demo").glob("*/model.safetensors")}
    assert folders == {f"shift-{shift}_seed-{seed}" for shift in shifts for seed in range(3)}
    assert "uplink lean: quantizer" in done.stderr


def test_a_sweep_skips_finished_runs_and_trains_new_ones(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        """
        train = {rounds = 2, epochs = 1}
        model = {args = {hidden = 8}}
        [sweep]
        "algorithm.name" = ["fedavg", "scaffold"]
        seed = [0]
        """
    )
    done = run("sweep", "grid.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("grid/*/model.safetensors")}
    assert {path.parent.name for path in before} == {"name-fedavg_seed-0", "name-scaffold_seed-0"}
    file.write_text(file.read_text().replace("[0]", "[0, 1]"))
    done = run("sweep", "grid.toml", cwd=tmp_path)
    assert "2 of 4 runs are already finished" in done.stderr
    assert "seeds 0, 1" in done.stdout
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 3"))
    done = run("sweep", "grid.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "was run with other settings; choose another --out" in done.stderr


def test_a_sweep_reports_a_run_that_diverges_and_continues(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("train = {rounds = 6, epochs = 1}\n[sweep]\n'train.lr' = [1e30, 0.1]\n")
    done = run("sweep", "grid.toml", "--quiet", cwd=tmp_path)
    assert done.returncode == 1
    assert "no usable upload in 5 rounds in a row" in done.stderr
    assert "1 of 2 runs failed" in done.stderr
    assert "6 rounds, seed 0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["run", "bad.toml"], 2, "bad.toml: unknown setting 'train.lrr'; did you mean 'lr'?"),
        (["run", "none.toml"], 2, "none.toml: cannot be read"),
        (["run", "far.toml"], 2, "far.toml: data.name = 'nodata': unknown data set"),
        (["sweep", "grid.toml"], 2, "grid.toml: data.name = 'nodata': unknown data set"),
        (["run", "--preset", "nope"], 2, "--preset nope: no such preset; known are demo, smoke, paper, fashion"),
        (["run", "--preset", "smoke", "--set", "uplink.bits=0"], 2, "--set: uplink.bits = 0: bits must be 1 to 8"),
        (["run", "--preset", "smoke", "--set", "train.lr=1e30"], 1, "no usable upload in 5 rounds in a row"),
        (
            ["run", "--preset", "smoke", "--set", "train.lr=1e30", "--set", "train.rounds=2"],
            1,
            "in any of the 2 rounds",
        ),
        (["run", "--preset", "smoke", "--out", "bad.toml"], 2, "bad.toml: cannot be written to"),
        (["run", "--preset", "smoke", "--out", "mine"], 2, "mine: contains rounds.csv, which does not belong to a run"),
        (
            ["run", "--set", "seed=7"],
            2,
            "--set seed: the sweep sets it for each run; change it with --set 'sweep.seed=[...]'",
        ),
        (
            ["run", "--uplink", "lean"],
            2,
            "--set uplink: the sweep sets it for each run; change it with --set 'sweep.runs=[...]'",
        ),
        (
            ["run", "--preset", "smoke", "--uplink", "leen"],
            2,
            "uplink = 'leen': must be a table, or one of exact, paper",
        ),
        (["run", "--preset", "smoke", "--set", "data.name=nodata"], 2, "--set: data.name = 'nodata': unknown"),
        (["resume", "nowhere"], 2, "nowhere: there is no such folder"),
        (["data", "nodata"], 2, "unknown data set 'nodata'; known are cifar10, cifar100, mnist, fashion-mnist"),
        (["data", "nodata"], 2, "digits, synthetic (digits and synthetic need not be fetched)"),
        (["run", "--set", "train.lr=nan"], 2, "train.lr = nan: must be a finite number"),
        (["data", "digits", "--from", "bad.toml"], 2, "unknown data set 'digits'"),
        (["data", "mnist", "--from", "bad.toml"], 2, "bad.toml"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], code: int, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nlrr = 1\n")
    (tmp_path / "far.toml").write_text("[data]\nname = 'nodata'\n")
    (tmp_path / "grid.toml").write_text("[data]\nname = 'nodata'\n[sweep]\nseed = [0, 1]\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rounds.csv").write_text("MINE")
    done = subprocess.run(
        [COMMAND, *arguments, *(["--quiet"] if arguments[0] != "data" else [])],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"FEDSHIFT_DATA": str(tmp_path / "data")},
    )
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("fedshift: ")]
    assert len(errors) == 1
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["rounds.csv"]
    assert (tmp_path / "mine" / "rounds.csv").read_text() == "MINE"


@pytest.mark.parametrize("command", [["run"], ["frontier"], ["report", "a"], ["paper", "table1"]])
def test_an_empty_path_is_not_the_current_folder(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(*command, "--out", "")
    assert done.exit_code == 2
    assert "the path is empty" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_data_sets_of_the_package_need_not_be_fetched(name: str) -> None:
    done = run("data", name)
    assert (done.returncode, done.stdout) == (0, f"{name}: is included in fedshift, nothing to fetch\n")


def test_names_are_not_interpreted_as_markup(tmp_path: Path) -> None:
    done = run("run", "--preset", "smoke", *SMALL, "--set", "name=[red]", "--out", "[x]/[bold]y", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[red]: round 1 of 3" in done.stdout
    assert "Results are in [x]/[bold]y" in done.stdout


def test_a_closed_pipe_stops_the_run_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{COMMAND} run --preset smoke --set train.rounds=2000 --out here --json | head -1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "here").glob("checkpoint.*"))
