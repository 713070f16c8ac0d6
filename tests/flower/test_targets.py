"""Selection of the arrays to shift: by the app's module, by patterns, or by names, shapes and changes."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedshift import Codec, KMeans, Params, Range, Step, Stochastic, Ternary, Uniform, shift
from fedshift.flower import FedShift, QuantizeMod
from fedshift.flower.addon.arrays import to_params, to_record
from tests.flower.apps import model, moved, run
from tests.flower.test_strategy import ALL


class Net(nn.Module):
    """Layers of different kinds; clients train all but the buffer and the frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Parameter(torch.ones(1, 4, 16))
        self.embed, self.frozen = nn.Embedding(9, 16), nn.Linear(16, 16).requires_grad_(False)
        self.plane, self.head = nn.LayerNorm([4, 16]), nn.Linear(16, 9, bias=False)
        self.own = nn.Module()
        self.own.weight = nn.Parameter(torch.randn(3, 5))
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.full((4, 16), 0.5))


UNTRAINED = {"positions", "frozen.weight", "frozen.bias"}


def trained(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
    """A client that leaves the buffer and the frozen layer as they are."""
    after, metrics = moved(start, client, context)
    after["head.weight"] = after["embed.weight"]
    return {name: start[name] if name in UNTRAINED else x for name, x in after.items()}, metrics


def state(module: nn.Module) -> ArrayRecord:
    return to_record({name: x.detach() for name, x in module.state_dict().items()})


def touched(strategy: FedShift, mod: QuantizeMod, start: ArrayRecord, train: Any = trained) -> list[str]:
    """Arrays whose result after a round differs from that of the same uploads without a shift."""
    results = []
    for one in (strategy, FedShift(FedAvg(**ALL), max_share=0.0)):
        random.seed(3)  # Flower draws the order of nodes, which affects sums
        results.append(to_params(run(one, [mod], start=start, train=train, rounds=1).arrays))
    return [name for name, x in results[0].items() if not torch.equal(x, results[1][name])]


def test_a_module_determines_exactly_which_arrays_are_weights_also_shared_ones() -> None:
    strategy = FedShift(FedAvg(**ALL), module=Net())
    assert touched(strategy, QuantizeMod(4), state(Net())) == ["embed.weight", "head.weight"]
    assert strategy.shifted == ["embed.weight", "head.weight"]


def test_arrays_of_a_module_may_come_as_a_list_of_its_state_or_of_its_parameters() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm([4, 4]), nn.Linear(4, 4))
    states = [x.numpy() for x in net.state_dict().values()]
    parameters = [x.detach().numpy() for x in net.parameters()]
    for arrays, weights in ((states, ["0", "9"]), (parameters, ["0", "6"])):
        strategy = FedShift(FedAvg(**ALL), module=net)
        assert touched(strategy, QuantizeMod(4), ArrayRecord(arrays), moved) == weights


def test_only_a_part_of_a_module_may_be_sent() -> None:
    strategy = FedShift(FedAvg(**ALL), module=nn.ModuleDict({"one": nn.Linear(5, 8), "two": nn.Linear(8, 3)}))
    assert touched(strategy, QuantizeMod(4), model(), moved) == ["one.weight", "two.weight"]


def test_without_a_module_names_shapes_and_changes_decide() -> None:
    strategy = FedShift(FedAvg(**ALL))
    assert touched(strategy, QuantizeMod(4), state(Net())) == ["embed.weight", "head.weight", "own.weight"]


