"""`fedshift bench flower`: both sides of its ratio do the same work, and the relay counts bytes."""

import json
import socket
import subprocess
import sys
import threading

import pytest
import torch

from fedshift import Params
from fedshift.bench import deployed, flower
from fedshift.bench.deployed import Relay, Traffic
from fedshift.flower.testing.bench import CLIENTS, on_grid

COMMAND = "from fedshift.cli import app; app()"
WITHOUT = "import sys; sys.modules[{!r}] = None; " + COMMAND


@pytest.mark.parametrize("bits", flower.CODECS)
def test_the_plain_loop_and_the_grid_compute_the_same_model(bits: int) -> None:
    start = {"weight": torch.randn(20, 30, generator=torch.Generator().manual_seed(1)), "bias": torch.ones(20)}

    def train(params: Params, client: int) -> Params:
        return {name: w + 0.1 * client * w.sin() for name, w in params.items()}

    with flower.quiet():
        grid = on_grid(start, train, flower.CODECS[bits], CLIENTS)()
    plain = flower.by_hand(start, train, flower.CODECS[bits])
    for name, w in plain.items():
        torch.testing.assert_close(grid[name], w, rtol=1e-5, atol=1e-6)


def test_a_relay_forwards_and_counts_all_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data[:10])

        threading.Thread(target=answer, daemon=True).start()
        with Relay(server.getsockname()[1]) as relay:
            with socket.create_connection(("127.0.0.1", relay.port)) as client:
                client.sendall(b"x" * 1000)
                assert client.recv(100) == b"x" * 10
            assert (relay.up, relay.down, relay.connections) == (1000, 10, 1)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", relay.port))


def test_targets_of_a_deployment() -> None:
    """1/7 of 5,000,000 bytes is 714,285, 1/25 is 200,000 and 1/3.5 of 7,000,000 is 2,000,000."""
    fp32, both = Traffic(5_000_000, 4_900_000, 1, 10, 7_000_000), Traffic(1, 1, 1, 10, 2_000_000)
    found = {"none": fp32, "paper": Traffic(714_000, 650_000, 1, 10), "lean": Traffic(195_000, 170_000, 1, 10)}
    found["both"] = both
    assert [(target.asked, target.met) for target in deployed.targets(found)] == [
        ("<= 1/7", True),
        ("<= 1/25", True),
        ("<= 1/3.5", True),
        ("<= 25,000", True),
    ]
    found |= {"paper": Traffic(715_000, 650_000, 1, 10), "lean": Traffic(200_001, 175_000, 1, 10, 12_345)}
    found["both"] = Traffic(1, 1, 1, 10, 2_000_001)
    assert [target.met for target in deployed.targets(found)] == [False] * 4
    assert deployed.row("lean", found["lean"], idle=300.0)[1:] == (
        "200,001",
        "175,000",
        "3,000",
        "22,001",
        "12,345",
        "1.0",
        "10",
    )


def test_the_quick_benchmark_as_json() -> None:
    command = [sys.executable, "-c", COMMAND, "bench", "flower", "--quick", "--json", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["A round in one process"]) == 7
    assert [target["asked"] for target in result["bars"]] == ["<= 2x", "<= 2x", "-", "-"]
    assert "flwr" in result["machine"]


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("flwr", "fedshift.flower needs flwr: pip install 'flwr[simulation]>=1.41,<1.43'"),
        ("trustme", "a deployment needs trustme: pip install 'trustme>=1.2'; --quick skips it"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_measured(package: str, message: str) -> None:
    program = WITHOUT.format(package)
    done = subprocess.run([sys.executable, "-c", program, "bench", "flower"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip() == f"fedshift: {message}"
