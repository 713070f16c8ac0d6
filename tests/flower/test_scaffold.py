"""SCAFFOLD for any Flower app, compared with the rules of the package."""

import random
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load

from fedshift import Params
from fedshift.core.tree import tmap
from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold, ScaffoldMod, correction
from fedshift.flower.addon.arrays import KEY, to_params, to_record
from fedshift.flower.addon.scaffold import CONTROL_KEY
from fedshift.flower.testing import LocalGrid
from fedshift.rounds.uplink import ERROR
from tests.flower.apps import client_app, model, moved, run

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 6}
LR, STEPS = 0.1, 3


def quadratic(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
    """Three steps of 0.1 down |w - a|^2 / 2, a of the client, each along grad - c_i + c."""
    generator = torch.Generator().manual_seed(client)
    target = {name: torch.randn(w.shape, generator=generator) for name, w in start.items()}
    d, w = correction(context), start
    for _ in range(STEPS):
        w = tmap(lambda w, a, d: w - LR * (w - a + d), w, target, d)
    return w, {"num-examples": 10, "travel": LR * STEPS}


def moved_a_known_way(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
    w, metrics = moved(start, client, context)
    return w, metrics | {"travel": 0.5}


def controls(grid: LocalGrid) -> list[Params]:
    """c_i of each node, by its newest memory."""
    found = []
    for context in grid.contexts.values():
        newest = max(context.state, key=lambda key: int(key.rpartition("/")[2]))
        memory = load(context.state.array_records[newest][KEY].data)
        found.append({name.removeprefix(CONTROL_KEY): x for name, x in memory.items() if not name.startswith(ERROR)})
    return found


MODS = {"exact": ScaffoldMod(32), "4 bits": ScaffoldMod(4, error_feedback=True), "lean": ScaffoldMod("lean")}


@pytest.mark.parametrize("mod", MODS)
def test_c_is_the_mean_of_all_c_i_when_all_took_part(mod: str) -> None:
    inner = Scaffold(FedAvg(**ALL))
    grid = LocalGrid(client_app([MODS[mod]], quadratic), 6, seed=1)
    FedShift(inner).start(grid, model(), num_rounds=3)
    assert inner.control is not None
    for name, c in inner.control.items():
        assert torch.allclose(c, sum(c_i[name] for c_i in controls(grid)) / 6, atol=1e-6)  # type: ignore[arg-type]
        assert c.abs().max() > 1e-3


def test_a_worked_round() -> None:
    """w_t = 1, c = c_i = 0, target 0: w = 0.9^3 = 0.729; c_i+ = (1 - 0.729) / 0.3 = 0.9033; c = c_i+ / 4."""

    def to_zero(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        w, d = start["w"], correction(context)["w"]
        for _ in range(STEPS):
            w = w - LR * (w + d)
        return {"w": w}, {"num-examples": 1, "travel": LR * STEPS}

    inner = Scaffold(FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1), population=4)
    grid = LocalGrid(client_app([ScaffoldMod(32)], to_zero), 1, seed=1)
    result = FedShift(inner).start(grid, to_record({"w": torch.ones(1, 1)}), num_rounds=1)
    assert inner.control is not None
    assert float(to_params(result.arrays)["w"]) == pytest.approx(0.729)
    assert float(inner.control["w"]) == pytest.approx(0.271 / 0.3 / 4)
    assert float(controls(grid)[0]["w"]) == pytest.approx(0.271 / 0.3)


def test_controls_reach_the_optimum_that_plain_averaging_misses() -> None:
    """Clients with different curvatures: the fixed point of FedAvg is not the minimum of the sum; SCAFFOLD's is."""

    def curved(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        curvature, target = (1.0, 0.0) if client == 0 else (8.0, 1.0)
        d = correction(context) if "fedshift.correction" in context.state else {"w": torch.zeros(1, 1)}
        w = start["w"]
        for _ in range(10):
            w = w - 0.1 * (curvature * (w - target) + d["w"])
        return {"w": w}, {"num-examples": 1, "travel": 1.0}

    ends = []
    for inner, mod in (
        (FedAvg(fraction_evaluate=0.0), QuantizeMod(32)),
        (Scaffold(FedAvg(fraction_evaluate=0.0)), ScaffoldMod(32)),
    ):
        result = run(
            FedShift(inner), [mod], nodes=2, rounds=60, train=curved, start=to_record({"w": torch.zeros(1, 1)})
        )
        ends.append(float(to_params(result.arrays)["w"]))
    optimum = 8 / 9
    assert abs(ends[1] - optimum) < 1e-3 < 0.1 < abs(ends[0] - optimum)


def test_a_node_that_lost_its_control_starts_from_the_servers() -> None:
    strategy = FedShift(Scaffold(FedAvg(**ALL)))
    seen: list[Params] = []

    def watch(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        seen.append(correction(context))
        return quadratic(start, client, context)

    grid = LocalGrid(client_app([ScaffoldMod(4)], watch), 6, seed=1)
    strategy.start(grid, model(), num_rounds=1)
    node = grid.node_of(2)
    grid.contexts[node].state = RecordDict()
    seen.clear()
    messages = list(strategy.configure_train(2, model(), ConfigRecord(), grid))
    strategy.aggregate_train(2, grid.send_and_receive(messages))
    assert strategy.rounds[1].reset == [node]
    place = [message.metadata.dst_node_id for message in messages].index(node)
    for i, d in enumerate(seen):
        still = all(bool((x == 0).all()) for x in d.values())
        assert still == (i == place)  # c - c_i = 0: no correction
    assert not any("correction" in key for context in grid.contexts.values() for key in context.state)


@pytest.mark.parametrize(("travel", "why"), [(None, "travel=None"), (0.0, "travel=0.0"), (float("nan"), "travel=nan")])
def test_a_client_without_a_valid_travel_is_refused(travel: float | None, why: str) -> None:
    def silent(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        w, _ = quadratic(start, client, context)
        return w, {"num-examples": 10} | ({} if travel is None else {"travel": travel})

    with pytest.raises(NoUploadsError, match=f"{why}: the metrics must contain the sum of the steps' learning rates"):
        run(FedShift(Scaffold(FedAvg(**ALL)), patience=1), [ScaffoldMod(4)], train=silent)


def test_a_hostile_travel_does_not_change_the_control() -> None:
    random.seed(3)
    inner = Scaffold(FedAvg(**ALL))
    strategy = FedShift(inner)

    def tiny(reply: Any) -> Any:
        if reply.metadata.src_node_id == grid.node_of(3):
            reply.content["metrics"]["travel"] = 1e-300
        return reply

    grid = LocalGrid(client_app([ScaffoldMod(4)], quadratic), 6, seed=1, tamper=tiny)
    strategy.start(grid, model(), num_rounds=1)
    assert list(strategy.rounds[0].failed) == [grid.node_of(3)]
    assert inner.control is not None
    assert all(torch.isfinite(c).all() and c.abs().max() < 100 for c in inner.control.values())


def test_mods_and_strategies_that_do_not_match_raise_an_error() -> None:
    with pytest.raises(NoUploadsError, match=r"the server's strategy must be FedShift\(Scaffold"):
        run(FedShift(FedAvg(**ALL), patience=1), [ScaffoldMod(4)], train=quadratic)
    with pytest.raises(NoUploadsError, match="use ScaffoldMod instead of QuantizeMod"):
        run(FedShift(Scaffold(FedAvg(**ALL)), patience=1), [QuantizeMod(4)])
    with pytest.raises(ValueError, match="available only during training"):
        correction(Context(1, 1, {}, RecordDict(), {}))
