"""`fedshift paper figures` from the command line."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift.paper.figures import network
from tests.runs import fedshift, stopped

ROUNDS = 10


@pytest.fixture(autouse=True)
def nothing_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use digits, independent of the cache of this machine, and no published records."""
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    network.examples.cache_clear()
    yield
    network.examples.cache_clear()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All ten figures, from a new run."""
    out = tmp_path_factory.mktemp("drawn") / "figures"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSHIFT_DATA", str(out / "none"))
        patch.chdir(out.parent)
        network.examples.cache_clear()
        done = fedshift("paper", "figures", "--rounds", str(ROUNDS), "--out", out, "-q")
    assert done.exit_code == 0, done.output
    (out / "stdout").write_text(done.stdout)
    return out


def texts(path: Path) -> str:
    """Texts of an SVG, which contains them as comments next to the shapes."""
    return " ".join(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_all_ten_figures_are_drawn_with_their_sources(fresh: Path) -> None:
    printed = (fresh / "stdout").read_text().splitlines()
    assert [line.partition(": ")[0] for line in printed] == [str(fresh / f"figure-{n}.svg") for n in range(1, 11)]
    assert f"figure-7.svg: a new small run: digits, {ROUNDS} rounds" in printed[6]
    assert "90 of 90 steps" in printed[4]
    for n in (5, 7, 8, 9):
        assert f"A new small run: digits, {ROUNDS} rounds, 3 seeds" in texts(fresh / f"figure-{n}.svg")
    for n in (3, 4, 6, 10):
        assert "digits" in texts(fresh / f"figure-{n}.svg")
    assert "8,623,521 bytes" in texts(fresh / "figure-1.svg")
    assert "1,078,231 bytes" in texts(fresh / "figure-1.svg")


def test_figures_are_reproduced_byte_for_byte(fresh: Path) -> None:
    """Including local trainings; finished runs are read, not repeated."""
    before = {path: path.read_bytes() for path in fresh.glob("*.svg")}
    runs = {path: path.stat().st_mtime_ns for path in fresh.glob("runs/*/*/model.safetensors")}
    assert (len(before), len(runs)) == (10, 9)
    assert fedshift("paper", "figures", "--rounds", str(ROUNDS), "--out", fresh, "-q").exit_code == 0
    assert {path: path.read_bytes() for path in before} == before
    assert {path: path.stat().st_mtime_ns for path in runs} == runs


def test_runs_of_a_folder_are_drawn(fresh: Path, tmp_path: Path) -> None:
    done = fedshift("paper", "figures", "7", "9", "--records", fresh / "runs", "--out", "mine", "--format", "png")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"mine/figure-7.png: 9 runs of {ROUNDS} rounds in {fresh / 'runs'}",
        f"mine/figure-9.png: 6 runs of {ROUNDS} rounds in {fresh / 'runs'}",  # without 32+32 bits
    ]
    assert {path.name for path in Path("mine").iterdir()} == {"figure-7.png", "figure-9.png"}
    assert (tmp_path / "mine" / "figure-7.png").read_bytes()[:4] == b"\x89PNG"


def test_published_records_are_drawn_unless_a_new_run_is_requested(fresh: Path) -> None:
    """The same runs, published: fewer columns, fewer digits, no model."""
    assert fedshift("paper", "publish", fresh / "runs", "--to", "results").exit_code == 0
    done = fedshift("paper", "figures", "8", "9", "--format", "pdf", "--format", "svg")
    assert done.exit_code == 0, done.output
    assert f"figures/figure-8.svg: 9 runs of {ROUNDS} rounds in results" in done.stdout
    assert sorted(path.name for path in Path("figures").iterdir()) == [
        f"figure-{n}.{kind}" for n in (8, 9) for kind in ("pdf", "svg")
    ]
    assert "A new small run" not in texts(Path("figures/figure-8.svg"))
    again = fedshift("paper", "figures", "8", "--fresh", "--rounds", str(ROUNDS), "--out", fresh, "-q")
    assert "a new small run" in again.stdout


def test_an_unfinished_run_is_left_out(tmp_path: Path) -> None:
    stopped(tmp_path / "runs" / "half")
    done = fedshift("paper", "figures", "7", "--records", "runs")
    assert (done.exit_code, done.stdout) == (2, "")
    why = "runs/half: contains 5 of 8 rounds; the run is not finished"
    assert done.stderr == f"fedshift: --records runs: contains no finished run ({why})\n"


def test_a_figure_that_cannot_be_drawn_is_reported_and_the_others_are_drawn(fresh: Path) -> None:
    """A record without values of layers."""
    (run,) = (fresh / "runs").glob("*/shift-per-layer*seed-0")
    own = Path("own")
    own.mkdir()
    (own / "settings.toml").write_bytes((run / "settings.toml").read_bytes())
    lines = [line.split(",") for line in (run / "rounds.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(lines[0]) if "weight" not in name]
    (own / "rounds.csv").write_text("\n".join(",".join(line[i] for i in kept) for line in lines) + "\n")
    done = fedshift("paper", "figures", "7", "8", "9", "--records", "own")
    assert done.exit_code == 2
    assert done.stderr == "fedshift: figure 9: own: contains no values of layers, which figure 9 needs\n"
    assert {path.name for path in Path("figures").iterdir()} == {"figure-7.svg", "figure-8.svg"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["11"], "figure 11: there is no such figure; the paper has 1 to 10"),
        (["two"], "figure two: there is no such figure"),
        (["1", "--format", "jpeg"], "--format jpeg: must be among svg, png, pdf"),
        (["7", "--records", "nowhere"], "--records nowhere: there is no such folder"),
        (["7", "--records", "empty"], "--records empty: contains no finished run"),
        (["7", "--records", "empty", "--fresh"], "--fresh: requests a new run, and --records empty"),
        (["7", "--records", "empty", "--rounds", "20"], "--rounds 20: requests a new run"),
        (["1", "--out", "file"], "--out file: cannot be written to: File exists"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], sentence: str) -> None:
    Path("empty").mkdir()
    Path("file").write_text("mine")
    done = fedshift("paper", "figures", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr
    assert Path("file").read_text() == "mine"


def test_without_matplotlib_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    done = fedshift("paper", "figures", "1")
    assert (done.exit_code, Path("figures").exists()) == (2, False)
    assert "needs matplotlib: pip install 'matplotlib>=3.9'" in done.stderr
