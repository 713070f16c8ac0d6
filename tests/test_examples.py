"""Every example runs without a warning and shows what its docstring says."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import Experiment, Run, pack, unpack
from fedshift.experiment.settings import CodecSettings
from fedshift.experiment.toml import merge
from fedshift.runs.summary import uplink_label
from tests.federations import same
from tests.runs import PROCESSES, SMALL, digits, fedshift, go, record, undisturbed

COMMAND = str(Path(sys.executable).with_name("fedshift"))
EXAMPLES = Path(__file__).parent.parent / "examples"


def printed(name: str, where: Path) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        command, cwd=where, env=os.environ | {"MPLBACKEND": "Agg"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def numbers(line: str, text: str) -> list[float]:
    """Those after the name at the beginning of a line."""
    (rest,) = re.findall(rf"^{re.escape(line)}(.*)$", text, re.MULTILINE)
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", rest)]


def test_own_model_learns(tmp_path: Path) -> None:
    out = printed("own_model", tmp_path)
    assert numbers("round 40: accuracy", out)[0] > 0.85
    assert "the first quadrant is class 3" in out


def test_mixed_bits_saves_bytes_and_updates_keep_the_accuracy(tmp_path: Path) -> None:
    out = printed("mixed_bits", tmp_path)
    assert "4 bit: 5,461 bytes an upload" in out
    assert "(59%)" in out
    exact, weights, updates = (numbers(name, out)[-1] for name in ("all 32 bit", "mixed weights", "mixed updates"))
    assert weights == pytest.approx(exact, abs=0.02)  # with codes that are rounded at random
    assert updates == pytest.approx(exact, abs=0.02)


def test_algorithms_gain_from_the_shift(tmp_path: Path) -> None:
    out = printed("algorithms", tmp_path)
    rows = [numbers(name, out) for name in ("FedAvg", "FedProx", "SCAFFOLD", "error feedback")]
    assert sum(shifted - plain for plain, shifted in rows) > 0
    assert rows[2] > rows[0]  # SCAFFOLD is made for clients this different


def test_an_own_algorithm_runs_as_an_object_and_by_its_name(tmp_path: Path) -> None:
    out = printed("own_algorithm", tmp_path)
    plain, as_object, by_name = (
        numbers(name, out)[0] for name in ("FedAvg", "mine, as an object", "mine, by its name")
    )
    assert as_object == by_name != plain
    assert as_object == pytest.approx(plain, abs=0.03)


def test_an_own_algorithm_is_found_in_the_current_folder(tmp_path: Path) -> None:
    command = [
        COMMAND,
        "run",
        "own_algorithm.toml",
        "--set",
        "train.rounds=1",
        "--out",
        str(tmp_path / "run"),
        "--quiet",
    ]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert 'name = "own_algorithm:rule"' in (tmp_path / "run" / "settings.toml").read_text()


def test_an_own_codec_runs_as_an_object_and_by_its_name(tmp_path: Path) -> None:
    out = printed("own_codec", tmp_path)
    names = "exact", "mine, as an object", "mine, by its name"
    exact, as_object, by_name = (numbers(name, out)[0] for name in names)
    assert as_object == by_name == pytest.approx(exact, abs=0.03)
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", out)]
    assert sizes[1] == sizes[2] < sizes[0] / 10


@pytest.fixture
def own_codec(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of examples/own_codec.toml, with a small model and few rounds, where its module can be imported."""
    monkeypatch.syspath_prepend(EXAMPLES)
    settings = tomllib.loads((EXAMPLES / "own_codec.toml").read_text())
    return merge(SMALL, {"train": {"rounds": 3}, "uplink": settings["uplink"]})


def test_an_own_codec_has_the_same_bytes_on_sequential_and_processes(own_codec: dict[str, Any]) -> None:
    runs = [Run(Experiment(**merge(own_codec, change)), data=digits()) for change in ({}, PROCESSES)]
    one, two = ([(x.accuracy, x.bytes_up) for x in run] for run in runs)
    assert one == two
    assert same(runs[0].params, runs[1].params)


