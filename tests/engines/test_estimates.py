"""Bytes of entropy-coded uploads in the batched engine: estimated from counts of codes, checked by real frames."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import BitPack, Experiment, Range, Zstd, resume, run
from fedshift.codecs.base import Coder
from fedshift.codecs.codec import counts, counts_by_lanes
from fedshift.core.types import Decoded
from fedshift.engines import Batched
from fedshift.models import PaperCNN
from fedshift.rounds.engine import arithmetic
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import OpenRound, Ram
from fedshift.runs import summary
from fedshift.runs.run import Run
from tests.engines.test_batched import images
from tests.federations import federation, same, train
from tests.runs import fedshift

CODECS: dict[str, dict[str, Any]] = {
    "K-means, 1 bit": {"bits": 1},
    "K-means, 2 bits": {"bits": 2},
    "K-means, 4 bits": {"bits": 4},
    "uniform, 4 bits": {"bits": 4, "quantizer": "uniform"},
}


def digits(frames: int, rounds: int = 3, seed: int = 0, engine: str = "batched", **uplink: Any) -> Experiment:
    return Experiment(
        seed=seed,
        train={"rounds": rounds, "epochs": 1},
        uplink={"bits": 4, "coder": "range"} | uplink,
        engine={"name": engine, "device": "cpu"},
        record={"frames": frames},
    )


def decoded(fed: Federation, *, frames: bool) -> list[Decoded]:
    """Uploads of the first round."""
    opened = OpenRound(fed, fed.start(), Ram(), frames=frames)
    assert opened.job is not None
    uploads = [upload.frame for upload in list(Batched(fed.task).train([opened.job])[0])]
    assert all(isinstance(upload, Decoded) for upload in uploads)
    return [upload for upload in uploads if isinstance(upload, Decoded)]


@pytest.mark.parametrize("coder", [BitPack(), Range()])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_an_estimate_is_the_length_of_the_encoded_codes(coder: Coder, bits: int) -> None:
    """Within two words for the range coder; exact for codes of equal length."""
    g = torch.Generator().manual_seed(bits)
    rows = [(torch.rand(n, generator=g) ** 3 * 2**bits).to(torch.uint8) for n in (1, 10, 640, 4096, 50_000)]
    for row in rows:
        estimate = coder.estimate(counts([row[None]], 1, 2**bits))
        assert estimate is not None
        assert (estimate.dtype, estimate.shape) == (torch.float64, (1,))
        assert abs(len(coder.encode(row, 2**bits)) - float(estimate)) <= (8 if coder == Range() else 0)


def test_zstd_has_no_estimate() -> None:
    coder: Coder = Zstd()
    assert coder.estimate(torch.tensor([[999, 1]])) is None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_counting_as_on_a_gpu_gives_the_same_counts(bits: int, deterministic: bool) -> None:
    """Rows longer and shorter than the lanes, and not a multiple of them."""
    g = torch.Generator().manual_seed(bits)
    with arithmetic("fp32", deterministic):
        for n in (1, 63, 1000):
            rows = torch.randint(0, 2**bits, (5, n), generator=g).to(torch.uint8)
            assert torch.equal(counts_by_lanes(rows, 2**bits), counts([rows], 5, 2**bits))


def test_counts_of_stacked_tensors_add_up_rows_and_segments() -> None:
    g = torch.Generator().manual_seed(0)
    segments = [torch.randint(0, 8, shape, generator=g).to(torch.uint8) for shape in ((12, 5), (4, 3))]
    found = counts(segments, stack=4, levels=8)
    for k in range(4):
        codes = torch.cat([segments[0][3 * k : 3 * k + 3].flatten(), segments[1][k]])
        assert found[k].tolist() == [int((codes == q).sum()) for q in range(8)]


@pytest.mark.parametrize("name", CODECS)
def test_real_frames_of_a_perceptron_are_within_one_percent_of_the_estimate(name: str) -> None:
    for seed in range(3):
        for outcome in run(digits(1, seed=seed, **CODECS[name])):
            assert outcome.bytes_framed == sum(outcome.bytes_up)
            assert outcome.bytes_estimated == pytest.approx(outcome.bytes_framed, rel=0.01)


@pytest.mark.parametrize("name", CODECS)
def test_real_frames_of_the_papers_cnn_are_within_one_percent_of_the_estimate(name: str) -> None:
    torch.manual_seed(0)
    fed = federation(
        PaperCNN((3, 8, 8)),
        images(),
        data={"clients": 6, "partition": "iid"},
        train={"cohort": 2, "epochs": 1, "batch": 10, "lr": 0.01},
        uplink={"coder": "range"} | CODECS[name],
    )
    _, (outcome,), _ = train(fed, 1, Batched(fed.task))
    assert outcome.bytes_estimated == pytest.approx(outcome.bytes_framed, rel=0.01)


@pytest.mark.parametrize(
    "uplink",
    [
        {"bits": "32+4"},
        {"bits": 16},
        {"bits": 2, "per": "channel"},
        {"bits": 4, "per": 100},
        {"bits": 4, "quantizer": "stochastic", "send": "updates"},
        {"bits": 1, "feedback": True, "send": "updates"},
    ],
)
def test_estimates_hold_for_every_kind_of_upload(uplink: dict[str, Any]) -> None:
    for outcome in run(digits(1, rounds=2, **uplink)):
        assert outcome.bytes_estimated == pytest.approx(outcome.bytes_framed, rel=0.01)


@pytest.mark.parametrize("coder", ["bitpack", "zstd", "range"])
def test_a_length_is_computed_measured_or_estimated(coder: str) -> None:
    fed = federation(uplink={"bits": 4, "coder": coder})
    framed, unframed = decoded(fed, frames=True), decoded(fed, frames=False)
    for real, other in zip(framed, unframed, strict=True):
        assert real.estimate == other.estimate
        assert len(other) == (len(real) if coder != "range" else other.estimate)
        assert (real.estimate is None) == (coder != "range")
        assert same(real.params, other.params)


def test_in_one_stack_some_jobs_may_make_frames_and_others_not() -> None:
    fed = federation(uplink={"bits": 1, "coder": "range"})
    open_rounds = [OpenRound(fed, fed.start(), Ram(), frames=frames) for frames in (True, False)]
    made = Batched(fed.task).train([opened.job for opened in open_rounds if opened.job])
    for opened, uploads in zip(open_rounds, made, strict=True):
        opened.take(uploads)
    framed, estimated = (opened.end(None)[1] for opened in open_rounds)
    assert framed.bytes_estimated == estimated.bytes_estimated == sum(estimated.bytes_up)
    assert (framed.bytes_framed, estimated.bytes_framed) == (sum(framed.bytes_up), None)
    assert framed.bytes_up[1:] == estimated.bytes_up[1:]  # side data and header are exact


def test_rounds_without_frames_learn_the_same_weights() -> None:
    runs = [Run(digits(frames, bits="32+2", send="updates", feedback=True)) for frames in (0, 1, 2)]
    outcomes = [list(training) for training in runs]
    assert all(same(runs[0].params, other.params) for other in runs[1:])
    framed = [[outcome.bytes_framed is not None for outcome in some] for some in outcomes]
    assert framed == [[False, False, False], [True, True, True], [True, True, False]]
    assert len({tuple(outcome.bytes_estimated for outcome in some) for some in outcomes}) == 1


def test_published_bytes_are_within_one_percent_of_the_sequential_engine(tmp_path: Path) -> None:
    real = digits(1, rounds=6, engine="sequential", bits=1)
    list(run(real, tmp_path / "real"))
    reference = summary.load(tmp_path / "real", real)
    assert reference.estimate is not None
    assert reference.estimate.estimated == 0
    for frames, estimate in ((0, (6, 6, 0)), (4, (6, 4, 2)), (1, (6, 0, 6))):
        experiment, folder = digits(frames, rounds=6, bits=1), tmp_path / str(frames)
        list(run(experiment, folder))
        found = summary.load(folder, experiment)
        assert found.estimate is not None
        assert found.estimate[:3] == estimate
        assert found.bytes_up == pytest.approx(reference.bytes_up, rel=0.01)


def test_time_on_an_uplink_is_that_of_the_estimated_length() -> None:
    """At one byte per second, plus the time of encoding."""
    experiment = digits(0, rounds=2, bandwidth=1.0).changed(**{"train.cohort": 1})
    for outcome in run(experiment):
        assert outcome.uplink_seconds is not None
        assert outcome.bytes_estimated == sum(outcome.bytes_up)
        assert 0 <= outcome.uplink_seconds - outcome.bytes_estimated <= outcome.seconds["encode"] + 1e-6


def test_a_stopped_run_makes_its_frames_in_the_same_rounds(tmp_path: Path) -> None:
    list(run(digits(3, rounds=4), tmp_path / "whole"))
    stopped = run(digits(3, rounds=4), tmp_path / "stopped")
    next(stopped)
    next(stopped)
    stopped.close()
    list(resume(tmp_path / "stopped"))
    lines = [(tmp_path / name / "rounds.csv").read_text().splitlines() for name in ("whole", "stopped")]
    head = lines[0][0].split(",")
    places = [i for i, name in enumerate(head) if name.startswith("bytes.")]
    cells = [[[line.split(",")[i] for i in places] for line in some] for some in lines]
    assert cells[0] == cells[1]
    assert [line[head.index("bytes.framed") - places[0]] != "" for line in cells[0][1:]] == [True, False, True, False]


def test_a_record_begun_without_estimates_resumes_with_real_frames_and_the_same_columns(tmp_path: Path) -> None:
    """Settings, identity and record as before estimates existed: without `record.frames` and the two columns."""
    always = [sum(outcome.bytes_up) for outcome in run(digits(1, rounds=4))]
    training = Run(digits(50, rounds=4), tmp_path)
    journal = training.journal
    assert journal is not None
    before = journal.identity.settings.replace("frames = 50\n", "")
    assert before != journal.identity.settings
    journal.identity = journal.identity._replace(settings=before)
    journal.identity.write(tmp_path)
    (tmp_path / "settings.toml").write_text(before)
    record = tmp_path / "rounds.csv"
    record.write_text(record.read_text().replace(",bytes.estimated,bytes.framed", ""))
    journal.folder.estimates = False
    next(training)
    next(training)
    training.close()
    lines: list[str] = []
    again = resume(tmp_path, tell=lines.append)
    assert [sum(outcome.bytes_up) for outcome in again] == always[2:]
    assert lines == []
    assert "bytes.estimated" not in record.read_text()
    assert len({line.count(",") for line in record.read_text().splitlines()}) == 1
    found = summary.load(tmp_path, digits(50, rounds=4))
    assert (found.bytes_up, found.estimate and found.estimate.estimated) == (sum(always), 0)


def test_the_terminal_says_that_bytes_are_estimated(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(digits(2, bits=1).toml())
    result = fedshift("run", tmp_path / "run.toml", "--out", tmp_path / "run", "-q")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())  # as wide as the terminal
    assert "Uploaded bytes of 1 of 3 rounds are estimated from counts of codes, times " in text
    assert "the ratio of real frames to estimates measured in 2 rounds." in text
