"""A stopped training resumes to the same bytes, with every strategy."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedshift.core.files import RunError
from fedshift.flower import FedShift, QuantizeMod, Scaffold, ScaffoldMod, Seeded, introduce
from fedshift.flower.addon.arrays import to_record
from fedshift.flower.testing import LocalGrid
from tests.flower.apps import client_app, model, same
from tests.flower.test_scaffold import moved_a_known_way
from tests.flower.test_strategy import MODS, STRATEGIES
from tests.runs import rewrite


class CrashError(Exception): ...


def train(
    strategy: FedShift, rounds: int, grid: LocalGrid, crash: int = -1, start: ArrayRecord | None = None
) -> ArrayRecord:
    """Seed each round, so that a resumed run repeats its draws."""

    def before(number: int, arrays: ArrayRecord) -> None:
        if number == crash:
            raise CrashError
        random.seed(number)
        np.random.seed(number)

    return strategy.start(grid, start or model(), num_rounds=rounds, evaluate_fn=before).arrays


CASES = {name: (make, [QuantizeMod(4, error_feedback=True), *MODS.get(name, [])]) for name, make in STRATEGIES.items()}
CASES["lean"] = STRATEGIES["FedAvg"], [QuantizeMod("lean")]


@pytest.mark.parametrize("name", [*CASES, "scaffold"])
def test_a_resumed_run_ends_in_the_bytes_of_one_that_was_not_stopped(name: str, tmp_path: Path) -> None:
    make, mods = CASES.get(name, (lambda: Scaffold(FedAvg(fraction_evaluate=0.0, min_train_nodes=6)), []))
    app = client_app(mods or [ScaffoldMod(4, error_feedback=True)], moved_a_known_way)
    start = model(counter=name != "QFedAvg")  # with a tensor of no axes, which QFedAvg itself cannot take
    whole = train(FedShift(make(), checkpoint=tmp_path / "whole"), 5, LocalGrid(app, 6, seed=1), start=start)
    grid = LocalGrid(app, 6, seed=1)  # nodes keep their memory while the server is restarted
    with pytest.raises(CrashError):
        train(FedShift(make(), checkpoint=tmp_path / "run"), 5, grid, crash=3, start=start)
    resumed = FedShift(make(), checkpoint=tmp_path / "run")
    assert same(whole, train(resumed, 5, grid, start=start))
    assert [x.number for x in resumed.rounds] == [4, 5]
    assert all(not x.reset for x in resumed.rounds)


def test_a_finished_run_returns_its_model_and_a_longer_one_resumes(tmp_path: Path) -> None:
    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1)
    done = train(FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path), 2, grid)
    again = FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path)
    assert same(done, train(again, 2, grid))
    assert again.rounds == []
    train(again, 3, grid)
    assert [x.number for x in again.rounds] == [3]


def test_a_setting_that_the_user_changed_is_used_and_one_that_the_strategy_changed_is_restored(tmp_path: Path) -> None:
    def make(rate: float) -> flower.DifferentialPrivacyServerSideAdaptiveClipping:
        inner = flower.FedAdam(fraction_evaluate=0.0, min_train_nodes=6, eta=rate)
        return flower.DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.01, 6)

    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1)
    first, second = make(0.1), make(0.2)
    train(FedShift(first, checkpoint=tmp_path), 2, grid)
    train(FedShift(second, checkpoint=tmp_path), 2, grid)
    assert second.clipping_norm == first.clipping_norm != make(0.1).clipping_norm
    assert second.strategy.eta == 0.2  # type: ignore[attr-defined]
    assert second.strategy.m_t.keys() == first.strategy.m_t.keys()  # type: ignore[attr-defined]


def test_attributes_that_cannot_be_stored_are_refused_before_training(tmp_path: Path) -> None:
    class Odd(FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = {1, 2}

    with pytest.raises(ValueError, match=r"Odd\.drawn is of type set, which a checkpoint cannot store"):
        FedShift(Odd(), checkpoint=tmp_path)
    FedShift(Odd())

    class Deep(FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"Deep\.net is of type Linear"):
        FedShift(Deep(), checkpoint=tmp_path)
    with pytest.raises(RunError, match="checkpoint must be a folder"):
        FedShift(FedAvg(), checkpoint=__file__)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_two_are_refused(tmp_path: Path) -> None:
    grid = LocalGrid(client_app([QuantizeMod(4, error_feedback=True)]), 6, seed=1)
    whole = train(FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path), 3, grid)
    _, new = sorted(tmp_path.glob("*.safetensors"))
    new.write_bytes(new.read_bytes()[:-1])
    again = FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path)
    assert same(whole, train(again, 3, grid))
    assert [(x.number, x.reset) for x in again.rounds] == [(3, [])]
    assert new.with_name(new.name + ".unusable").exists()
    (tmp_path / "flower.old.x.safetensors").write_bytes(b"of somebody else")
    for path in tmp_path.glob("flower.0*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(RunError, match="damaged"):
        train(FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path), 3, grid)


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1)
    train(FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path), 1, grid)
    with pytest.raises(RunError, match="was saved with FedAvg, not FedAdam"):
        train(FedShift(STRATEGIES["FedAdam"](), checkpoint=tmp_path), 2, grid)
    with pytest.raises(RunError, match="contains a different model"):
        FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path).start(
            grid, to_record({"w": torch.zeros(2)}), num_rounds=2
        )


def test_a_checkpoint_under_another_rounds_name_or_of_whole_numbers_is_not_used(tmp_path: Path) -> None:
    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1)
    whole = train(FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path), 3, grid)
    old, new = sorted(tmp_path.glob("*.safetensors"))
    new.unlink()
    old.with_name(old.name.replace("000002", "000003")).write_bytes(old.read_bytes())
    again = FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path)
    assert same(whole, train(again, 3, grid))
    assert [x.number for x in again.rounds] == [3]
    for path in tmp_path.glob("*.safetensors"):
        rewrite(path, lambda params: {name: x.int() for name, x in params.items()})
    with pytest.raises(RunError, match="contains a different model"):
        train(FedShift(STRATEGIES["FedAvg"](), checkpoint=tmp_path), 4, grid)


def test_a_custom_wrapper_is_inspected_under_any_attribute_name(tmp_path: Path) -> None:
    class Around(FedAvg):
        def __init__(self, inner: flower.FedAvgM) -> None:
            super().__init__(fraction_evaluate=0.0)
            self.inner = inner
            self.configure_train = inner.configure_train  # type: ignore[method-assign]
            self.aggregate_train = inner.aggregate_train  # type: ignore[method-assign]

    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1)
    first, second = (flower.FedAvgM(min_train_nodes=6, server_momentum=0.9) for _ in range(2))
    train(FedShift(Around(first), checkpoint=tmp_path), 2, grid)
    train(FedShift(Around(second), checkpoint=tmp_path), 2, grid)
    assert first.momentum_vector is not None
    assert second.momentum_vector is not None
    assert all(np.array_equal(a, b) for a, b in zip(first.momentum_vector, second.momentum_vector, strict=True))


def test_the_selection_of_nodes_is_resumed_too(tmp_path: Path) -> None:
    def make() -> FedShift:
        return FedShift(Seeded(FedAvg(fraction_evaluate=0.0, fraction_train=0.5), seed=4), checkpoint=tmp_path)

    app: Any = introduce(client_app([QuantizeMod(4)]))
    grid = LocalGrid(app, 6, seed=1)
    with pytest.raises(CrashError):
        train(make(), 3, grid, crash=2)
    assert train(make(), 3, grid)
