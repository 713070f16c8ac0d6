"""FedShift(per="filter"): filter centring after any strategy of Flower."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, FedAvgM
from torch import nn

from fedshift import Params, centre
from fedshift.algorithms import Filters, filters
from fedshift.engines import Sequential
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.flower import FedShift, QuantizeMod
from fedshift.flower.addon.arrays import to_params, to_record
from fedshift.flower.testing import LocalGrid
from fedshift.rounds.uplink import read
from tests import federations
from tests.engines.test_batched import uploads
from tests.federations import points, settings
from tests.flower.apps import client_app, moved, run, same
from tests.flower.experiments import grid_of, in_process, on_flower, plain
from tests.flower.test_saved import CrashError, train
from tests.flower.test_strategy import ALL, MODS, NEAREST, STRATEGIES, decoded

MANY, FEW = (6, 40), (3, 6)  # inputs of a filter: enough, and too few to be centred unasked


def arrays(**shapes: tuple[int, ...]) -> ArrayRecord:
    generator = torch.Generator().manual_seed(7)
    return to_record({name: torch.randn(shape, generator=generator) + 0.3 for name, shape in shapes.items()})


def named() -> ArrayRecord:
    shapes = {"fc.weight": MANY, "fc.bias": MANY[:1], "head.weight": FEW, "head.bias": FEW[:1]}
    return arrays(**shapes | {"embed.weight": (9, 40), "ln.weight": (4, 40)})


def after(strategy: Any, mods: list[Any], start: ArrayRecord, rounds: int = 1, train: Any = moved) -> Params:
    random.seed(3)  # Flower draws the order of nodes, in which it adds up
    np.random.seed(3)
    return to_params(run(strategy, mods, start=start, rounds=rounds, train=train).arrays)


def check(strategy: FedShift, start: ArrayRecord, expected: dict[str, Filters], share: float = 1.0) -> None:
    """The strategy's result after a round is that of FedAvg, with exactly these arrays centred."""
    got, bare = after(strategy, [QuantizeMod(4, codec=NEAREST)], start), after(FedAvg(**ALL), [decoded(4)], start)
    assert same(to_record(got), to_record(centre(bare, share, expected)))
    assert strategy.shifted == list(expected)
    for name, at in expected.items():
        assert at.means(bare[name]).abs().max() > 0.01
        assert torch.allclose(at.means(got[name]), (1 - share) * at.means(bare[name]), atol=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_result_is_the_strategys_with_centred_filters(name: str) -> None:
    strategy, mods = FedShift(STRATEGIES[name](), per="filter"), MODS.get(name, [])
    got = after(strategy, [QuantizeMod(4, codec=NEAREST), *mods], named())
    bare = after(STRATEGIES[name](), [decoded(4), *mods], named())
    assert same(to_record(got), to_record(centre(bare, 1.0, {"fc.weight": Filters()})))
    assert strategy.shifted == ["fc.weight"]


@pytest.mark.parametrize("mods", [[QuantizeMod(32)], []], ids=["32 bits", "without the mod"])
def test_uploads_of_full_precision_are_centred_too(mods: list[Any]) -> None:
    got = after(FedShift(FedAvg(**ALL), per="filter"), mods, named())
    bare = after(FedAvg(**ALL), [], named())
    assert same(to_record(got), to_record(centre(bare, 1.0, {"fc.weight": Filters()})))
    assert got["fc.weight"].mean(1).abs().max() < 1e-6
    with_share = FedShift(FedAvg(**ALL), per="filter", share="uploads")  # no upload is quantized
    assert same(to_record(after(with_share, mods, named())), to_record(bare))
    assert with_share.shifted is None


def test_the_share_may_be_given_or_that_of_the_uploads_and_ramped_up() -> None:
    check(FedShift(FedAvg(**ALL), per="filter", share=0.25), named(), {"fc.weight": Filters()}, 0.25)
    check(FedShift(FedAvg(**ALL), per="filter", share="uploads"), named(), {"fc.weight": Filters()}, 0.5)  # the cap
    check(FedShift(FedAvg(**ALL), per="filter", warmup=4), named(), {"fc.weight": Filters()}, 0.25)


def test_a_number_per_layer_is_the_share_whatever_was_quantized() -> None:
    got = after(FedShift(FedAvg(**ALL), share=1.0), [QuantizeMod(32)], named())
    bare = after(FedAvg(**ALL), [], named())
    for name in ("fc.weight", "head.weight", "embed.weight"):
        assert torch.equal(got[name], (bare[name] - bare[name].mean(dtype=torch.float64)).float())
    assert torch.equal(got["fc.bias"], bare["fc.bias"])


def test_patterns_choose_weights_of_few_inputs_and_embeddings_and_never_biases() -> None:
    strategy = FedShift(FedAvg(**ALL), per="filter", tensors=["head.*", "embed*"])
    check(strategy, named(), {"head.weight": Filters(), "embed.weight": Filters()})


class Decoder(nn.Module):
    """Filters on either axis, in groups, and a weight shared with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ConvTranspose2d(8, 8, 3, groups=2)
        self.conv, self.norm = nn.Conv2d(8, 4, 3, bias=False), nn.LayerNorm([4, 40])
        self.rnn = nn.LSTM(40, 5, bias=False)
        self.head, self.embed = nn.Linear(40, 9, bias=False), nn.Embedding(9, 40)
        self.embed.weight = self.head.weight


def test_a_module_tells_where_filters_are_also_for_a_list_of_arrays() -> None:
    net = Decoder()
    state = {name: x.detach() + 0.1 for name, x in net.state_dict().items()}
    expected = {"up.weight": Filters(1, 2), "conv.weight": Filters(), "rnn.weight_ih_l0": Filters()}
    assert {name: at for name, at in filters(net).items() if name != "rnn.weight_hh_l0"} == expected
    check(FedShift(FedAvg(**ALL), per="filter", module=net), to_record(state), expected)
    places = {name: str(i) for i, name in enumerate(state)}
    listed = ArrayRecord([x.numpy() for x in state.values()])
    by_place = {places[name]: at for name, at in expected.items()}
    check(FedShift(FedAvg(**ALL), per="filter", module=net), listed, by_place)


def test_a_list_of_arrays_is_centred_by_the_axis_that_its_biases_fit() -> None:
    for shapes, at in (([(7, 40), (7,), (3, 50), (3,)], Filters()), ([(40, 7), (7,), (50, 3), (3,)], Filters(-1))):
        listed = ArrayRecord(
            [x.numpy() for x in to_params(arrays(**{str(i): s for i, s in enumerate(shapes)})).values()]
        )
        check(FedShift(FedAvg(**ALL), per="filter"), listed, {"0": at, "2": at})


def test_kernels_have_filters_on_the_last_axis() -> None:
    start = arrays(**{"conv/kernel": (3, 3, 4, 8), "conv/bias": (8,), "dense/kernel": (40, 6), "dense/bias": (6,)})
    check(FedShift(FedAvg(**ALL), per="filter"), start, {"conv/kernel": Filters(-1), "dense/kernel": Filters(-1)})


@pytest.mark.parametrize("bits", [32, 4])
def test_arrays_that_no_client_changed_are_left_alone(bits: int) -> None:
    start = arrays(**{"fc.weight": MANY, "frozen.weight": MANY})

    def partly(params: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        trained, metrics = moved(params, client, context)
        return trained | {"frozen.weight": params["frozen.weight"]}, metrics

    strategy = FedShift(FedAvg(**ALL), per="filter")
    got = after(strategy, [QuantizeMod(bits, codec=NEAREST)], start, train=partly)
    assert strategy.shifted == ["fc.weight"]
    assert got["frozen.weight"].mean(1).abs().max() > 0.01
    assert got["fc.weight"].mean(1).abs().max() < 1e-6


@pytest.mark.parametrize("kind", [FedAvgM, flower.FedAdam, flower.FedYogi])
def test_the_strategys_copy_of_the_model_is_the_centred_one(kind: type[Any]) -> None:
    strategy = kind(**ALL)
    got = after(FedShift(strategy, per="filter"), [QuantizeMod(32)], named(), rounds=2)
    kept = strategy.current_arrays
    kept = to_params(kept) if isinstance(kept, ArrayRecord) else {n: torch.as_tensor(x) for n, x in kept.items()}
    assert same(to_record(kept), to_record(got))
    assert kept["fc.weight"].mean(1).abs().max() < 1e-6


def test_a_run_that_was_stopped_is_resumed_to_the_same_bytes(tmp_path: Path) -> None:
    def make(folder: str) -> FedShift:
        return FedShift(flower.FedAdam(**ALL), per="filter", warmup=4, checkpoint=tmp_path / folder)

    app = client_app([QuantizeMod(4, error_feedback=True)])
    whole = train(make("whole"), 5, LocalGrid(app, 6, seed=1), start=named())
    grid = LocalGrid(app, 6, seed=1)
    with pytest.raises(CrashError):
        train(make("run"), 5, grid, crash=3, start=named())
    assert same(whole, train(make("run"), 5, grid, start=named()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: FedShift(FedAvg(), per="unit"), "Shift(per='unit'): per must be 'layer' or 'filter'"),  # type: ignore[arg-type]
        (lambda: FedShift(FedAvg(), share=2.0), "Shift(share=2.0): share must be between 0 and 1, or 'uploads'"),
        (
            lambda: FedShift(FedAvg(), per="filter", share="all"),  # type: ignore[arg-type]
            "Shift(share='all'): share must be between 0 and 1, or 'uploads'",
        ),
        (
            lambda: run(FedShift(FedAvg(), per="filter", tensors=["fc.bias"]), start=named()),
            "FedShift(tensors=('fc.bias',)): no match among the tensors with filters of two or more inputs: "
            "fc.weight, head.weight, embed.weight, ln.weight",
        ),
        (
            lambda: run(FedShift(FedAvg(), tensors=["no*"]), start=arrays(fc=MANY)),
            "FedShift(tensors=('no*',)): no match among the tensors fc",
        ),
    ],
)
def test_invalid_arguments_raise_an_error(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=r"must be|no match among") as caught:
        make()
    assert str(caught.value) == why


def test_the_log_contains_the_rule_and_the_centred_tensors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flwr.fedshift"):
        after(FedShift(FedAvg(**ALL), per="filter"), [QuantizeMod(32)], named(), rounds=2)
    text = [record.getMessage() for record in caplog.records]
    rule = "Shift(per='filter', share=1.0, max_share=0.5, warmup=0, tensors=None)"
    for sentence in (rule, "Tensors to shift: fc.weight", "shifted tensors: fc.weight"):
        assert sum(sentence in line for line in text) == 1


@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("shift", [{"per": "filter"}, {"per": "layer", "share": 0.5}], ids=["filter", "layer"])
def test_a_round_is_that_of_the_engine_on_the_same_uploads(bits: int, shift: dict[str, Any]) -> None:
    """Clients train once, in one process; the server is that of fedshift and that of Flower."""
    model = {"args": {"hidden": 40}}
    exact = build(settings(model=model), data=points())
    start = exact.start().out.params
    trained = [read(upload.frame, start) for upload in uploads(exact, Sequential(exact.task))]

    def client(params: Params, number: int, context: Context) -> tuple[Params, dict[str, Any]]:
        assert all(torch.equal(x, start[name]) for name, x in params.items())
        return trained[number], {"num-examples": 1}

    strategy = FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=5), module=exact.task.model, **shift)
    result = run(
        strategy, [QuantizeMod(bits, codec=NEAREST)], nodes=len(trained), rounds=1, train=client, start=to_record(start)
    )
    fed = build(
        settings(model=model, uplink={"bits": bits, "quantizer": "kmeans"}, shift={"on": True} | shift), data=points()
    )
    state, (outcome,), _ = federations.train(fed, rounds=1)
    assert (strategy.shifted, outcome.arrived) == (fed.shifted, len(trained))
    assert fed.shifted == (["fc2.weight"] if shift["per"] == "filter" else ["fc1.weight", "fc2.weight"])
    for name, x in to_params(result.arrays).items():
        assert torch.allclose(x, state.out.params[name], atol=1e-6)


def test_the_default_of_an_experiment_on_flower_is_filter_centring_to_the_same_bytes() -> None:
    experiment = Experiment(
        data={"clients": 6, "partition": "iid"},
        model={"args": {"hidden": 40}},
        train={"rounds": 2, "cohort": 3, "batch": 20},
        uplink={"bits": "32+4"},
        engine={"name": "sequential"},
    )
    fed = build(experiment, data=points())
    assert (experiment.shift.per, fed.shifted) == ("filter", ["fc2.weight"])
    reference = in_process(experiment)
    outcomes = plain(list(reference))
    run_ = on_flower(experiment, grid_of(experiment, 3))
    assert plain(list(run_)) == outcomes
    assert all(torch.equal(x, reference.params[name]) for name, x in run_.params.items())
    assert run_.params["fc2.weight"].mean(1).abs().max() < 1e-7
