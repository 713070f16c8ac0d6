"""Local optimizers: steps of torch's on every engine, users' own ones, and those that an engine or a rule refuses."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift import Algorithm, Broadcast, ClientRule, Experiment, Params, Run, fedavg, resume, run
from fedshift.core.files import RunError
from fedshift.data.cohorts import draw_plan
from fedshift.engines import Batched, Sequential
from fedshift.experiment.build import build
from fedshift.experiment.grid import expand
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import OpenRound, Ram, draw
from fedshift.rounds.optimizers import Adam, MakeOptimizer, Stepper
from fedshift.runs.packs import kind, memory_needed
from fedshift.runs.sweep import training_time
from tests.engines.test_batched import uploads
from tests.federations import Normed, federation, points, processes, same, settings, train

STILL = {"momentum": 0.0, "lr": 0.01}


def slow_bias(parameters: list[nn.Parameter], lr: float, factor: float = 0.1) -> torch.optim.Optimizer:
    """SGD whose parameters with one axis have a smaller learning rate."""
    matrices, biases = ([p for p in parameters if (p.ndim > 1) == wide] for wide in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": biases, "lr": factor * lr}]
    return torch.optim.SGD(groups, lr=lr)


def not_an_optimizer(parameters: list[nn.Parameter], lr: float) -> int:
    return len(parameters)


class Replacing(torch.optim.SGD):
    """Optimizer that gives parameters other memory, which nothing else refers to."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def torch_adam(p: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr, (0.8, 0.99), 1e-6, weight_decay=0.02)


