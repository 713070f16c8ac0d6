"""The command `fedshift report`."""

import json
from pathlib import Path

import pytest

from fedshift.report.files import write_report
from tests.report.written import settings, write
from tests.runs import fedshift

SIGN = '<meta name="generator" content="fedshift'


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for shift in (False, True):
        write(tmp_path / "runs" / str(shift), settings(rounds=3, shift=shift))
    return tmp_path / "runs"


def test_a_page_is_written_beside_the_runs_and_overwrites_an_older_one(runs: Path) -> None:
    for _ in range(2):
        done = fedshift("report", runs)
        assert (done.exit_code, done.stdout) == (0, f"{runs / 'report.html'}\n")
    page = (runs / "report.html").read_text()
    assert SIGN in page
    assert page.index("Was compression worth it?") < page.index("Did the shift help?")


def test_a_page_that_is_not_a_report_is_not_overwritten(runs: Path) -> None:
    (runs / "report.html").write_text("<html>mine</html>")
    done = fedshift("report", runs)
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        "report.html: already exists and is not a report; choose another file with `fedshift report --out`"
        in done.stderr
    )
    assert (runs / "report.html").read_text() == "<html>mine</html>"
    assert fedshift("report", runs, "--out", runs / "new" / "page.html").exit_code == 0
    assert SIGN in (runs / "new" / "page.html").read_text()


def test_figures_are_drawn_in_the_requested_formats(tmp_path: Path) -> None:
    run = write(tmp_path / "run", settings(rounds=3), layers=(), classes=0)
    done = fedshift("report", run, "--figures", tmp_path / "figures", "--format", "pdf", "--format", "svg")
    assert done.exit_code == 0, done.output
    drawn = list((tmp_path / "figures").iterdir())
    assert {path.suffix for path in drawn} == {".pdf", ".svg"}
    assert {path.stem for path in drawn} >= {"final", "score", "loss", "error", "upload", "phases"}
    assert f"{len(drawn)} figures written to {tmp_path / 'figures'}" in done.stdout


def test_json_is_printed_and_nothing_written(runs: Path) -> None:
    done = fedshift("report", runs, "--json", "--title", "Mine", "--uplink", "1kB/s")
    content = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["title"] == "Mine"
    assert [section["name"] for section in content["sections"]] == ["worth", "answer", "cost", "inside", "what"]
    assert content["sections"][0]["parts"][0]["kind"] == "Table"
    (seconds,) = [part for part in content["sections"][2]["parts"] if part["name"] == "score-seconds"]
    assert (seconds["rate"], seconds["panels"][0]["curves"][0]["x"]) == (1000.0, [1, 2, 3])
    assert not (runs / "report.html").exists()


def test_a_program_writes_a_report_to_any_path(runs: Path, tmp_path: Path) -> None:
    where = write_report([runs], tmp_path / "page.html", title="<Mine> & yours")
    assert where == tmp_path / "page.html"
    assert "<title>&lt;Mine&gt; &amp; yours</title>" in where.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (["empty"], "empty: contains no run"),
        (["runs", "--uplink", "fast"], "--uplink fast: must be a rate"),
        (["runs", "--figures", "figures", "--format", "gif"], "--format gif: must be among svg, png, pdf"),
        (["runs", "--out", "empty"], "empty: is a folder instead of a file; "),
        (["runs", "--out", "runs/True/settings.toml"], "settings.toml: already exists and is not a report"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], sentence: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    Path("empty").mkdir()
    done = fedshift("report", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr
    assert not Path("figures").exists()
