"""Custom strategies inside of FedShift, and invalid arguments."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedshift import Cast, Codec, Identity, KMeans
from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold, Seeded
from fedshift.flower.addon.arrays import to_params, to_record
from fedshift.flower.testing import LocalGrid
from tests.flower.apps import client_app, model, moved, run, same
from tests.flower.test_strategy import ALL, Middle, private


@pytest.mark.parametrize("updates", [False, True])
def test_a_strategy_may_send_something_else_than_it_was_given(updates: bool) -> None:
    class Halved(FedAvg):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
            half = to_record({name: w / 2 for name, w in to_params(arrays).items()})
            return super().configure_train(server_round, half, config, grid)

    bare = run(Halved(**ALL), rounds=2)
    random.seed(3)
    wrapped = run(FedShift(Halved(**ALL)), [QuantizeMod(32, updates=updates)], rounds=2)
    for name, w in to_params(bare.arrays).items():
        assert torch.allclose(w, to_params(wrapped.arrays)[name], atol=1e-6)


def test_strategies_may_send_no_messages_or_return_nothing() -> None:
    result = run(FedShift(FedAvg(fraction_train=0.0, min_evaluate_nodes=6)), [QuantizeMod(4)], rounds=7)
    assert len(result.evaluate_metrics_clientapp) == 7

    class Patient(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, replies) if server_round > 6 else (None, None)

    strategy = FedShift(Patient(**ALL))
    run(strategy, [QuantizeMod(4)], rounds=7)
    assert [x.used for x in strategy.rounds] == [0] * 6 + [6]


def test_a_custom_strategy_may_have_clients_with_different_metrics() -> None:
    def odd(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return w, metrics | ({"more": 1.0} if client == 2 else {})

    strategy = FedShift(Middle())
    run(strategy, [QuantizeMod(32)], train=odd, rounds=1)
    assert strategy.rounds[0].used == 6


def test_one_object_may_train_twice() -> None:
    strategy, results = FedShift(FedAvg(**ALL)), []
    grid = LocalGrid(client_app([QuantizeMod(2, error_feedback=True)]), 6, seed=1)
    for _ in range(2):
        random.seed(3)
        results.append(strategy.start(grid, model(), num_rounds=2).arrays)
    assert same(*results)
    assert [x.number for x in strategy.rounds] == [1, 2]


def test_the_app_gets_no_keys_of_fedshift_in_its_config() -> None:
    seen: list[set[str]] = []

    def look(message: Message, context: Context, call_next: Any) -> Message:
        seen.append({key for record in message.content.config_records.values() for key in record})
        return call_next(message, context)  # type: ignore[no-any-return]

    run(FedShift(FedAvg(**ALL)), [QuantizeMod(4), look], rounds=1)
    assert all(keys == {"server-round"} for keys in seen)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: FedShift(None), "needs an instance of a flwr.serverapp.strategy class"),  # type: ignore[arg-type]
        (lambda: FedShift(Seeded(FedAvg)), "the class FedAvg"),  # type: ignore[arg-type]
        (lambda: FedShift(FedShift(FedAvg())), "FedShift cannot wrap FedShift"),
        (lambda: FedShift(FedAvg(), bits_for=4), "bits_for must be a function"),  # type: ignore[arg-type]
        (lambda: run(FedShift(FedAvg(), tensors="nothing*")), "no match among the tensors one.weight"),
        (lambda: Scaffold(FedAvg(), population=0), "population must be 1 or more"),
        (lambda: QuantizeMod(codec=KMeans(4)), "codec must be a Codec, for example"),  # type: ignore[arg-type]
        (lambda: QuantizeMod(4, codec=Codec(Identity())), "cannot have 4 bits"),
        (
            lambda: FedShift(private(flower.DifferentialPrivacyServerSideFixedClipping, Scaffold(FedAvg()), 1.0, 6)),
            r"Scaffold\(DifferentialPrivacy",
        ),
    ],
)
def test_invalid_arguments_raise_an_error(make: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        make()


def test_a_codec_with_its_own_bits_is_kept() -> None:
    assert QuantizeMod(codec=Codec(Cast("float16"))).uplink(16).codec == Codec(Cast("float16"))
    assert QuantizeMod(exact="head.*").coded({"head.w": torch.ones(1), "w": torch.ones(1)}) == ["w"]


def test_two_mods_raise_an_error() -> None:
    with pytest.raises(NoUploadsError, match="the reply is already encoded"):
        run(FedShift(FedAvg(**ALL), patience=1), [again(), QuantizeMod(4)])


def again() -> Callable[..., Message]:
    """A second QuantizeMod that still gets the config of the server."""
    outer = QuantizeMod(4)

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        config = dict(message.content["config"])

        def inner(message: Message, context: Context) -> Message:
            message.content["config"] = ConfigRecord(config)  # type: ignore[arg-type]
            return call_next(message, context)  # type: ignore[no-any-return]

        return outer(message, context, inner)

    return mod
