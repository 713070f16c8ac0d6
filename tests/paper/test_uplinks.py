"""Which codec is there first, worked out by hand."""

import pytest
import torch

from fedshift.paper.published import TABLE3
from fedshift.paper.uplinks import Upload, changes, measure, model, plan, table3
from fedshift.toml import SettingsError
from tests.runs import fedshift

EXACT = Upload("Identity", 8.421e6, 0.0, None)
POOR = Upload("KMeans(4)", 1.059e6, 0.179, 20.1)
BAD = Upload("KMeans(2)", 0.5e6, 0.1, 9.3)


def test_the_paper_s_own_figures_give_its_rule() -> None:
    """(8.421 - 0.179) / 1.059 = 7.78"""
    table = table3([EXACT, POOR], 1e6)
    assert table.rows[1][4] == "7.78"
    assert table.rows[1][-1] == "7.78"
    assert TABLE3["KMeans(8)"].bytes == 2_194_000


def test_codecs_come_in_the_order_they_arrive() -> None:
    """At 1 MB/s: 0.1 + 0.5, 0.179 + 1.059 and 8.421 s; at 1 GB/s the one that takes no time to encode is first."""
    table, (advice, turns, shift) = plan([EXACT, POOR, BAD], 1e6)
    assert [row[:2] for row in table.rows] == [("KMeans(2)", "0.6"), ("KMeans(4)", "1.24"), ("Identity", "8.42")]
    assert advice.startswith("Send KMeans(4): there in 1.24 s where fp32 takes 8.42 s, with an error of 9.9 %")
    assert "KMeans(2) is there in 0.6 s, but its error of 34 %" in advice
    # 7.362 MB in 0.179 s
    assert turns == "First on the slowest links is KMeans(4), from 41.1 MB/s on Identity."
    assert shift.startswith('Shift per filter (shift.per = "filter", the default): nothing on the wire')
    fast, _ = plan([EXACT, POOR, BAD], 1e9)
    assert fast.rows[0][0] == "Identity"


def test_a_coarse_codec_is_recommended_for_updates_only() -> None:
    note = "Use it on updates, with error feedback: on whole weights, such an error costs accuracy."
    for codec, coarse in ((POOR, True), (POOR._replace(snr_db=36.7), False)):
        _, (advice, *_) = plan([EXACT, codec], 1e6)
        assert (note in advice) == coarse
    _, (advice, *_) = plan([EXACT], 1e6)
    assert note not in advice


def test_a_codec_that_is_never_first_is_not_named() -> None:
    """Of lines 1 + 4x, 2 + 2x and 4 + x all are first somewhere; 3 + 3x is above the second throughout."""
    lines = [Upload("a", 4, 1, None), Upload("b", 2, 2, None), Upload("c", 1, 4, None), Upload("d", 3, 3, None)]
    assert [(at, one.codec) for at, one in changes(lines)] == [(0.0, "c"), (0.5, "b"), (2.0, "a")]


def test_a_large_model_is_measured_in_part() -> None:
    params, times = model(None, 40_000_000)
    assert (sum(x.numel() for x in params.values()), times) == (4_000_000, 10.0)
    params, times = model("mlp", None)
    assert (set(params), times) == ({"fc1.weight", "fc2.weight"}, 1.0)


def test_codecs_are_measured_on_any_model() -> None:
    uploads = {one.codec: one for one in measure({"weight": torch.randn(8, 100)}, 10.0)}
    assert uploads["Identity"].bytes > 10 * 3_200
    assert uploads["Identity"].snr_db is None
    assert uploads["Uniform(8)"].error < uploads["Uniform(4)"].error
    assert all(one.encode > 0 for one in uploads.values())


def test_a_model_that_is_wrong_gets_a_sentence() -> None:
    with pytest.raises(SettingsError, match="--model resnet: no such model; known are"):
        model("resnet", None)
    with pytest.raises(SettingsError, match="--weights: goes without --model"):
        model("mlp", 5)
    with pytest.raises(SettingsError, match=r"--model torch\.nn:ReLU: has no weights"):
        model("torch.nn:ReLU", None)


def test_more_weights_than_a_model_can_have_are_refused() -> None:
    done = fedshift("plan", "--uplink", "1MB/s", "--weights", "9" * 400)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