def torch_adamw(p: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(p, lr, weight_decay=0.02)


def torch_rmsprop(p: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(p, lr, alpha=0.9, momentum=0.5, weight_decay=0.02)


@pytest.mark.parametrize(
    ("optimizer", "oracle"),
    [
        ({"name": "adam", "betas": [0.8, 0.99], "eps": 1e-6}, torch_adam),
        ("adamw", torch_adamw),
        ({"name": "torch.optim:RMSprop", "alpha": 0.9, "momentum": 0.5}, torch_rmsprop),
    ],
)
def test_local_training_is_torchs(optimizer: Any, oracle: MakeOptimizer) -> None:
    """Compared on the same batches, with a gradient that is clipped before the decay, and a rate that falls."""
    rates = {"schedule": "decayed", "decay": 0.5, "local_schedule": "linear"}
    fed = federation(train=STILL | rates | {"optimizer": optimizer, "weight_decay": 0.02, "clip": 0.3, "cohort": 1})
    (client,), _ = fed.cohorts.draw(1)
    drawn = draw_plan(fed.partition, [client], seed=0, number=1, epochs=2, batch=8, rate=fed.rate)
    model = fed.task.model
    model.load_state_dict(fed.start().out.params)
    torchs = oracle(list(model.parameters()), 0.01)
    for batch, keep, lr in zip(drawn.batches[0], drawn.keep[0], drawn.lr[0], strict=True):
        torchs.zero_grad()
        loss = F.cross_entropy(model(fed.task.data.x[batch[keep]]), fed.task.data.y[batch[keep]])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        torchs.param_groups[0]["lr"] = float(lr)
        torchs.step()
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    state, _, _ = train(fed, rounds=1)
    for name, x in expected.items():
        torch.testing.assert_close(state.out.params[name], x, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Ones(ClientRule):
    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return {name: torch.ones_like(g) for name, g in grad.items()}


@pytest.mark.parametrize("engine", [Sequential, Batched])
def test_adam_follows_the_direction_of_the_rule(engine: Callable[..., Any]) -> None:
    """The rule makes every gradient 1, so m' = v' = 1, and each of the two epochs of three steps moves w by lr."""
    changed = settings(train=STILL | {"optimizer": "adam", "batch": 8, "cohort": 3})
    fed = build(changed, data=points(), algorithm=Algorithm(Ones(), fedavg().server))
    assert set(fed.partition.sizes.tolist()) == {20}
    state, _, _ = train(fed, rounds=1, engine=engine(fed.task))
    for name, x in fed.start().out.params.items():
        torch.testing.assert_close(state.out.params[name], x - 6 * 0.01, rtol=0, atol=1e-5)


def test_decoupled_decay_does_not_enter_the_moments() -> None:
    """w = (1 - lr decay) w - lr = (1 - 0.1 * 0.5) * 2 - 0.1 = 1.8 after one step along a positive gradient."""
    w = nn.Parameter(torch.tensor([2.0]))
    Stepper(Adam(decay=0.5), [w], 0.1).step([torch.tensor([3.0])], 0.1)
    assert w.item() == pytest.approx(1.8, rel=1e-6)


@pytest.mark.parametrize("make", [Adam(), torch.optim.RMSprop])
def test_a_gradient_may_have_another_layout_than_its_parameter(make: MakeOptimizer) -> None:
    """Equal numbers, transposed in memory or expanded, as the gradients of some operations are."""
    generator = torch.Generator().manual_seed(0)
    start, column = torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)
    expected, transposed, expanded = (nn.Parameter(start.clone()) for _ in range(3))
    grad = column.expand(3, 4).clone()
    for w, g in ((expected, grad), (transposed, grad.t().contiguous().t()), (expanded, column.expand(3, 4))):
        stepper = Stepper(make, [w], 0.1)
        stepper.step([g], 0.1)
        stepper.step([g], 0.1)
    assert torch.equal(transposed, expected)
    assert torch.equal(expanded, expected)


@pytest.mark.parametrize("optimizer", ["adam", {"name": "adamw", "eps": 1e-6}])
def test_a_client_with_fewer_steps_does_not_move_after_them(optimizer: Any) -> None:
    """Sizes from 1 to 60 in one stack; the weight decay would move a client that continued."""
    fed = federation(
        data={"partition": "dirichlet", "alpha": 0.1, "least": 1, "clients": 8},
        train=STILL | {"cohort": 8, "optimizer": optimizer, "weight_decay": 0.1},
        algorithm={"name": "fedprox", "mu": 0.1},
    )
    assert int(fed.partition.sizes.min()) * 10 < int(fed.partition.sizes.max())
    for batched, expected in zip(uploads(fed, Batched(fed.task)), uploads(fed, Sequential(fed.task)), strict=True):
        assert batched.drift == [pytest.approx(pair, abs=1e-4) for pair in expected.drift]


@pytest.mark.parametrize("name", ["fedadam", "feddyn", "ef21", "cmfl", "fedcom"])
def test_adam_composes_with_rules_that_do_not_use_travel(name: str) -> None:
    fed = federation(algorithm={"name": name}, train=STILL | {"optimizer": "adam"})
    state, outcomes, _ = train(fed, rounds=2)
    batched, _, _ = train(fed, rounds=2, engine=Batched(fed.task))
    assert outcomes[-1].failed == {}
    assert max(float((batched.out.params[k] - x).abs().max()) for k, x in state.out.params.items()) < 1e-3


@pytest.mark.parametrize("name", ["scaffold", "scallion", "scafcom", "fedcomgate"])
@pytest.mark.parametrize("optimizer", ["adamw", "torch.optim:SGD"])
def test_a_rule_that_uses_travel_requires_sgd(name: str, optimizer: str) -> None:
    with pytest.raises(SettingsError, match=rf"^train.optimizer = '{optimizer}': \w+\.\w+ of the algorithm .* sgd"):
        federation(algorithm={"name": name}, train=STILL | {"optimizer": optimizer})
    federation(algorithm={"name": name}, train=STILL)


OWN = {"name": f"{__name__}:slow_bias", "factor": 0.5}


def test_groups_of_an_own_optimizer_keep_the_ratio_of_their_rates() -> None:
    """With half the rate, a bias moves half as far in the first step of a round; rates fall from round to round."""
    rates = {"schedule": "decayed", "decay": 0.5, "steps": 1, "momentum": 0.0}
    plain, halved = (federation(train=rates | more) for more in ({}, {"optimizer": OWN}))
    for number in (1, 2):
        ours, theirs = (model_after(fed, number) for fed in (halved, plain))
        start = plain.start().out.params
        for name, x in theirs.items():
            factor = 1.0 if x.ndim > 1 else 0.5
            torch.testing.assert_close(ours[name] - start[name], factor * (x - start[name]), rtol=1e-3, atol=1e-7)


def model_after(fed: Federation, number: int) -> Params:
    """Model after one round with this number, from the initial model."""
    opened = OpenRound(fed, fed.start()._replace(number=number - 1), Ram(), draw(fed, number, torch.device("cpu")))
    assert opened.job is not None
    opened.take(Sequential(fed.task).train([opened.job])[0])
    return opened.end(None)[0].out.params


def test_an_own_optimizer_gives_the_same_bytes_for_any_number_of_workers() -> None:
    fed = federation(Normed(), train=STILL | {"optimizer": {"name": "torch.optim:Adagrad", "eps": 1e-6}})
    reference, _, _ = train(fed)
    for workers in (1, 2):
        engine = processes(fed.task, workers)
        state, _, _ = train(fed, engine=engine)
        engine.close()
        assert same(state.out.params, reference.out.params)


def test_the_batched_engine_refuses_other_optimizers_before_training() -> None:
    with pytest.raises(SettingsError, match=r"^engine.name = 'batched': train.optimizer: .* only sgd, adam and adamw"):
        federation(train=STILL | {"optimizer": OWN}, engine={"name": "batched"})


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (f"{__name__}:not_an_optimizer", "returns int; it must return a torch.optim.Optimizer"),
        (f"{__name__}:Replacing", "it must change parameters in place"),
        ("torch.optim:LBFGS", "closure"),
        ("torch.optim:Nothing", "no function 'Nothing' in torch.optim"),
        ({"name": "torch.optim:RMSprop", "speed": 3}, "with {'speed': 3}: .*unexpected keyword argument 'speed'"),
    ],
)
def test_a_wrong_optimizer_is_refused_before_training(optimizer: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=rf"^train.optimizer = '.*': ?.*{reason}|^train.optimizer = '.*' {reason}"):
        federation(train=STILL | {"optimizer": optimizer})


