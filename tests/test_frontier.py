"""`fedshift frontier`: a grid of uplinks on one task, by the real command."""

import json
from pathlib import Path

import pytest

from fedshift.experiment import frontier, grid
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.settings import Experiment, uplink_name
from fedshift.paper import tasks
from fedshift.runs import summary
from fedshift.runs.record import finished, settings_of
from tests.runs import fedshift, file_of, small

FEW = """[{name = "exact_seed-0", uplink = "exact"}, {name = "lean_seed-0", uplink = "lean"}]"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Settings of one run with an uplink, which a frontier replaces."""
    return file_of(tmp_path / "mine.toml", small({"train": {"rounds": 2}, "uplink": {"bits": "32+4"}}))


def names(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if path.is_dir() and finished(path)}


def test_every_uplink_is_trained_once_and_compared_with_exact_uploads(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = fedshift("frontier", "--task", mine, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert f"{mine}: its uplink is ignored; a frontier trains 16 others." in done.stderr
    assert names(out) == {f"{name}_seed-0" for name in frontier.GRID}
    assert settings_of(out / "random-4_seed-0").uplink.bits == 4
    assert f"Report: {out / 'report.html'}\n" in done.stdout
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/rounds.csv")}
    again = fedshift("frontier", "--task", mine, "--out", out, "--json")
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/rounds.csv")} == before
    result = json.loads(again.stdout.splitlines()[-1])
    assert len(result["rows"]) == 16
    assert [row["label"] for row in result["rows"] if row["full"] is None] == [{"uplink": "32"}]
    assert result["answer"]
    assert result["report"] == str(out / "report.html")
    assert "16 of 16 runs are already finished." in again.stderr


def test_a_stopped_frontier_is_resumed(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assignments = ["--set", "train.rounds=20", "--set", f"sweep.runs={FEW}"]
    arguments: list[str | Path] = ["frontier", "--task", mine, "--out", out, *assignments, "-q"]
    done = fedshift(*arguments, "--minutes", "0")
    assert done.exit_code == 0
    # a run may finish before the request to stop reaches it
    assert (f"Stopped; resume with `fedshift resume {out}`" in done.stderr) == (len(names(out)) < 2)
    done = fedshift(*arguments)
    assert done.exit_code == 0, done.stderr
    assert names(out) == {"exact_seed-0", "lean_seed-0"}


@pytest.mark.parametrize("task", frontier.TASKS)
def test_runs_differ_in_their_uplink_only(task: str) -> None:
    runs = grid.expand(frontier.settings(task, 2))
    assert [run.seed for run in runs] == [0] * 16 + [1] * 16
    assert len({run.changed(name="run", seed=0, uplink="exact").toml() for run in runs}) == 1
    assert len({summary.uplink_label(run) for run in runs}) == 16
    # groups would change which clients are drawn
    assert all(isinstance(run.uplink.bits, int) and not run.uplink.group for run in runs)
    assert {uplink_name(run.uplink) for run in runs} == {"exact", "lean", "extreme", None}
    preset = Experiment(**{key: value for key, value in PRESETS[frontier.TASKS[task]].items() if key != "sweep"})
    assert (runs[0].data, runs[0].model, runs[0].train) == (preset.data, preset.model, preset.train)
    assert runs[0].shift == Experiment().shift


def test_a_brief_frontier_has_lean_and_exact_uploads_without_and_with_the_shift(mine: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = fedshift("frontier", "--task", mine, "--brief", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert f"{mine}: its uplink and shift are ignored; a frontier trains 8 others." in done.stderr
    assert names(out) == {f"{name}_seed-0" for name in frontier.BRIEF}
    runs = {name: settings_of(out / f"{name}_seed-0") for name in frontier.BRIEF}
    shifts = [tasks.shift_of(run) for run in runs.values()]
    layer = [("layer", "uploads"), ("layer", 0.5), ("layer", 0.5)]
    assert shifts == [("no", 0.0)] * 2 + [("filter", 1.0)] * 3 + layer
    for uplink in "exact", "lean":
        assert runs[uplink].uplink == runs[f"{uplink}-no-shift"].uplink == runs[f"{uplink}-layer"].uplink


def test_the_bandwidth_of_a_task_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    for bandwidth, kept in (("1MB/s", 1e6), ({"32": "1MB/s", "4": "1kB/s"}, None)):
        written = json.dumps(bandwidth).replace(":", " =")
        file.write_text(f'uplink = {{bits = "32+4", bandwidth = {written}}}\n')
        assert {run.uplink.bandwidth for run in grid.expand(frontier.settings(str(file), 1))} == {kept}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--task", "mnist"],
            "--task mnist: must be digits, cifar10, fashion, shakespeare, transformer, synthetic or a file of settings",
        ),
        (["--task", "none.toml"], "none.toml: cannot be read"),
        (["--task", "grid.toml"], "--task grid.toml: has a table named sweep; it must contain the settings of one run"),
        (["--task", "bad.toml"], "--task bad.toml: unknown setting 'train.lrr'; did you mean 'lr'?"),
        (["--set", "seed=3"], "--set seed: the sweep sets it for each run; change it with --set 'sweep.runs=[...]'"),
        (
            ["--set", "uplink.rate=1"],
            "--set uplink.rate: the sweep sets it for each run; change it with --set 'sweep.runs",
        ),
        (["--set", "train.lr=x"], "--set: train.lr = 'x': must be"),
        (["--seeds", "0"], "0 is not in the range"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_bad_input_gets_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text("[sweep]\nseed = [0, 1]\n")
    Path("bad.toml").write_text("train = {lrr = 1}\n")
    done = fedshift("frontier", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert not Path("runs").exists()


def test_an_estimate_of_a_frontier_trains_nothing(tmp_path: Path) -> None:
    flags = ["--brief", "--seeds", "2", "--set", "train.rounds=3", "--out", str(tmp_path / "runs"), "--estimate"]
    done = fedshift("frontier", *flags)
    assert done.exit_code == 0, done.output
    assert "16 of 16 runs are missing in" in done.stdout
    assert "they take about " in done.stdout.replace("\n", " ")
    assert not (tmp_path / "runs").exists()
