"""Logged values are the cells of the record, under names that dashboards can group."""

from pathlib import Path

import pytest
from mlflow.utils.validation import _validate_metric_name

from fedshift.runs.columns import header
from fedshift.track.figures import Figures, legal, name
from tests.federations import federation, settings

HEAD = "round,accuracy,loss,predicted.0,step.fc1.weight,error,bytes.codes,bytes.side,bytes.header,bytes.down"
HEAD += ",share,arrived,dropped,failed,seconds.train\n"


def test_bytes_add_up_and_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    record = tmp_path / "rounds.csv"
    record.write_text(f"{HEAD}1,,,,0.25,0.1,100,20,3,500,0.5,9,1,4 7,0.125\n2,0.5,nan,1,0.25,0.1,1,1,1,5,0.5,10,0,,2\n")
    first, second = Figures(record).new()
    assert first == (
        1,
        {
            "layers/step/fc1.weight": 0.25,
            "uplink/error": 0.1,
            "bytes/codes": 100,
            "bytes/side": 20,
            "bytes/header": 3,
            "bytes/up": 123,
            "bytes/up_total": 123,
            "bytes/down": 500,
            "bytes/down_total": 500,
            "uplink/share": 0.5,
            "clients/arrived": 9,
            "clients/dropped": 1,
            "clients/failed": 2,
            "seconds/train": 0.125,
        },
    )
    number, figures = second
    assert (number, figures["test/accuracy"], figures["predicted/0"], figures["clients/failed"]) == (2, 0.5, 1, 0)
    assert (figures["bytes/up"], figures["bytes/up_total"], figures["bytes/down_total"]) == (3, 126, 505)
    assert figures["test/loss"] != figures["test/loss"]  # a loss of NaN is logged as it is


def test_a_line_is_read_when_it_is_complete_and_only_once(tmp_path: Path) -> None:
    record = tmp_path / "rounds.csv"
    line = "1,0.5,1,1,0.25,0.1,100,20,3,500,0.5,9,1,,0.1\n"
    record.write_text(HEAD + line[:20])
    figures = Figures(record)
    assert list(figures.new()) == []
    record.write_text(HEAD + line)
    assert [number for number, _ in figures.new()] == [1]
    assert list(figures.new()) == []


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    record = tmp_path / "rounds.csv"
    whole = "0.5,1,1,0.25,0.1,100,20,3,500,0.5,9,1,,0.1\n"
    record.write_bytes(f"{HEAD}1,0.5\n2,{whole}3,\0{whole}4,{whole}".encode())
    assert [number for number, _ in Figures(record).new()] == [2, 4]


def test_names_of_real_columns_are_legal_in_every_tracker() -> None:
    fed = federation()
    names = legal(map(name, header(settings(), fed)))
    assert len(set(names)) == len(names)
    for one in names:
        _validate_metric_name(one)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("layer", ["a/b", "a//b", "/a", "größe", "a" * 400, "a:b", "a\\b", "a b", "%s"])
def test_names_of_odd_layers_are_legal(layer: str) -> None:
    (metric,) = legal([name(f"step.{layer}")])
    assert metric.startswith("layers/step/")
    _validate_metric_name(metric)  # type: ignore[no-untyped-call]
    assert len(metric) <= 250
