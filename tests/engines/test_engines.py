"""One table of cases on every engine: the same bytes, whoever trains."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Params
from fedshift.data.cohorts import draw_plan
from fedshift.engines import Engine, ForkError, Processes, Sequential, Task
from fedshift.loop import Federation
from tests.federations import Normed, federation, points, same, train

CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedpaq": {"uplink": {"bits": "32+4"}, "shift": {"on": True}},
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.1}},
    "scaffold": {"algorithm": {"name": "scaffold"}, "uplink": {"bits": 8}},
    "scaffold sent": {"algorithm": {"name": "scaffold", "control": "sent"}, "uplink": {"bits": "32+4"}},
    "feedback": {"uplink": {"bits": "4+2", "feedback": True}},
    "updates": {"uplink": {"bits": 3, "send": "updates", "feedback": True, "quantizer": "stochastic"}},
    "examples": {"data": {"partition": "dirichlet", "least": 2}, "algorithm": {"weights": "examples"}},
    "clip and decay": {"train": {"clip": 0.5, "weight_decay": 0.01, "schedule": "decayed", "decay": 0.9}},
    "lost clients": {"train": {"dropout": 0.4}},
}


def processes(task: Task, workers: int) -> Processes:
    try:
        return Processes(task, workers)
    except ForkError as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize("name", CASES)
def test_bytes_do_not_depend_on_engine_or_workers(name: str) -> None:
    model = None if name == "examples" else Normed()  # batch norm does not take a batch of one
    fed = federation(model, **CASES[name])
    reference, told, remembered = train(fed)
    for workers in (1, 2, 3):
        engine = processes(fed.task, workers)
        state, outcomes, memory = train(fed, engine=engine)
        engine.close()
        assert same(state.out.params, reference.out.params)
        assert same(state.out.control, reference.out.control)
        assert memory.held.keys() == remembered.held.keys()
        assert all(same(memory.held[k], remembered.held[k]) for k in memory.held)
        plain = [outcome._replace(seconds={}, uplink_seconds=None) for outcome in outcomes]
        assert plain == [outcome._replace(seconds={}, uplink_seconds=None) for outcome in told]


def test_a_large_test_set_is_scored_alike_by_all_engines() -> None:
    fed = federation(held=points(tests=4300))
    params = fed.start().out.params
    engine = processes(fed.task, 2)
    assert engine.evaluate(params) == Sequential(fed.task).evaluate(params)
    engine.close()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_training_is_torchs_sgd(momentum: float) -> None:
    """The oracle: torch.optim.SGD with clip_grad_norm_ on the same batches."""
    fed = federation(train={"momentum": momentum, "weight_decay": 0.02, "clip": 0.3, "cohort": 1, "lr": 0.2})
    (client,), _ = fed.cohorts.draw(1)
    drawn = draw_plan(fed.partition, [client], seed=0, number=1, epochs=2, batch=8, rate=fed.rate)
    start = fed.start().out.params
    model = fed.task.model
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
    for batch, keep in zip(drawn.batches[0], drawn.keep[0], strict=True):
        chosen = batch[keep]
        optimizer.zero_grad()
        F.cross_entropy(model(fed.task.data.x[chosen]), fed.task.data.y[chosen]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        for p in model.parameters():  # decay after clipping, as SGD's own weight_decay would have it
            assert p.grad is not None
            p.grad += 0.02 * p.detach()
        optimizer.step()
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    state, _, _ = train(fed, rounds=1)
    for name, x in expected.items():
        torch.testing.assert_close(state.out.params[name], x, rtol=1e-5, atol=1e-6)


def test_fedprox_without_mu_and_scaffold_in_round_one_are_fedavg() -> None:
    plain = train(federation(), rounds=1)[0].out.params
    assert same(train(federation(algorithm={"name": "fedprox", "mu": 0.0}), rounds=1)[0].out.params, plain)
    assert same(train(federation(algorithm={"name": "scaffold"}), rounds=1)[0].out.params, plain)
    further = train(federation(algorithm={"name": "fedprox", "mu": 1.0}), rounds=1)[0].out.params
    start = federation().start().out.params
    assert distance(further, start) < distance(plain, start)


def distance(a: Params, b: Params) -> float:
    return float(sum((a[name] - b[name]).square().sum() for name in a) ** 0.5)


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("control", ["derived", "sent"])
def test_scaffolds_control_is_the_mean_of_the_clients(bits: int, control: str) -> None:
    """c = (1/N) sum_i c_i over all clients, those that never trained counting zero."""
    fed = federation(algorithm={"name": "scaffold", "control": control}, uplink={"bits": bits}, train={"dropout": 0.2})
    state, _, memory = train(fed, rounds=6)
    for name, c in state.out.control.items():
        total = sum(own[name].double() for own in memory.held.values()) / 12
        assert isinstance(total, Tensor)
        torch.testing.assert_close(c.double(), total, rtol=0, atol=1e-6 * float(total.abs().max()) + 1e-9)
        assert c.abs().max() > 0


def test_without_momentum_a_control_is_the_mean_gradient() -> None:
    """One full-batch step: c_i+ = -c + (w - (w - lr g)) / lr = g, the gradient at the start."""
    fed = federation(algorithm={"name": "scaffold"}, train={"momentum": 0.0, "epochs": 1, "batch": 1000})
    _, _, memory = train(fed, rounds=1)
    client, own = next(iter(memory.held.items()))
    model, mine = fed.task.model, fed.partition.of(client)
    model.load_state_dict(fed.start().out.params)
    grads = torch.autograd.grad(
        F.cross_entropy(model(fed.task.data.x[mine]), fed.task.data.y[mine]), list(model.parameters())
    )
    for c, g in zip(own.values(), grads, strict=True):
        torch.testing.assert_close(c, g, rtol=1e-3, atol=1e-5)


def test_dropout_draws_for_each_client_and_step_and_leaves_torch_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    fed = federation(model)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = train(fed, rounds=1)[0].out.params
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert same(train(fed, rounds=1)[0].out.params, first)
    still = federation(nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.0)))
    still.task.model.load_state_dict(model.state_dict())
    assert not same(train(still, rounds=1)[0].out.params, first)


def test_batch_norm_is_averaged_exactly_and_its_counter_is_the_first_clients() -> None:
    model = Normed()
    fed = federation(model, uplink={"bits": 2}, train={"cohort": 3})
    engine = Sequential(fed.task)
    seen: list[Params] = []
    turn = engine.client.sgd
    engine.client.sgd = lambda *given: seen.append(turn(*given)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    state = train(fed, rounds=1, engine=engine)[0]
    for name in ("norm.running_mean", "norm.running_var"):
        mean = torch.stack([w[name] for w in seen]).mean(0)
        torch.testing.assert_close(state.out.params[name], mean, rtol=1e-6, atol=1e-7)
    assert state.out.params["norm.num_batches_tracked"] == seen[0]["norm.num_batches_tracked"] > 0
    assert "frozen" not in state.out.params  # it does not travel


def test_a_workers_error_reaches_the_caller_with_its_trace() -> None:
    fed = federation(nn.Linear(5, 4))  # of the wrong shape
    engine = processes(fed.task, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        train(fed, rounds=1, engine=engine)
    assert "in a worker process" in str(caught.value.__cause__)
    engine.close()


def test_a_worker_that_dies_is_named() -> None:
    class Dies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
            return x

    fed: Federation = federation(Dies(6, 4))
    engine: Engine = processes(fed.task, 1)
    with pytest.raises(RuntimeError, match="a worker process ended before its time"):
        train(fed, rounds=1, engine=engine)
    engine.close()


def test_tied_and_frozen_weights_travel_once_and_never() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
            self.b.weight = self.a.weight
            self.out.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(self.b(self.a(x)))
            return logits

    model = Tied()
    fed = federation(model, uplink={"bits": 2})
    state = train(fed)[0]
    assert list(state.out.params) == ["a.weight", "a.bias", "b.bias", "out.bias"]
    assert torch.equal(fed.task.model.state_dict()["out.weight"], model.out.weight)
    assert not torch.equal(state.out.params["a.weight"], model.a.weight)