def test_an_own_codec_runs_on_the_batched_engine(own_codec: dict[str, Any]) -> None:
    """Stacked training is rounded otherwise, so that results are only close."""
    batched = {"engine": {"name": "batched", "device": "cpu"}}
    *_, alone = Run(Experiment(**own_codec), data=digits())
    *_, stacked = Run(Experiment(**merge(own_codec, batched)), data=digits())
    assert stacked.accuracy == pytest.approx(alone.accuracy, abs=0.02)
    assert stacked.error == pytest.approx(alone.error, rel=0.01)
    assert sum(stacked.bytes_up) == pytest.approx(sum(alone.bytes_up), rel=0.01)


def test_a_run_with_an_own_codec_is_resumed_to_the_same_bytes(own_codec: dict[str, Any], tmp_path: Path) -> None:
    experiment = Experiment(**own_codec)
    expected = undisturbed(experiment, tmp_path / "whole")
    with Run(experiment, tmp_path / "stopped", data=digits()) as stopped:
        next(stopped)
    go(experiment, tmp_path / "stopped")
    assert record(tmp_path / "stopped") == expected
    assert 'name = "own_codec:powers"' in expected["settings.toml"]


def test_an_own_codec_is_in_the_label_of_its_uplink(own_codec: dict[str, Any], tmp_path: Path) -> None:
    experiment = Experiment(**own_codec)
    assert uplink_label(experiment) == "powers(count=4) updates, feedback"
    go(experiment, tmp_path / "mine")
    go(Experiment(**own_codec | {"uplink": {"bits": 32}}), tmp_path / "exact")
    done = fedshift("report", str(tmp_path / "mine"), str(tmp_path / "exact"), "--out", str(tmp_path / "report.html"))
    assert done.exit_code == 0, done.stderr
    assert "powers(count=4) updates, feedback" in (tmp_path / "report.html").read_text()


def test_a_server_without_the_own_codec_names_its_number(own_codec: dict[str, Any], tmp_path: Path) -> None:
    params = {"w": torch.randn(4, 5, generator=torch.Generator().manual_seed(0))}
    codec = CodecSettings(**own_codec["uplink"]["codec"]).made()
    (tmp_path / "frame").write_bytes(pack(codec, params))
    decoded = unpack((tmp_path / "frame").read_bytes(), params)["w"]
    largest = params["w"].abs().max()
    assert decoded.abs().max() == largest
    assert set((decoded.abs() / largest).flatten().tolist()) <= {0.0, 0.125, 0.25, 0.5, 1.0}
    program = "import torch; from fedshift import Mean\nMean({'w': torch.zeros(4, 5)}).add(open('frame', 'rb').read())"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "WireError: quantizer 130 is not known here; import the module that defines it"
    )


def test_updates_go_further_than_weights(tmp_path: Path) -> None:
    out = printed("updates", tmp_path)
    (exact,) = numbers("nothing lost", out)
    assert numbers("weights  ", out)[1] < 0.6 < exact - 0.1
    four, two = numbers("updates  ", out)
    assert four == pytest.approx(exact, abs=0.01)
    assert two == pytest.approx(exact, abs=0.03)


def test_least_squares_converges_as_1_over_t(tmp_path: Path) -> None:
    out = printed("least_squares", tmp_path)
    for name in "FedAvg  :", "FedShift:":
        assert numbers(name, out)[-1] == pytest.approx(-1, abs=0.1)


def test_theorem_1_has_its_floor_and_its_figure(tmp_path: Path) -> None:
    out = printed("theorem1", tmp_path)
    assert numbers("c = 0:", out)[0] == pytest.approx(-1, abs=0.1)
    found, told = numbers("c = 0.2: stops at", out)
    assert found == pytest.approx(told, rel=0.05)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "theorem1.png").read_bytes().startswith(b"\x89PNG")


def test_theorem_2_holds_on_every_layer_and_round(tmp_path: Path) -> None:
    out = printed("theorem2", tmp_path)
    assert out.count("30/30") == 3


def test_no_example_is_left_out() -> None:
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'printed("{path.stem}"' in tested
        assert len(path.read_text().splitlines()) < 70
