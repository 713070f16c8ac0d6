"""Every example runs without a warning and shows what its docstring says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert weights < exact
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
