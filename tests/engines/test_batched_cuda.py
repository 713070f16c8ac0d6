"""The batched engine on a GPU: weights of the sequential engine, reproducible bits, packs stopped and resumed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import Dataset, Range, dataset
from fedshift.algorithms.table import ALGORITHMS
from fedshift.codecs.codec import counts
from fedshift.engines import Batched, Sequential
from fedshift.engines.gpu.paper_cnn.net import PaperNet
from fedshift.engines.gpu.stacked import Mapped
from fedshift.engines.gpu.steps import STAGES
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import merge
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import OpenRound, Ram, draw
from fedshift.rounds.uplink import read
from tests.algorithms.test_methods import ARGUMENTS
from tests.cuda import without_waiting
from tests.engines.test_batched import named, uploads
from tests.engines.test_engines import CASES
from tests.federations import federation, points, train
from tests.test_packs import GRID, after, models, trained

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA: dict[str, Any] = {"engine": {"name": "batched", "device": "cuda"}}


def images(n: int = 1200, tests: int = 300) -> Dataset:
    g = torch.Generator().manual_seed(0)
    x, test = (torch.randint(0, 256, (size, 3, 32, 32), generator=g).byte() for size in (n, tests))
    return dataset(x, torch.arange(n) % 10, test, torch.arange(tests) % 10, mean=(0.5,) * 3, std=(0.2,) * 3)


def papers(precision: str = "fp32", **changed: Any) -> Federation:
    base: dict[str, Any] = {
        "data": {"clients": 12, "partition": "iid", "augment": True},
        "model": {"name": "paper-cnn"},
        "train": {"cohort": 6, "epochs": 1, "batch": 20, "lr": 0.005, "momentum": 0.9},
        "engine": {"name": "batched", "device": "cuda", "precision": precision},
    }
    return build(Experiment(**merge(base, changed)), data=images())


def worst(fed: Federation, precision: str) -> float:
    """Largest difference of a local weight from the sequential engine, in the first round.

    Few steps: where two inputs of a maximum are alike to the last bit or so, rounding decides which of them learns.
    """
    start, far = fed.start().out.params, 0.0
    theirs = uploads(fed, Sequential(fed.task, "fp32"))
    for batched, expected in zip(uploads(fed, Batched(fed.task, precision)), theirs, strict=True):
        w, reference = read(batched.frame, start), read(expected.frame, start)
        far = max(far, *(float((w[k].cpu() - reference[k].cpu()).abs().max()) for k in reference))
    return far


def test_the_papers_cnn_is_trained_by_its_kernels_with_the_right_weights() -> None:
    fed = papers(train={"batch": 50})
    assert isinstance(Batched(fed.task, "fp32").net, PaperNet)
    assert worst(fed, "fp32") < 1e-4
    assert worst(fed, "tf32") < 5e-3
    assert worst(fed, "bf16") < 5e-2


@pytest.mark.parametrize("name", ["cnn", "resnet8"])
def test_convolutions_of_models_by_name_are_products_in_a_graph_with_the_right_weights(name: str) -> None:
    fed = papers(model={"name": name}, train={"cohort": 3, "lr": 0.01})
    engine = Batched(fed.task, "fp32")
    assert isinstance(engine.net, Mapped)
    assert engine.net.products
    uploads(fed, engine)
    assert engine.steps.recorded
    assert worst(fed, "fp32") < 1e-4
    assert worst(fed, "tf32") < 1e-2
    assert worst(fed, "bf16") < 0.1


@pytest.mark.parametrize("name", ["logistic", "char-transformer"])
def test_other_models_by_name_have_the_right_weights(name: str) -> None:
    assert worst(named(name, **CUDA), "fp32") < 1e-4


def test_kernels_and_vmap_agree() -> None:
    fed = papers(train={"batch": 50})
    engine = Batched(fed.task, "fp32")
    mapped = Batched(fed.task, "fp32")
    mapped.net = Mapped(fed.task, "fp32")
    for batched, expected in zip(uploads(fed, engine), uploads(fed, mapped), strict=True):
        assert batched.drift == [pytest.approx(pair, abs=1e-4) for pair in expected.drift]
    params = fed.start().out.params
    assert abs(engine.evaluate(params).metric - mapped.evaluate(params).metric) <= 2


@pytest.mark.parametrize(("decay", "algorithm"), [(0.0, "fedavg"), (0.01, "fedavg"), (0.0, "fedprox")])
def test_pairs_of_steps_move_the_weights_as_single_steps(decay: float, algorithm: str) -> None:
    """Five steps: two pairs and a single one."""
    fed = papers("bf16", train={"weight_decay": decay}, algorithm={"name": algorithm})
    paired, single = Batched(fed.task, "bf16"), Batched(fed.task, "bf16")
    single.net.cuts = ()
    start = fed.start().out.params
    for ours, theirs in zip(uploads(fed, paired), uploads(fed, single), strict=True):
        w, reference = read(ours.frame, start), read(theirs.frame, start)
        assert max(float((w[k].cpu() - reference[k].cpu()).abs().max()) for k in reference) < 5e-2
    assert {launch.steps for launch in paired.steps.graphs} == {1, 2}
    assert {launch.steps for launch in single.steps.graphs} == {1}


def test_all_metrics_and_scores_of_clients_equal_those_of_the_sequential_engine() -> None:
    metrics = ["accuracy", "loss", "perplexity", "f1", "auc"]
    changed: dict[str, Any] = {"train": {"metrics": metrics}, "evaluate": {"per_client": True, "held_out": 0.5}}
    cpu = federation(dataset=points(n=5000, tests=4300), **changed, engine={"device": "cpu"})
    gpu = federation(dataset=points(n=5000, tests=4300), **changed, engine={"device": "cuda"})
    params = cpu.task.params
    engine, reference = Batched(gpu.task, "fp32"), Sequential(cpu.task)
    assert engine.evaluate(params).others == pytest.approx(reference.evaluate(params).others, rel=1e-3)
    assert cpu.held is not None
    assert gpu.held is not None
    found, expected = engine.evaluate_clients(params, gpu.held), reference.evaluate_clients(params, cpu.held)
    assert found.examples == expected.examples
    for ours, theirs in zip(found.values, expected.values, strict=True):
        assert ours == pytest.approx(theirs, rel=0.02)  # of about 200 examples


@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_the_sequential_engine_within_rounding(name: str) -> None:
    fed = federation(**merge(CASES[name], {"engine": {"device": "cuda", "precision": "fp32"}}))
    state, outcomes, memory = train(fed, engine=Sequential(fed.task, "fp32"))
    batched, found, remembered = train(fed, engine=Batched(fed.task, "fp32"))
    for k, x in state.out.params.items():
        torch.testing.assert_close(batched.out.params[k].cpu(), x, rtol=0, atol=1e-3)
    assert memory.held.keys() == remembered.held.keys()
    assert [outcome.bytes_up for outcome in outcomes] == [outcome.bytes_up for outcome in found]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_on_a_gpu_as_on_a_cpu(name: str) -> None:
    """The term that a rule adds to gradients is part of a CUDA graph."""
    algorithm = {"name": name} | ARGUMENTS.get(name, {})
    states = []
    for device in ("cuda", "cpu"):
        fed = federation(algorithm=algorithm, engine={"name": "batched", "device": device, "precision": "fp32"})
        states.append(train(fed, rounds=2, engine=Batched(fed.task, "fp32"))[0].out.params)
    rtol = 1e-2 if name in ("signsgd", "fedwsq") else 1e-3
    for key, x in states[1].items():
        torch.testing.assert_close(states[0][key].cpu(), x, rtol=rtol, atol=rtol * float(x.abs().max()), msg=key)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("split", [{}, {"partition": "dirichlet", "alpha": 0.1, "least": 5}], ids=["equal", "unequal"])
def test_a_mixed_pack_is_one_stack_whose_runs_train_as_alone(split: dict[str, Any], precision: str) -> None:
    """Plain, affine and other rules in one CUDA graph, or in one per stage."""
    names = "scafcom", "fedprox", "fedavg", "scaffold", "feddyn"
    feds = [papers(precision, data=split, algorithm={"name": name}) for name in names]
    feds.append(papers(precision, data=split, uplink={"bits": 4, "feedback": True}))
    engine = Batched(feds[0].task, precision)
    opened = [OpenRound(fed, fed.start().at(engine.home), Ram(), draw(fed, 1, engine.home)) for fed in feds]
    together = [list(made) for made in engine.train([one.job for one in opened if one.job])]
    assert engine.steps.recorded
    assert 1 <= len(engine.steps.graphs) <= (STAGES if split else 1)
    for fed, made in zip(feds, together, strict=True):
        for batched, alone in zip(made, uploads(fed, Batched(fed.task, precision)), strict=True):
            assert batched.client == alone.client
            assert batched.drift == [pytest.approx(pair, rel=1e-3, abs=1e-4) for pair in alone.drift]


def test_clients_of_very_different_sizes() -> None:
    fed = papers(data={"partition": "dirichlet", "alpha": 0.1, "least": 5}, train={"cohort": 12, "batch": 50})
    assert int(fed.partition.sizes.min()) * 3 < int(fed.partition.sizes.max())
    assert worst(fed, "fp32") < 2e-4


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_the_same_bits_twice(precision: str, algorithm: str) -> None:
    fed = papers(precision, uplink={"bits": "32+4", "feedback": True}, algorithm={"name": algorithm})
    first, second = (train(fed, rounds=3, engine=Batched(fed.task, precision, True))[0] for _ in range(2))
    assert all(torch.equal(x, second.out.params[k]) for k, x in first.out.params.items())


@pytest.mark.parametrize("stops", [1, 3])
def test_a_stopped_pack_is_resumed_to_the_same_bits(stops: int, tmp_path: Path) -> None:
    raw = merge(GRID, CUDA | {"record": {"checkpoint": 4}})
    raw = merge(raw, {"engine": {"pack": 8, "deterministic": True}})
    trained(raw, tmp_path / "whole")
    trained(raw, tmp_path / "parts", after(stops + 1))
    trained(raw, tmp_path / "parts")
    for whole, parts in zip(models(raw, tmp_path / "whole"), models(raw, tmp_path / "parts"), strict=True):
        assert all(torch.equal(x, parts[name]) for name, x in whole.items())


def test_a_sweep_uses_the_gpu_by_default(tmp_path: Path) -> None:
    raw = merge(GRID, {"engine": {"name": "auto"}})
    events = trained(raw, tmp_path / "grid")
    assert sum(event.kind == "done" for event in events) == 8
    seen = [event.place for event in events if event.kind == "round"]
    assert sorted(seen[:8]) == list(range(8))  # all at once


@pytest.mark.parametrize("uplink", [{"bits": 1}, {"bits": 4, "quantizer": "uniform"}, {"bits": "32+2"}])
@pytest.mark.parametrize("deterministic", [False, True])
def test_estimated_bytes_are_those_of_real_frames_within_one_percent(
    uplink: dict[str, Any], deterministic: bool
) -> None:
    fed = papers(uplink={"coder": "range"} | uplink)
    _, outcomes, _ = train(fed, rounds=2, engine=Batched(fed.task, "fp32", deterministic))
    for outcome in outcomes:
        assert outcome.bytes_framed == sum(outcome.bytes_up)
        assert outcome.bytes_estimated == pytest.approx(outcome.bytes_framed, rel=0.01)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_codes_are_counted_without_synchronization(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (20, 5000), dtype=torch.uint8)
    on_device = codes.cuda()
    with without_waiting():
        counted = counts([on_device], 20, 2**bits)
        estimate = Range().estimate(counted)
    assert estimate is not None
    assert torch.equal(counted.cpu(), counts([codes], 20, 2**bits))
