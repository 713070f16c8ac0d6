"""Figures as files."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from fedshift.core.files import RunError
from fedshift.experiment.toml import SettingsError
from fedshift.report.charts import Report
from fedshift.report.drawing import INK, charts, draw, figure
from fedshift.report.gather import gather
from tests.report.written import settings, write, write_histograms

RULES = {"no": {"on": False}, "layer": {"per": "layer"}, "filter": {"per": "filter"}}
HEADS = {"svg": b"<?xml", "png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-1."}


def report(tmp_path: Path) -> Report:
    for shift in (False, True):
        folder = write(tmp_path / "runs" / str(shift), settings(rounds=3, shift=shift), [0.3, 0.4, 0.5 + shift / 10])
        write_histograms(folder, [1])
    return gather([tmp_path / "runs"])


def test_every_kind_of_chart_is_drawn_in_three_formats(tmp_path: Path) -> None:
    whole = report(tmp_path)
    one_of_each = {type(chart).__name__: chart for chart in reversed([*charts(whole)]) if chart.name != "score-bytes"}
    assert one_of_each.keys() == {"Curves", "Intervals", "Points", "Stacks", "Heat", "Histograms"}
    made = whole._replace(sections=[whole.sections[0]._replace(parts=[*one_of_each.values()])])
    paths = draw(made, tmp_path / "figures", list(HEADS))
    assert sorted(path.name for path in paths) == sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(paths) == 18
    for path in paths:
        assert path.read_bytes().startswith(HEADS[path.suffix[1:]]), path
    words = {
        text.text
        for text in ET.parse(tmp_path / "figures" / "score-seconds.svg").iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"accuracy, %", "time on the uplink, ms at 1.25 MB/s", "no shift", "shift per layer"} <= words


def test_both_rules_of_the_shift_look_different_in_files(tmp_path: Path) -> None:
    """Curves by their dashes; means by open discs, diamonds and discs."""
    for name, shift in RULES.items():
        write(tmp_path / name, settings(rounds=3) | {"shift": shift})
    made = gather([tmp_path])
    lines = {line.key: line for line in made.lines}
    drawn = {chart.name: figure(chart, lines) for chart in charts(made) if chart.name in ("score", "final")}
    strokes = [(one.get_label(), one.get_linestyle()) for one in drawn["score"].legends[0].get_lines()]
    assert strokes == [("no shift", "--"), ("shift per layer", "-."), ("shift per filter", "-")]
    marks = [
        (one.get_label(), one.get_marker(), one.get_markerfacecolor()) for one in drawn["final"].legends[0].get_lines()
    ]
    assert marks == [("no shift", "o", "white"), ("shift per layer", "D", INK), ("shift per filter", "o", INK)]


def test_the_same_report_gives_the_same_files_again(tmp_path: Path) -> None:
    made = report(tmp_path)
    few = made._replace(sections=made.sections[:1])
    first = [path.read_bytes() for path in draw(few, tmp_path / "figures", ["svg", "pdf"])]
    assert [path.read_bytes() for path in draw(few, tmp_path / "figures", ["svg", "pdf"])] == first


def test_a_file_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "score.svg").write_text("<svg>mine</svg>")
    with pytest.raises(RunError, match=r"score\.svg: already exists and was not drawn by fedshift report"):
        draw(report(tmp_path), tmp_path, ["svg"])
    assert (tmp_path / "score.svg").read_text() == "<svg>mine</svg>"
    assert [path.name for path in tmp_path.glob("*.*")] == ["score.svg"]


def test_settings_of_matplotlib_are_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine: dict[Any, Any] = {"backend": "svg", "font.size": 21.0}
    for key, value in mine.items():
        monkeypatch.setitem(matplotlib.rcParams, key, value)
    draw(report(tmp_path), tmp_path / "figures")
    assert {key: matplotlib.rcParams[key] for key in mine} == mine


def test_an_unknown_format_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--format gif: must be among svg, png, pdf"):
        draw(report(tmp_path), tmp_path / "figures", ["gif"])


def test_without_matplotlib_the_message_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingsError, match=r"--figures needs matplotlib: pip install 'matplotlib>=3.9'"):
        draw(report(tmp_path), tmp_path / "figures")