def test_arrays_without_names_are_selected_by_shape_and_change() -> None:
    arrays = [x.detach().numpy() for x in Net().state_dict().values()]
    names = list(Net().state_dict())

    def train(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        after, metrics = trained(dict(zip(names, start.values(), strict=True)), client, context)
        return dict(zip(start, after.values(), strict=True)), metrics

    strategy = FedShift(FedAvg(**ALL))
    found = touched(strategy, QuantizeMod(4), ArrayRecord(arrays), train)
    weights = ["embed.weight", "head.weight", "own.weight"]
    assert [names[int(i)] for i in found if names[int(i)] != "plane.bias"] == weights  # which only a module tells apart


CODECS: dict[str, Callable[[], QuantizeMod]] = {
    "means": lambda: QuantizeMod(codec=Codec(KMeans(4))),
    "means, rounded at random": lambda: QuantizeMod(4),
    "lean": lambda: QuantizeMod("lean"),
    "steps": lambda: QuantizeMod(codec=Codec(Step(rate=0.8), Range()), updates=True),
    "few values": lambda: QuantizeMod(codec=Codec(Ternary()), updates=True),
    "exact means": lambda: QuantizeMod(codec=Codec(KMeans(2, exact=True))),
    "a grid": lambda: QuantizeMod(codec=Codec(Uniform(3))),
    "random rounding": lambda: QuantizeMod(codec=Codec(Stochastic(3)), seed=1),
    "bfloat16": lambda: QuantizeMod(16),
    "updates": lambda: QuantizeMod(4, updates=True),
    "updates with feedback": lambda: QuantizeMod(2, updates=True, error_feedback=True),
}


@pytest.mark.parametrize("codec", CODECS)
def test_what_no_client_changes_is_not_shifted_under_any_codec_even_if_it_is_named(codec: str) -> None:
    generator = torch.Generator().manual_seed(5)
    big = torch.randn(100, 120, generator=generator) + 1
    start = to_record({"fc.weight": big, "kept.weight": big + 1, "small.weight": big[:2, :3] + 1})

    def train(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        after, metrics = moved(start, client, context)
        return after | {name: start[name] for name in ("kept.weight", "small.weight")}, metrics

    for tensors in (None, ["*"]):
        strategy = FedShift(FedAvg(**ALL), tensors=tensors)
        assert touched(strategy, CODECS[codec](), start, train) == ["fc.weight"]


def test_a_client_that_trains_nothing_does_not_keep_what_others_train_from_being_shifted() -> None:
    def train(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        after, metrics = moved(start, client, context)
        return (start if client == 0 else after), metrics

    nodes = [{"partition-id": i, "bits": 32 if i == 0 else 4} for i in range(6)]
    strategy = FedShift(FedAvg(**ALL))
    run(strategy, [QuantizeMod()], nodes=nodes, train=train, rounds=1)
    assert strategy.shifted == ["one.weight", "two.weight"]


def test_a_constant_table_stays_as_it_is_from_round_to_round() -> None:
    after = to_params(
        run(FedShift(FedAvg(**ALL)), [QuantizeMod(4)], start=state(Net()), train=trained, rounds=5).arrays
    )
    assert torch.allclose(after["positions"], torch.full((4, 16), 0.5))


def test_patterns_choose_just_what_they_name_and_the_rest_is_as_without_a_shift() -> None:
    strategy = FedShift(FedAvg(**ALL), tensors=["token", "plane.*"])
    assert touched(strategy, QuantizeMod(4), state(Net())) == ["token", "plane.weight", "plane.bias"]


def test_the_shift_of_what_is_chosen_is_that_of_the_rule() -> None:
    results = []
    for one in (FedShift(FedAvg(**ALL), tensors="two*"), FedShift(FedAvg(**ALL), max_share=0.0)):
        random.seed(3)
        results.append(to_params(run(one, [QuantizeMod(4)], rounds=1).arrays))
    expected = shift(results[1], 0.5, ["two*"])
    assert all(torch.equal(results[0][name], x) for name, x in expected.items())


def test_the_log_names_what_is_shifted_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flwr.fedshift"):
        run(FedShift(FedAvg(**ALL), tensors=["one.*"]), [QuantizeMod(4)], rounds=3)
    messages = [record.getMessage() for record in caplog.records if "hift" in record.getMessage()]
    assert sum("Tensors to shift: one.weight, one.bias" in sentence for sentence in messages) == 1
    assert sum("shifted tensors: one.weight, one.bias" in sentence for sentence in messages) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: FedShift(FedAvg(), module=Net),  # type: ignore[arg-type]
            r"FedShift\(module=the class Net\): needs an instance of torch.nn.Module",
        ),
        (
            lambda: FedShift(FedAvg(), module="net"),  # type: ignore[arg-type]
            r"FedShift\(module='net'\): needs an instance of torch.nn.Module",
        ),
        (
            lambda: FedShift(FedAvg(), module=nn.Sequential(nn.LazyLinear(3))),
            r"FedShift\(module=Sequential\): 0.weight has no shape yet; run the lazy model on one batch first",
        ),
        (lambda: FedShift(FedAvg(), tensors=["a"], module=Net()), "pass only one of tensors and module"),
        (lambda: FedShift(FedAvg(), tensors=[3]), "tensors must be names or patterns"),  # type: ignore[list-item]
        (
            lambda: run(FedShift(FedAvg(), module=Net())),
            r"array 'one.weight' of shape \(8, 5\) matches no tensor of the module",
        ),
        (
            lambda: run(FedShift(FedAvg(), module=Net()), start=ArrayRecord([torch.ones(2, 2).numpy()])),
            r"FedShift\(module=Net\): array '0' of shape \(2, 2\) matches no tensor of the module",
        ),
        (lambda: run(FedShift(FedAvg(), tensors=["no*"])), "no match among the tensors one.weight"),
    ],
)
def test_invalid_selections_raise_an_error(make: Callable[[], object], why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        make()
