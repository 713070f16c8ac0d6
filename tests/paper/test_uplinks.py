"""Upload times and recommendations, computed by hand."""

from pathlib import Path
from statistics import fmean

import pytest
import torch

from fedshift.experiment.frontier import GRID
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError
from fedshift.paper import tasks
from fedshift.paper.published import TABLE3
from fedshift.paper.uplinks import (
    MEASURED,
    SETTINGS,
    WORST,
    Candidate,
    CodecUpload,
    advice,
    candidates,
    changes,
    choices,
    crossover,
    measure,
    model,
    plan,
    table3,
)
from fedshift.runs.summary import UPLINK, phrase, uplink_label
from tests.runs import fedshift

EXACT = CodecUpload("Identity", 8.421e6, 0.0, None)
POOR = CodecUpload("KMeans(4)", 1.059e6, 0.179, 20.1)
BAD = CodecUpload("KMeans(2)", 0.5e6, 0.1, 9.3)
CAST = CodecUpload("Cast(bfloat16)", 4.2e6, 0.01, 55.6)
FOUND = [
    Candidate("exact", EXACT, "weights"),
    Candidate("lean", CodecUpload("lean", 0.2e6, 0.1, 3.0), "updates"),
    Candidate("extreme", CodecUpload("extreme", 0.05e6, 0.1, 1.0), "updates"),
    Candidate("random-4", CodecUpload("random-4", 1.05e6, 0.1, 18.0), "weights"),
]


def test_the_rule_agrees_with_the_paper_s_figures() -> None:
    """(8.421 - 0.179) / 1.059 = 7.78"""
    table = table3([EXACT, POOR], 1e6)
    assert table.rows[1][4] == "7.78"
    assert table.rows[1][-1] == "7.78"
    assert TABLE3["KMeans(8)"].bytes == 2_194_000


def test_codecs_are_listed_in_order_of_arrival() -> None:
    """At 1 MB/s: 0.1 + 0.5, 0.179 + 1.059 and 8.421 s; at 1 GB/s the codec without encoding time is first."""
    table = plan([EXACT, POOR, BAD], 1e6)
    assert [row[:2] for row in table.rows] == [("KMeans(2)", "0.6"), ("KMeans(4)", "1.24"), ("Identity", "8.42")]
    assert plan([EXACT, POOR, BAD], 1e9).rows[0][0] == "Identity"
    # 7.362 MB in 0.179 s
    assert crossover([EXACT, POOR]) == "First to arrive on the slowest links: KMeans(4); from 41.1 MB/s: Identity."


def test_losses_on_the_worst_task_are_those_of_the_published_records() -> None:
    """Mean differences over seeds, of both shifts."""
    found = tasks.published(Path(__file__).parent.parent.parent / "results")
    for name in ("lean", "extreme"):
        pairs = [(name, "exact"), (f"{name}-no-shift", "exact-no-shift")]
        gains = [task.gains(*pair).gains for task in found for pair in pairs if pair[0] in task.results.records]
        assert WORST[name][1] == round(min(fmean(seeds) for seeds in gains if seeds), 1)


def test_the_first_uplink_to_arrive_is_recommended_unless_it_lost_accuracy() -> None:
    """At 1 MB/s: 0.15 s, 0.3 s, 1.15 s and 8.421 s."""
    table, sentences = choices(FOUND, 1e6), advice(FOUND, [EXACT, CAST], 1e6)
    assert [row[0] for row in table.rows] == [SETTINGS[name] for name in ("extreme", "lean", "random-4", "exact")]
    assert [row[-1] for row in table.rows] == ["", "recommended", "", ""]
    assert table.rows[1][1:5] == ("updates", "0.3", "100.0", "200,000")
    assert sentences[0].startswith('Use uplink = "lean" (updates): an upload takes 0.3 s instead of 8.42 s (exact); on')
    assert sentences[1].startswith(f'uplink = "extreme" is faster, 0.15 s, but on {WORST["extreme"][0]} it lost ')
    assert sentences[2].startswith("For clients that cannot send updates, uplink.bits = 4 (4-bit K-means codes")
    # 4 MB in 0.09 s, and then 4.221 MB in 0.01 s
    assert sentences[3] == (
        'First to arrive on the slowest links: uplink = "lean"; from 44.4 MB/s: uplink.bits = 16; '
        'from 422 MB/s: uplink = "exact".'
    )
    assert any("Measure yours with `fedshift frontier --task FILE.toml`" in sentence for sentence in sentences)
    assert any("synthetic updates (Laplace)" in sentence for sentence in sentences)


