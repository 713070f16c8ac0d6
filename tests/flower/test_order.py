"""Mods in the wrong order, and mods that object: in this process, and in simulations, where Flower drops errors."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold, ScaffoldMod
from fedshift.flower.addon.arrays import to_record
from fedshift.flower.addon.mod import WRONG_ORDER
from fedshift.flower.app.superlink import SuperLink
from fedshift.flower.testing import LocalGrid
from tests.flower.apps import client_app, model, run
from tests.flower.tiny import write_app

ALL: dict[str, Any] = {"min_train_nodes": 6, "min_evaluate_nodes": 6}
LOCAL = LocalDpMod(1.0, 1.0, 1.0, 0.1)
SERVER = """
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp, strategy
from fedshift.flower import FedShift

app = ServerApp()


@app.main()
def main(grid, context):
    inner = strategy.FedAvg(min_train_nodes=2, min_evaluate_nodes=2)
    private = strategy.DifferentialPrivacyClientSideFixedClipping(inner, 0.01, 1.0, 2)
    FedShift(private).start(grid, ArrayRecord({"w": torch.ones(4, 4)}), num_rounds=2)  # Flower would wait for an hour
"""
CLIENT = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from fedshift.flower import QuantizeMod

app = ClientApp(mods=[fixedclipping_mod, QuantizeMod(4)])


@app.train()
def train(message, context):
    arrays = ArrayRecord([array.numpy() + 0.1 for array in message.content["arrays"].values()])
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
"""
SIMULATION = """
from flwr.simulation import run_simulation
from tiny import client, server

run_simulation(server.app, client.app, num_supernodes=2, backend_config={"client_resources": {"num_cpus": 1}})
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An app whose mods are in the wrong order."""
    folder = write_app(tmp_path / "app")
    (folder / "tiny" / "server.py").write_text(SERVER)
    (folder / "tiny" / "client.py").write_text(CLIENT)
    return folder


@pytest.mark.slow
def test_a_simulation_with_mods_in_the_wrong_order_ends_with_a_sentence(app: Path) -> None:
    pytest.importorskip("ray")
    (app / "simulation.py").write_text(SIMULATION)
    done = subprocess.run([sys.executable, "simulation.py"], cwd=app, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert f"NoUploadsError: round 1: {WRONG_ORDER}" in done.stdout + done.stderr


@pytest.mark.slow
def test_flwr_run_with_mods_in_the_wrong_order_fails_with_a_sentence(app: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with SuperLink(tmp_path / "test", supernodes=2) as link:
        status, log = link.wait(link.run(app), timeout=300)
    assert status == "finished:failed"
    assert f"NoUploadsError: round 1: {WRONG_ORDER}" in log


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod, LOCAL])
@pytest.mark.parametrize("outer", [[], [message_size_mod]])
def test_a_clipping_mod_before_quantization_is_found_before_anybody_trains(mod: Any, outer: list[Any]) -> None:
    def train(start: Any, client: int, context: Any) -> Any:
        raise AssertionError("trained")

    kind: Any = flower.DifferentialPrivacyClientSideFixedClipping
    if mod is adaptiveclipping_mod:
        kind = flower.DifferentialPrivacyClientSideAdaptiveClipping
    inner = kind(FedAvg(**ALL), 0.01, *([6] if mod is adaptiveclipping_mod else [1.0, 6]))
    with pytest.raises(NoUploadsError) as problem:
        run(FedShift(inner), [*outer, mod, QuantizeMod(4)], train=train)
    assert str(problem.value) == f"round 1: {WRONG_ORDER}"


def test_a_clipping_mod_before_scaffold_is_found_too() -> None:
    with pytest.raises(NoUploadsError, match=r"round 1: the clients' mods are in the wrong order"):
        run(FedShift(Scaffold(FedAvg(**ALL))), [LOCAL, ScaffoldMod(4)])


def test_mods_that_only_look_may_come_first() -> None:
    strategy = FedShift(FedAvg(**ALL))
    run(strategy, [message_size_mod, QuantizeMod(4)], rounds=1)
    assert strategy.rounds[0].used == 6


@pytest.mark.parametrize(
    ("mod", "why"), [(fixedclipping_mod, "requires the key 'clipping_norm'"), (LOCAL, "but found 0 ArrayRecord")]
)
def test_clipping_mods_of_an_app_fail_its_evaluation_and_the_server_hears_of_it(
    mod: Any, why: str, caplog: Any
) -> None:
    """Flower drops the second of these errors, which its mod addresses to itself, unless QuantizeMod is around it."""
    inner = flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(**ALL), 0.01, 1.0, 6)
    result = run(FedShift(inner if mod is fixedclipping_mod else FedAvg(**ALL)), [QuantizeMod(4), mod], rounds=1)
    assert result.evaluate_metrics_clientapp == {}
    assert why in caplog.text
    assert "the node did not reply" not in caplog.text
    assert result.train_metrics_clientapp


def test_mods_of_the_training_alone_leave_evaluation_as_it_is() -> None:
    inner, app = client_app(), ClientApp()
    app.train(mods=[QuantizeMod(4), LOCAL])(inner)
    app.evaluate()(inner)
    strategy = FedShift(FedAvg(**ALL))
    result = strategy.start(LocalGrid(app, 6, seed=1), model(), num_rounds=1)
    assert (strategy.rounds[0].used, strategy.rounds[0].lossy) == (6, 6)
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(2.0)


def test_an_error_that_answers_no_message_is_dropped_as_flower_drops_it() -> None:
    grid = LocalGrid(client_app([LOCAL]), 3, seed=1)
    messages = FedAvg(min_evaluate_nodes=3).configure_evaluate(1, model(), ConfigRecord(), grid)
    assert grid.send_and_receive(messages) == []


@pytest.mark.parametrize("wrap", [False, True])
def test_qfedavg_cannot_average_integers(wrap: bool) -> None:
    start = to_record({"w": torch.ones(2, 2), "count": torch.tensor(0)})
    inner = flower.QFedAvg(0.1, **ALL)
    with pytest.raises(TypeError, match="Cannot cast ufunc"):
        run(FedShift(inner) if wrap else inner, start=start, rounds=1)
