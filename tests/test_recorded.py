"""Reading of complete, unfinished and damaged records."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedshift.core.files import RunError
from fedshift.paper.publish import publish
from fedshift.paper.records import FinishedRun
from fedshift.runs.recorded import Broken, Recorded, recorded
from fedshift.runs.sheet import sheet
from fedshift.runs.summary import load
from tests.report.written import GUESSED, damage, published, settings, write, write_histograms
from tests.runs import go, small


def readable(folder: Path) -> Recorded:
    found = recorded(folder)
    assert isinstance(found, Recorded), found
    return found


def test_everything_that_a_run_records_is_read(tmp_path: Path) -> None:
    experiment = small({"uplink": {"bits": "32+4"}})
    go(experiment, tmp_path / "run")
    run = readable(tmp_path / "run")
    assert run.experiment == experiment
    assert run.rounds.tolist() == list(range(1, 9))
    assert (run.finished, run.lost, run.missing) == (True, {}, 0)
    assert run.layers("drift") == ["fc1.weight", "fc2.weight"]
    assert [client.group for client in run.clients[:2]] == ["32 bit", "4 bit"]
    assert sum(client.examples for client in run.clients) == sum(sum(client.labels) for client in run.clients)
    assert {held.round for held in run.weights} == {1, 2, 4, 6, 8}
    assert sum(run.weights[0].histogram.before) == sum(run.weights[0].histogram.after) == 64 * 8
    assert (run.up > 0).all()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "too few cells": lambda line: line.rpartition(b",")[0],
    "too many cells": lambda line: line + b",1",
    "no number": lambda line: line.replace(b",0.5,", b",half,", 1),
    "cut short": lambda line: line[:9],
    "not UTF-8": lambda line: line[:5] + b"\xff" + line[6:],
    "NUL": lambda line: line[:5] + b"\0" * 40,
    "a quotation mark": lambda line: b'"' + line,
    "a round that is no number": lambda line: b"x" + line,
    "a round that cannot be": lambda line: b"9" + line,
    "a round that was before": lambda line: b"1" + line[1:],
    "empty": lambda line: b"",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_line_is_lost_and_no_other(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(rounds=12))
    damage(folder / "rounds.csv", 7, DAMAGES[kind])
    run = readable(folder)
    assert run.rounds.tolist() == [n for n in range(1, 13) if n != 7]
    assert (run.lost, run.missing, run.finished) == ({"rounds.csv": 1}, 1, True)


def test_a_last_line_without_its_end_may_be_cut_and_is_lost(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(rounds=12), reached=8)
    (folder / "rounds.csv").write_bytes((folder / "rounds.csv").read_bytes()[:-2])
    run = readable(folder)
    assert (run.reached, run.lost, run.finished) == (7, {"rounds.csv": 1}, False)


def test_values_that_were_not_measured_are_nan(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(rounds=4), [None, 0.25, None, 0.5], figures={"loss": [None, 2, None, 1]})
    run = readable(folder)
    assert run.evaluated.tolist() == [False, True, False, True]
    assert run.scores[run.evaluated].tolist() == [0.25, 0.5]
    assert np.isnan(run.figure("nothing like it")).all()


def test_a_run_that_has_just_started_has_no_rounds(tmp_path: Path) -> None:
    run = readable(write(tmp_path / "run", reached=0))
    assert (run.reached, run.finished, run.missing, run.lost) == (0, False, 0, {})


def test_a_published_record_with_all_rounds_is_finished(tmp_path: Path) -> None:
    folder = published(tmp_path / "run", settings(rounds=12))
    assert readable(folder).finished
    assert readable(folder).up.tolist() == [1000.0] * 12
    lines = (folder / "rounds.csv").read_text().splitlines(keepends=True)
    (folder / "rounds.csv").write_text("".join(lines[:-1]))
    assert not readable(folder).finished


def test_damaged_lines_of_other_files_are_lost_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    write_histograms(folder, [1, 10, 20])
    damage(folder / "histograms.jsonl", 1, lambda line: line.replace(b'"low"', b'"lower"'))
    damage(folder / "histograms.jsonl", 2, lambda line: line[:30])
    damage(folder / "clients.csv", 2, lambda line: line.replace(b"10", b"ten", 1))
    (folder / "about.json").write_text("{")
    run = readable(folder)
    assert [held.round for held in run.weights] == [1]
    assert [client.number for client in run.clients] == [0, 2, 3]
    assert run.lost == {"clients.csv": 1, "histograms.jsonl": 2}
    assert run.about == {}


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("settings.toml", None, "settings.toml: cannot be read: No such file"),
        ("settings.toml", b"name = ", "settings.toml: not TOML"),
        ("settings.toml", b"\xff\xfe", "settings.toml: not a text file"),
        ("settings.toml", b"[train]\nlrr = 1\n", "settings.toml: unknown setting 'train.lrr'"),
        ("rounds.csv", None, "rounds.csv: cannot be read: No such file"),
        ("rounds.csv", b"", "rounds.csv: the first line contains no column named round"),
        ("rounds.csv", b"\0\0\0\n\0\0", "rounds.csv: the first line contains no column named round"),
    ],
)
def test_a_run_that_cannot_be_read_is_broken(name: str, content: bytes | None, sentence: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    found = recorded(folder)
    assert isinstance(found, Broken)
    assert sentence in found.problem
    assert len(found.problem.splitlines()) == 1


def test_a_missing_column_or_an_invalid_value_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("round,score\n1,\n2,0.5\n3,half\n")
    with pytest.raises(RunError, match=r"some\.csv: score: contains a value that is not a number"):
        sheet(tmp_path / "some.csv").column("score")
    with pytest.raises(RunError, match=r"some\.csv: has no column loss"):
        sheet(tmp_path / "some.csv").column("loss")
    assert sheet(tmp_path / "some.csv").column("round") == [1.0, 2.0, 3.0]


def test_every_reader_of_a_record_finds_the_same_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(rounds=3), figures=GUESSED)
    run = readable(folder)
    assert run.up.tolist() == sheet(folder / "rounds.csv").uploaded().up.tolist() == [1000, 1250, 1250]
    assert run.uploaded.estimate == (3, 2, 1, 1.25)
    loaded = load(folder, run.experiment)
    assert (loaded.bytes_up, loaded.estimate) == (3500, run.uploaded.estimate)


def test_a_published_record_keeps_the_correction_of_its_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(rounds=3), figures=GUESSED)
    place, _ = publish(folder, tmp_path / "results")
    found = readable(place)
    assert (found.figures["bytes.up"].tolist(), found.up.tolist()) == ([1000] * 3, [1000, 1250, 1250])
    assert found.uploaded.estimate == FinishedRun(place).uploaded.estimate == (3, 2, 1, 1.25)
    exact, _ = publish(write(tmp_path / "exact", settings(rounds=3)), tmp_path / "results")
    assert not set(GUESSED) & readable(exact).figures.keys()


@pytest.mark.parametrize("framed", [math.nan, math.inf, -1000.0, 0.0])
def test_a_ratio_that_is_not_positive_and_finite_corrects_nothing(framed: float, tmp_path: Path) -> None:
    run = readable(
        write(tmp_path / "run", settings(rounds=3), figures=GUESSED | {"bytes.framed": [framed, None, None]})
    )
    assert run.up.tolist() == [1000] * 3