def experiment(optimizer: Any) -> Experiment:
    return settings(train=STILL | {"rounds": 4, "optimizer": optimizer}, record={"checkpoint": 1})


@pytest.mark.parametrize("optimizer", ["adam", {"name": "adamw", "betas": [0.9, 0.99]}])
def test_a_run_that_is_resumed_in_the_middle_is_the_same(optimizer: Any, tmp_path: Path) -> None:
    whole = run(experiment(optimizer), tmp_path / "whole", data=points())
    list(whole)
    stopped = run(experiment(optimizer), tmp_path / "parts", data=points())
    next(stopped)
    next(stopped)
    stopped.close()
    resumed = resume(tmp_path / "parts", data=points())
    list(resumed)
    assert same(resumed.params, whole.params)


def test_an_optimizer_is_passed_as_an_object_and_again_to_resume(tmp_path: Path) -> None:
    def local(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, lr, alpha=0.5)

    stopped = run(experiment("sgd"), tmp_path, data=points(), optimizer=local)
    assert stopped.experiment.train.optimizer.name.endswith("<locals>.local")
    next(stopped)
    stopped.close()
    with pytest.raises(RunError, match="optimizer"):
        resume(tmp_path, data=points())
    resumed = resume(tmp_path, data=points(), optimizer=local)
    list(resumed)
    named = Run(experiment({"name": "torch.optim:RMSprop", "alpha": 0.5}), data=points())
    list(named)
    assert same(resumed.params, named.params)


def test_an_importable_optimizer_need_not_be_passed_to_resume(tmp_path: Path) -> None:
    stopped = run(experiment("sgd"), tmp_path, data=points(), optimizer=torch.optim.Adagrad)
    next(stopped)
    stopped.close()
    assert len(list(resume(tmp_path, data=points()))) == 3


def test_momentum_without_sgd_is_refused() -> None:
    for train_settings, given in (({"optimizer": "adam"}, None), ({}, slow_bias)):
        changed = Experiment(train={"momentum": 0.9} | train_settings)
        with pytest.raises(SettingsError, match=r"^train.momentum = 0.9: has no effect without train.optimizer.name"):
            run(changed, optimizer=given)
    with pytest.raises(TypeError, match=r"^optimizer=0.1: must be a function \(parameters, lr\)"):
        run(Experiment(), optimizer=0.1)  # type: ignore[arg-type]


def test_runs_with_different_optimizers_do_not_share_a_pack() -> None:
    kinds = ["sgd", "adam", "adamw", {"name": "adam", "eps": 1e-6}]
    assert len({kind(experiment(optimizer)) for optimizer in kinds}) == 4
    assert kind(experiment("adam")) == kind(
        experiment("adam").changed(**{"train.lr": 0.5, "train.steps": 3, "seed": 1})
    )
    plain, adam = (memory_needed(experiment(name), federation(train={"optimizer": name}).task, 0) for name in kinds[:2])
    assert adam > plain


def test_the_time_of_a_sweep_with_local_steps_is_estimated() -> None:
    raw: dict[str, Any] = {
        "train": {"rounds": 2, "steps": 3},
        "engine": {"name": "sequential"},
        "sweep": {"seed": [0, 1]},
    }
    assert training_time(expand(raw), 1) > 0


def test_the_state_of_the_model_and_its_gradients_are_not_changed_by_a_trial() -> None:
    model = Normed()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    fed = federation(model, train=STILL | {"optimizer": OWN})
    assert same(dict(fed.task.model.state_dict()), before)
    train(fed, rounds=1)
    assert all(p.grad is None for p in fed.task.model.parameters())
