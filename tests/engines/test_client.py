"""One client's round: SGD as in torch, controls, buffers, modes, draws."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Params
from fedshift.data.cohorts import draw_plan
from fedshift.engines import Sequential
from fedshift.engines.client import gradients
from tests.federations import Normed, federation, points, processes, same, train


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_training_is_torchs_sgd(momentum: float) -> None:
    """Compared with torch.optim.SGD and clip_grad_norm_ on the same batches."""
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
        for p in model.parameters():  # decay after clipping, like the weight_decay of SGD
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
    """c = (1/N) sum_i c_i over all clients, with c_i = 0 for those that never trained."""
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


def test_dropout_draws_per_client_and_step_and_restores_torchs_generator() -> None:
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
    turn = engine.client.steps
    engine.client.steps = lambda *given: seen.append(turn(*given)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    state = train(fed, rounds=1, engine=engine)[0]
    for name in ("norm.running_mean", "norm.running_var"):
        mean = torch.stack([w[name] for w in seen]).mean(0)
        torch.testing.assert_close(state.out.params[name], mean, rtol=1e-6, atol=1e-7)
    assert state.out.params["norm.num_batches_tracked"] == seen[0]["norm.num_batches_tracked"] > 0
    assert "frozen" not in state.out.params  # it is not sent


def test_tied_weights_are_sent_once_and_frozen_ones_never() -> None:
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


class Remembers(nn.Module):
    """Buffers that replace others, one of them not part of the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("private", torch.zeros(1), persistent=False)
        self.mean: Tensor
        self.private: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            self.private = self.private + 1
        logits: Tensor = self.out(x - self.mean) * (1 + 0.01 * self.private)
        return logits


def test_replaced_buffers_are_sent_and_private_ones_are_restored_for_each_client() -> None:
    fed = federation(Remembers())
    reference = train(fed)[0].out.params
    assert reference["mean"].abs().max() > 0.01
    engine = processes(fed.task, 2)
    assert same(train(fed, engine=engine)[0].out.params, reference)
    engine.close()
    assert same(train(fed)[0].out.params, reference)


def test_modules_in_evaluation_mode_stay_in_it_unless_it_is_the_whole_model() -> None:
    frozen, whole = Normed(), Normed().eval()
    frozen.norm.eval()
    for model, trained in ((frozen, False), (whole, True)):
        fed = federation(model)
        engine = processes(fed.task, 2)
        for chosen in (None, engine):
            tracked = train(fed, engine=chosen)[0].out.params["norm.num_batches_tracked"]
            assert bool(tracked > 0) == trained
        engine.close()


def test_labels_that_the_data_does_not_have_are_not_counted() -> None:
    fed = federation(nn.Linear(6, 9), dataset=points(tests=4300))
    _, (outcome,), _ = train(fed, rounds=1)
    assert outcome.score is not None
    assert len(outcome.score.predicted) == 4
    assert sum(outcome.score.predicted) <= 4300


def test_a_model_that_draws_random_numbers_has_reproducible_scores() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(len(x), 4)

    fed = federation(Noisy(6, 4))
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(train(fed, rounds=1)[1][0].loss)
    assert losses[0] == losses[1]


def test_a_tiny_learning_rate_does_not_make_controls_infinite() -> None:
    fed = federation(algorithm={"name": "scaffold"}, train={"schedule": "decayed", "decay": 1e-30, "patience": 9})
    state, outcomes, _ = train(fed, rounds=4)
    assert all(c.isfinite().all() for c in state.out.control.values())
    assert "memory is NaN" in next(iter(outcomes[-1].failed.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_those_of_torch(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 3)).to(dtype)
    x, y, weights = torch.randn(7, 6, generator=g).to(dtype), torch.arange(7) % 3, tuple(net.parameters())
    expected = torch.autograd.grad(F.cross_entropy(net[:3](x), y), weights, allow_unused=True)
    found = gradients(F.cross_entropy(net[:3](x), y), weights)
    assert [grad is None for grad in found] == [False] * 4 + [True] * 2
    assert all(torch.equal(a, b) for a, b in zip(expected[:4], found[:4], strict=True))


@pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True) * 2, torch.ones(())])
def test_a_loss_without_gradients_raises_the_exception_of_torch(loss: Tensor) -> None:
    w = (torch.ones(1, requires_grad=True),)
    with pytest.raises(RuntimeError) as expected:
        torch.autograd.grad(loss, w, allow_unused=True)
    with pytest.raises(RuntimeError) as found:
        gradients(loss, w)
    assert str(found.value) == str(expected.value)
