"""`fedshift bench large`: hand-worked targets, and the memory that a client reports."""

import json
import subprocess
import sys

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedshift.bench import large
from fedshift.bench.large import PeakMemory
from fedshift.core.memory import CLEAR
from fedshift.flower.addon.mod import QuantizeMod
from fedshift.flower.testing.grid import LocalGrid
from fedshift.flower.testing.large import client_app, rounds
from fedshift.wire.measure import transformer
from tests.flower.test_bench import COMMAND, WITHOUT

BALLAST = 100_000_000  # bytes


def test_the_models_have_85_and_99_million_weights() -> None:
    """A layer has 12 x 768^2 weights, 9 x 768 biases and two norms of 2 x 768."""
    layer = 12 * 768**2 + 9 * 768 + 4 * 768
    for layers, count in (large.FULL.layers, 85_054_464), (large.FULL.flower_layers, 99_230_208):
        assert sum(w.numel() for w in transformer(layers).values()) == layers * layer == count
    assert transformer(1)["0.qkv.weight"].shape == (2304, 768)
    assert transformer(1)["0.fc2.weight"].shape == (768, 3072)
    assert str(large.FULL) == "12 layers, 768 wide, 85,054,464 weights"


def test_targets_of_speed() -> None:
    """1,000 weights: 8 us are 8 ns per weight."""
    took = {"pack, K-means, 4 bit": 8e-6, "unpack, K-means, 4 bit": 3e-6, "pack, lean": 25e-6, "unpack, lean": 25e-6}
    exact = list(large.speed_targets(took | {"per channel": 32e-6}, 1000))
    assert [target.asked for target in exact] == ["<= 8", "<= 3", "<= 25", "<= 25", "<= 4x"]
    assert [target.measured for target in exact] == pytest.approx([8, 3, 25, 25, 4])
    faster = large.speed_targets(took | {"per channel": 31e-6}, 1001)
    slower = large.speed_targets(took | {"per channel": 33e-6}, 999)
    assert [target.met for target in faster] == [True] * 5
    assert [target.met for target in slower] == [False] * 5


def test_the_target_of_memory_takes_the_worst_round_without_frame_and_kept_memory() -> None:
    found = [PeakMemory(peak=1.5, frame=0.125, kept=0.0), PeakMemory(peak=3.0, frame=0.125, kept=1.0)]
    target = large.memory_target("mod", found, 1.875)
    assert (target.asked, target.measured, target.met) == ("<= 1.875x", 1.875, True)
    assert not large.memory_target("mod", found, 1.5).met
    assert large.memory_rows("mod", found) == [
        ("mod, round 1", "1.500", "0.125", "0.000", "1.375"),
        ("mod, round 2", "3.000", "0.125", "1.000", "1.875"),
    ]


def test_half_of_many_tensors_are_biases() -> None:
    tensors = large.small_tensors(6)
    assert [tuple(w.shape) for w in tensors.values()] == [(32, 32), (32,)] * 3


@pytest.mark.skipif(not CLEAR.exists(), reason="needs the peak memory of a process (Linux)")
def test_a_client_reports_memory_that_its_mod_allocated_and_freed() -> None:
    """In the second round, libraries are loaded, so that little is added."""

    def heavy(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = QuantizeMod(4)(message, context, call_next)
        np.ones(BALLAST, np.uint8)
        return reply

    size = sum(4 * w.numel() for w in transformer(1, 16).values())
    _, second = rounds(LocalGrid(client_app(heavy), 1), 1, 16, 1)
    assert 0.99 * BALLAST <= size * second["peak"] <= 1.2 * BALLAST


def test_a_client_reports_frame_and_kept_memory() -> None:
    """Error feedback keeps one model per round; 4 bits are 1/8 of it, biases and headers add to them."""
    mod = QuantizeMod(4, updates=True, error_feedback=True)
    for found in rounds(LocalGrid(client_app(mod), 1), 1, 64, 1):
        assert 0.9 <= found["kept"] <= 1.1
        assert 0.125 <= found["frame"] <= 0.2


def test_the_quick_benchmark_as_json() -> None:
    command = [sys.executable, "-c", COMMAND, "bench", "large", "--quick", "--json", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(target["asked"], target["met"]) for target in result["bars"]] == [("-", True)] * 9
    assert len(result["Memory of a client, from the end of training"]) == 4
    assert result["machine"]["model"] == "2 layers, 256 wide, 1,579,520 weights"


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("flwr", "fedshift.flower needs flwr: pip install 'flwr[simulation]>=1.41,<1.43'"),
        ("trustme", "a deployment needs trustme: pip install 'trustme>=1.2'; omit --flower to skip it"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_measured(package: str, message: str) -> None:
    command = [sys.executable, "-c", WITHOUT.format(package), "bench", "large", "--flower"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == f"fedshift: {message}"
