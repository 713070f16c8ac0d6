"""The batched engine: draws of the sequential engine, its weights within rounding, its codes for equal weights."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Dataset, Step, dataset
from fedshift.engines import Batched, Sequential, StackError, Task, TrainingError
from fedshift.engines.gpu.stacked import Mapped
from fedshift.experiment.build import build
from fedshift.models import MODELS, PaperCNN, ResNet
from fedshift.rounds.engine import Upload
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import OpenRound, Ram, draw
from fedshift.rounds.uplink import read
from tests.engines.test_engines import CASES
from tests.federations import federation, points, same, settings, train


def uploads(fed: Federation, engine: Sequential | Batched) -> list[Upload]:
    """Uploads of the first round."""
    opened = OpenRound(fed, fed.start().at(engine.home), Ram(), draw(fed, 1, engine.home))
    assert opened.job is not None
    return list(engine.train([opened.job])[0])


@pytest.mark.parametrize("name", CASES)
def test_local_weights_are_those_of_the_sequential_engine(name: str) -> None:
    """With exact uploads, which are the weights before encoding."""
    exact = {"uplink": {"bits": 32}} if "uplink" in CASES[name] else {}
    fed = federation(**CASES[name] | exact)
    for batched, expected in zip(uploads(fed, Batched(fed.task)), uploads(fed, Sequential(fed.task)), strict=True):
        start = fed.start().out.params
        w, reference = read(batched.frame, start), read(expected.frame, start)
        assert batched.client == expected.client
        assert max(float((w[k] - reference[k]).abs().max()) for k in reference) < 1e-4
        assert len(batched.frame) == len(expected.frame)
        assert len(batched.second) == len(expected.second)


@pytest.mark.parametrize("name", CASES)
def test_rounds_equal_those_of_the_sequential_engine_within_rounding(name: str) -> None:
    fed = federation(**CASES[name])
    state, outcomes, memory = train(fed)
    batched, found, remembered = train(fed, engine=Batched(fed.task))
    assert max(float((batched.out.params[k] - x).abs().max()) for k, x in state.out.params.items()) < 1e-4
    assert memory.held.keys() == remembered.held.keys()
    for client, kept in memory.held.items():
        assert kept.keys() == remembered.held[client].keys()
        assert all(torch.allclose(x, remembered.held[client][k], atol=1e-4) for k, x in kept.items())
    for a, b in zip(outcomes, found, strict=True):
        assert (a.bytes_up, a.bytes_down, a.share, a.arrived, a.dropped) == (
            b.bytes_up,
            b.bytes_down,
            b.share,
            b.arrived,
            b.dropped,
        )
        assert a.error == pytest.approx(b.error, abs=1e-4)
        for layer, seen in a.layers.items():
            assert b.layers[layer] == pytest.approx(seen, abs=1e-4)


def images() -> Dataset:
    g = torch.Generator().manual_seed(0)
    x, test = (torch.randint(0, 256, (n, 3, 8, 8), generator=g).byte() for n in (60, 20))
    return dataset(x, torch.arange(60) % 10, test, torch.arange(20) % 10, mean=(0.5,) * 3, std=(0.2,) * 3)


def test_the_papers_cnn_with_its_augmentation() -> None:
    torch.manual_seed(0)
    fed = federation(
        PaperCNN((3, 8, 8)),
        images(),
        data={"clients": 6, "partition": "iid", "augment": True},
        train={"cohort": 3, "epochs": 2, "batch": 4, "lr": 0.01, "momentum": 0.9},
    )
    for batched, expected in zip(uploads(fed, Batched(fed.task)), uploads(fed, Sequential(fed.task)), strict=True):
        assert batched.drift == [pytest.approx(pair, abs=1e-4) for pair in expected.drift]


NAMED: dict[str, tuple[int, ...]] = {
    "logistic": (60,),
    "cnn": (1, 8, 8),
    "resnet8": (3, 8, 8),
    "narrow resnet18": (3, 8, 8),
    "char-transformer": (12,),
}


def named(name: str, **changed: Any) -> Federation:
    """A federation of a model by name, with random examples."""
    narrow = partial(ResNet, widths=(4, 4, 8, 8), blocks=2)
    shape, g, y = NAMED[name], torch.Generator().manual_seed(0), torch.arange(60) % 10
    x = torch.randint(0, 256 if len(shape) == 3 else 10, (60, *shape), generator=g)
    x = x.byte() if len(shape) == 3 else x if name == "char-transformer" else x - 4.5
    moments = ((0.5,) * shape[0], (0.2,) * shape[0]) if len(shape) == 3 else ((), ())
    data = dataset(x, y, x[:20], y[:20], mean=moments[0], std=moments[1])
    torch.manual_seed(0)
    return federation(
        MODELS.get(name, narrow)(shape, 10),
        data,
        data={"clients": 6, "partition": "iid", "augment": len(shape) == 3},
        train={"cohort": 3, "epochs": 2, "batch": 4, "lr": 0.02, "momentum": 0.9},
        **changed,
    )


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_models_by_name_are_trained_as_by_the_sequential_engine(name: str, products: bool) -> None:
    """With augmentation of images; `products`: with the convolutions that a GPU computes."""
    fed = named(name)
    engine, start = Batched(fed.task), fed.start().out.params
    engine.net = Mapped(fed.task, "fp32", products)
    for batched, expected in zip(uploads(fed, engine), uploads(fed, Sequential(fed.task)), strict=True):
        w, reference = read(batched.frame, start), read(expected.frame, start)
        assert max(float((w[k] - reference[k]).abs().max()) for k in reference) < 1e-4
        assert max(float((start[k] - reference[k]).abs().max()) for k in reference) > 1e-2
    scores = engine.evaluate(start), Sequential(fed.task).evaluate(start)
    assert scores[0].loss == pytest.approx(scores[1].loss, rel=1e-5)


def test_jobs_of_several_runs_give_the_same_uploads_as_alone() -> None:
    feds = [federation(**CASES[name]) for name in ("fedavg", "fedprox", "scaffold", "fedpaq")]
    engine = Batched(feds[0].task)
    open_rounds = [OpenRound(fed, fed.start(), Ram()) for fed in feds]
    together = engine.train([opened.job for opened in open_rounds if opened.job])
    for fed, opened, made in zip(feds, open_rounds, together, strict=True):
        assert opened.job is not None
        alone = list(Batched(fed.task).train([opened.job])[0])
        for a, b in zip(made, alone, strict=True):
            assert a.client == b.client
            assert a.drift == [pytest.approx(pair, abs=1e-5) for pair in b.drift]


def test_a_client_with_one_example_stops_after_its_steps() -> None:
    """Sizes from 1 to 60; each client learns the same as alone."""
    fed = federation(data={"partition": "dirichlet", "alpha": 0.1, "least": 1, "clients": 8}, train={"cohort": 8})
    assert int(fed.partition.sizes.min()) * 10 < int(fed.partition.sizes.max())
    for batched, expected in zip(uploads(fed, Batched(fed.task)), uploads(fed, Sequential(fed.task)), strict=True):
        assert batched.drift == [pytest.approx(pair, abs=1e-4) for pair in expected.drift]


def test_scores_are_those_of_the_sequential_engine() -> None:
    fed = federation(dataset=points(tests=4300))
    params = fed.start().out.params
    batched, expected = Batched(fed.task).evaluate(params), Sequential(fed.task).evaluate(params)
    assert (batched.examples, batched.metric, batched.predicted) == (
        expected.examples,
        expected.metric,
        expected.predicted,
    )
    assert batched.loss == pytest.approx(expected.loss, rel=1e-5)


def test_a_custom_loss_and_frozen_weights() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.norm, self.last = nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 4)
            self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
            self.register_buffer("scale", torch.tensor([2.0]))

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.last(F.relu(self.norm(self.first(x)))) @ self.frozen * self.scale
            return outputs

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)

    fed = build(settings(uplink={"bits": "32+4"}), Partly(), points(), loss=loss)
    state, _, _ = train(fed)
    batched, _, _ = train(fed, engine=Batched(fed.task))
    assert max(float((batched.out.params[k] - x).abs().max()) for k, x in state.out.params.items()) < 1e-4


def test_a_scalar_weight_is_trained() -> None:
    class Warm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last, self.heat = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.last(x) * self.heat
            return outputs

    fed = federation(Warm(), train={"clip": 0.5})
    state, _, _ = train(fed)
    batched, _, _ = train(fed, engine=Batched(fed.task))
    assert max(float((batched.out.params[k] - x).abs().max()) for k, x in state.out.params.items()) < 1e-4


@pytest.mark.parametrize("bits", [32, 16, 4])
def test_numbers_too_large_for_the_mean_are_refused_as_in_the_sequential_engine(bits: int) -> None:
    """Every weight is about 1e38: the sum of two may overflow, and bfloat16 rounds some to infinity."""

    class Huge(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :4] + self.bias

    fed = federation(Huge(), uplink={"bits": bits}, train={"lr": 1e-6})
    fed.task.params["weight"].copy_(torch.linspace(-1.2e38, 1.2e38, 24).view(4, 6))
    _, (outcome,), _ = train(fed, rounds=1)
    batched, (found,), _ = train(fed, rounds=1, engine=Batched(fed.task))
    assert found.arrived == outcome.arrived
    assert found.failed == outcome.failed
    assert all(x.isfinite().all() for x in batched.out.params.values())


def test_batch_norm_in_evaluation_mode_can_be_stacked() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].eval()
    fed = federation(model)
    for batched, expected in zip(uploads(fed, Batched(fed.task)), uploads(fed, Sequential(fed.task)), strict=True):
        assert batched.drift == [pytest.approx(pair, abs=1e-4) for pair in expected.drift]


def test_clients_that_diverge_are_left_out_and_the_others_count() -> None:
    """An example of 1e38 makes only its client diverge."""
    data = points()
    data.x[0] = 1e38
    fed = federation(dataset=data, train={"cohort": 12, "rounds": 1}, uplink={"bits": "32+4"})
    _, (outcome,), _ = train(fed, rounds=1)
    batched, (found,), _ = train(fed, rounds=1, engine=Batched(fed.task))
    assert outcome.failed
    assert found.failed == outcome.failed
    assert found.arrived == outcome.arrived
    assert all(x.isfinite().all() for x in batched.out.params.values())


def test_entropy_coded_uploads_have_the_size_of_real_frames() -> None:
    fed = federation(uplink={"bits": "32+4", "coder": "zstd"})
    for batched, expected in zip(uploads(fed, Batched(fed.task)), uploads(fed, Sequential(fed.task)), strict=True):
        assert abs(len(batched.frame) - len(expected.frame)) <= 2  # a code at a border may differ


@pytest.mark.parametrize("send", ["weights", "updates"])
def test_an_error_from_a_coarser_uplink_is_fed_back_by_an_exact_one(send: str) -> None:
    fed = federation(uplink={"bits": 32, "feedback": True, "send": send})
    opened = OpenRound(fed, fed.start(), Ram())
    assert opened.job is not None
    name = fed.layers[0]
    error = torch.full_like(fed.task.params[name], 0.25)
    job = opened.job._replace(recall=lambda client: {"error/" + name: error})
    plain, batched, expected = (
        [read(upload.frame, job.sent.params)[name] for upload in engine.train([each])[0]]
        for engine, each in ((Sequential(fed.task), opened.job), (Batched(fed.task), job), (Sequential(fed.task), job))
    )
    for before, a, b in zip(plain, batched, expected, strict=True):
        torch.testing.assert_close(b, before + error, rtol=0, atol=1e-6)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_the_same_jobs_give_the_same_bits() -> None:
    fed = federation(**CASES["scaffold"])
    first, _, _ = train(fed, engine=Batched(fed.task))
    second, _, _ = train(fed, engine=Batched(fed.task))
    assert same(first.out.params, second.out.params)


def test_an_exception_of_a_model_is_reported() -> None:
    calls = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise KeyError("not today")
        return F.cross_entropy(outputs, targets)

    fed = build(settings(), data=points(), loss=loss)
    engine: Any = Batched(fed.task)
    with pytest.raises(TrainingError, match="round 1: KeyError: 'not today'"):
        train(fed, engine=engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_does_not_refuse_a_model_of_half_precision(dtype: torch.dtype) -> None:
    for seed in range(40):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        y = (x[:, 0] > 0).long()
        Batched(Task(model.to(dtype), dataset(x, y, x, y), F.cross_entropy, None))


def test_a_loss_that_is_a_sum_is_refused_in_half_precision() -> None:
    x, y = torch.ones(16, 4), torch.ones(16, 2)
    task = Task(nn.Linear(4, 2).bfloat16(), dataset(x, y, x, y), nn.MSELoss(reduction="sum"), None)
    with pytest.raises(StackError, match="depends on other examples of the batch"):
        Batched(task)


def test_clients_with_different_rates_are_encoded_as_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups with rates 0.8 and 0.3: one call per tensor, and the frames of the sequential engine."""
    lean = {"rate": 0.8, "biases": True, "send": "updates", "feedback": True}
    slow = lean | {"rate": 0.3, "share": 0.5}
    fed = federation(uplink=lean | {"group": {"slow": slow}}, train={"cohort": 4})
    called: list[int] = []
    encode = Step.encode

    def counted(self: Step, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        called.append(len(x))
        return encode(self, x, key, scale)

    expected = uploads(fed, Sequential(fed.task))
    monkeypatch.setattr(Step, "encode", counted)
    batched = uploads(fed, Batched(fed.task))
    assert {group.uplink.codec.quantizer for group in fed.groups} == {Step(rate=0.8), Step(rate=0.3)}
    assert called[: len(fed.task.trained)] == [4] * len(fed.task.trained)
    start = fed.start().out.params
    for ours, theirs in zip(batched, expected, strict=True):
        assert len(ours.frame) == len(theirs.frame)
        assert all(
            torch.allclose(x, read(ours.frame, start)[k], atol=1e-3) for k, x in read(theirs.frame, start).items()
        )