def test_on_a_fast_link_exact_or_16_bits_are_faster() -> None:
    """At 60 MB/s: lean 0.103 s, bfloat16 0.08 s, exact 0.14 s; at 1 GB/s: 0.1002, 0.0142 and 0.0084 s."""
    lean, cast, *_ = advice(FOUND, [EXACT, CAST], 6e7)
    assert lean.startswith('Use uplink = "lean"')
    assert cast.startswith(
        "uplink.bits = 16 (bfloat16) is faster on this link, 0.08 s, with a relative error of 0.17 %"
    )
    first, *others = advice(FOUND, [EXACT, CAST], 1e9)
    assert first == 'Use uplink = "exact": no other uplink arrives earlier on this link.'
    assert not any("faster" in sentence or "cannot send updates" in sentence for sentence in others)


def test_named_uplinks_are_measured_on_weights_or_updates() -> None:
    """0.8 and 0.3 bits per value for 100,000 values, and 4 bits with 16 means."""
    found = {item.name: item for item in candidates({"weight": torch.randn(100, 1000)}, 10.0, repeats=1)}
    assert {name: item.sends for name, item in found.items()} == {
        "exact": "weights",
        "lean": "updates",
        "extreme": "updates",
        "random-4": "weights",
    }
    assert found["exact"].upload.bytes > 4_000_000
    for name, rate in (("lean", 0.8), ("extreme", 0.3)):
        assert found[name].upload.bytes == pytest.approx(10 * 100_000 * rate / 8, rel=0.1)
    assert found["random-4"].upload.bytes == pytest.approx(10 * 50_000, rel=0.1)
    assert all(item.upload.encode > 0 for item in found.values())


def test_published_figures_cover_the_frontier() -> None:
    assert list(MEASURED) == list(GRID)
    assert set(SETTINGS) <= set(GRID)
    full = MEASURED["exact"]
    assert all(item.points == pytest.approx(item.accuracy - full.accuracy, abs=0.011) for item in MEASURED.values())


def test_the_guide_shows_the_published_figures() -> None:
    """Accuracy with its spread, and bytes, in order of bytes."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "choosing-bits.md").read_text(encoding="utf-8")
    _, _, section = guide.partition("## Measured on digits")
    cells = [line.strip("| ").split(" | ") for line in section.partition("\n## ")[0].splitlines()]
    found = [(name, *figures[:3]) for name, *figures in cells if name in MEASURED]
    assert found == [
        (
            name,
            phrase(UPLINK, "", uplink_label(Experiment(uplink=GRID[name]))),
            f"{score.accuracy:.1f} ± {score.spread:.1f}",
            f"{score.megabytes:.2f}",
        )
        for name, score in sorted(MEASURED.items(), key=lambda item: (item[1].megabytes, item[0]))
    ]


def test_a_codec_that_is_never_first_is_not_named() -> None:
    """Lines 1 + 4x, 2 + 2x and 4 + x are each lowest somewhere; 3 + 3x is above 2 + 2x everywhere."""
    lines = [
        CodecUpload("a", 4, 1, None),
        CodecUpload("b", 2, 2, None),
        CodecUpload("c", 1, 4, None),
        CodecUpload("d", 3, 3, None),
    ]
    assert [(at, upload.codec) for at, upload in changes(lines)] == [(0.0, "c"), (0.5, "b"), (2.0, "a")]


def test_a_large_model_is_measured_in_part() -> None:
    params, times = model(None, 40_000_000)
    assert (sum(x.numel() for x in params.values()), times) == (4_000_000, 10.0)
    params, times = model("mlp", None)
    assert (set(params), times) == ({"fc1.weight", "fc2.weight"}, 1.0)


def test_codecs_are_measured_on_any_model() -> None:
    uploads = {upload.codec: upload for upload in measure({"weight": torch.randn(8, 100)}, 10.0)}
    assert uploads["Identity"].bytes > 10 * 3_200
    assert uploads["Identity"].snr_db is None
    assert uploads["Uniform(8)"].error < uploads["Uniform(4)"].error
    assert all(upload.encode > 0 for upload in uploads.values())


def test_a_wrong_model_is_rejected() -> None:
    with pytest.raises(SettingsError, match="--model resnet: no such model; known are"):
        model("resnet", None)
    with pytest.raises(SettingsError, match="--weights: cannot be combined with --model"):
        model("mlp", 5)
    with pytest.raises(SettingsError, match=r"--model torch\.nn:ReLU: has no weights"):
        model("torch.nn:ReLU", None)


def test_too_many_weights_are_rejected() -> None:
    done = fedshift("plan", "--uplink", "1MB/s", "--weights", "9" * 400)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
