"""Which codec is there first, worked out by hand."""

from pathlib import Path

import pytest
import torch

from fedshift.experiment.frontier import GRID
from fedshift.experiment.toml import SettingsError
from fedshift.paper.published import TABLE3
from fedshift.paper.uplinks import (
    MEASURED,
    SETTINGS,
    Candidate,
    CodecUpload,
    advice,
    candidates,
    changes,
    choices,
    crossover,
    frontier_table,
    measure,
    model,
    plan,
    table3,
)
from tests.runs import fedshift

EXACT = CodecUpload("Identity", 8.421e6, 0.0, None)
POOR = CodecUpload("KMeans(4)", 1.059e6, 0.179, 20.1)
BAD = CodecUpload("KMeans(2)", 0.5e6, 0.1, 9.3)
CAST = CodecUpload("Cast(bfloat16)", 4.2e6, 0.01, 55.6)
FOUND = [
    Candidate("exact", EXACT, "weights"),
    Candidate("lean", CodecUpload("lean", 0.2e6, 0.1, 3.0), "updates, error feedback"),
    Candidate("extreme", CodecUpload("extreme", 0.05e6, 0.1, 1.0), "updates, error feedback"),
    Candidate("random-4", CodecUpload("random-4", 1.05e6, 0.1, 18.0), "weights"),
]


def test_the_paper_s_own_figures_give_its_rule() -> None:
    """(8.421 - 0.179) / 1.059 = 7.78"""
    table = table3([EXACT, POOR], 1e6)
    assert table.rows[1][4] == "7.78"
    assert table.rows[1][-1] == "7.78"
    assert TABLE3["KMeans(8)"].bytes == 2_194_000


def test_codecs_come_in_the_order_they_arrive() -> None:
    """At 1 MB/s: 0.1 + 0.5, 0.179 + 1.059 and 8.421 s; at 1 GB/s the one that takes no time to encode is first."""
    table = plan([EXACT, POOR, BAD], 1e6)
    assert [row[:2] for row in table.rows] == [("KMeans(2)", "0.6"), ("KMeans(4)", "1.24"), ("Identity", "8.42")]
    assert plan([EXACT, POOR, BAD], 1e9).rows[0][0] == "Identity"
    # 7.362 MB in 0.179 s
    assert crossover([EXACT, POOR]) == "First on the slowest links is KMeans(4), from 41.1 MB/s on Identity."


def test_the_uplink_that_arrives_first_is_recommended_unless_it_lost_accuracy() -> None:
    """At 1 MB/s: 0.15 s, 0.3 s, 1.15 s and 8.421 s."""
    table, told = choices(FOUND, 1e6), advice(FOUND, [EXACT, CAST], 1e6)
    assert [row[0] for row in table.rows] == [SETTINGS[name] for name in ("extreme", "lean", "random-4", "exact")]
    assert [row[-1] for row in table.rows] == ["", "recommended", "", ""]
    assert table.rows[1][1:5] == ("updates, error feedback", "0.3", "100.0", "200,000")
    assert told[0].startswith(
        'Take uplink = "lean" (updates, error feedback): there in 0.3 s where exact uploads take 8.42'
    )
    assert told[1].startswith('uplink = "extreme" is quicker, 0.15 s, but on digits it lost ')
    assert told[2].startswith(
        "For clients that cannot keep memory or send updates: uplink.bits = 4 (4-bit K-means codes"
    )
    # 4 MB in 0.09 s, and then 4.221 MB in 0.01 s
    assert told[3] == (
        'First on the slowest links is uplink = "lean", from 44.4 MB/s on uplink.bits = 16, '
        'from 422 MB/s on uplink = "exact".'
    )
    assert any("`fedshift frontier --task FILE.toml` measures another task" in sentence for sentence in told)
    assert any("synthetic updates (Laplace)" in sentence for sentence in told)


def test_on_a_fast_link_exact_or_16_bits_are_quicker() -> None:
    """At 60 MB/s: lean 0.103 s, bfloat16 0.08 s, exact 0.14 s; at 1 GB/s: 0.1002, 0.0142 and 0.0084 s."""
    lean, cast, *_ = advice(FOUND, [EXACT, CAST], 6e7)
    assert lean.startswith('Take uplink = "lean"')
    assert cast.startswith(
        "uplink.bits = 16 (bfloat16) is quicker on such a link: there in 0.08 s, with an error of 0.17 %"
    )
    first, *others = advice(FOUND, [EXACT, CAST], 1e9)
    assert first == 'Take uplink = "exact": on this link no other uplink arrives sooner.'
    assert not any("quicker" in sentence or "cannot keep memory" in sentence for sentence in others)


def test_named_uplinks_are_measured_on_what_they_send() -> None:
    """0.6 and 0.15 bits a value of 100,000, and 4 bits and 16 means."""
    found = {one.name: one for one in candidates({"weight": torch.randn(100, 1000)}, 10.0, repeats=1)}
    assert {name: one.sends for name, one in found.items()} == {
        "exact": "weights",
        "lean": "updates, error feedback",
        "extreme": "updates, error feedback",
        "random-4": "weights",
    }
    assert found["exact"].upload.bytes > 4_000_000
    for name, rate in (("lean", 0.6), ("extreme", 0.1614)):  # of 2 %: 0.1414 bits for where they are, 0.02 for signs
        assert found[name].upload.bytes == pytest.approx(10 * 100_000 * rate / 8, rel=0.1)
    assert found["random-4"].upload.bytes == pytest.approx(10 * 50_000, rel=0.1)
    assert all(one.upload.encode > 0 for one in found.values())


def test_published_figures_are_those_of_the_frontier() -> None:
    assert list(MEASURED) == list(GRID)
    assert set(SETTINGS) <= set(GRID)
    full = MEASURED["exact"]
    assert all(one.points == pytest.approx(one.accuracy - full.accuracy, abs=0.011) for one in MEASURED.values())
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "choosing-bits.md").read_text()
    assert frontier_table().markdown() in guide


def test_a_codec_that_is_never_first_is_not_named() -> None:
    """Of lines 1 + 4x, 2 + 2x and 4 + x all are first somewhere; 3 + 3x is above the second throughout."""
    lines = [
        CodecUpload("a", 4, 1, None),
        CodecUpload("b", 2, 2, None),
        CodecUpload("c", 1, 4, None),
        CodecUpload("d", 3, 3, None),
    ]
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
