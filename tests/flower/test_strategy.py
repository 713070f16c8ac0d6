"""FedShift around every strategy, on a grid in this process."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy

from fedshift import Codec, KMeans, pack, shift, unpack
from fedshift.flower import FedShift, QuantizeMod
from fedshift.flower.addon.arrays import FRAME, KEY, enclose, to_params, to_record
from fedshift.flower.testing import LocalGrid
from tests.federations import forged
from tests.flower.apps import client_app, model, run, same

NEAREST = Codec(KMeans(4))  # without random rounding, so that the upload can be decoded independently
ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 6}


def private(kind: type[Any], inner: Strategy, *args: Any) -> Strategy:
    made: Strategy = kind(inner, 0.01, *args)
    return made


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(**ALL),
    "FedAvgM": lambda: FedAvgM(**ALL, server_momentum=0.9, server_learning_rate=0.7),
    "FedAdam": lambda: flower.FedAdam(**ALL),
    "FedYogi": lambda: flower.FedYogi(**ALL),
    "FedAdagrad": lambda: flower.FedAdagrad(**ALL),
    "FedProx": lambda: flower.FedProx(**ALL, proximal_mu=0.1),
    "FedMedian": lambda: flower.FedMedian(**ALL),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(**ALL),
    "Krum": lambda: flower.Krum(**ALL, num_malicious_nodes=1),
    "MultiKrum": lambda: flower.MultiKrum(**ALL, num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": lambda: flower.Bulyan(**ALL),
    "QFedAvg": lambda: flower.QFedAvg(0.1, **ALL),
    "server fixed": lambda: private(flower.DifferentialPrivacyServerSideFixedClipping, FedAvg(**ALL), 1.0, 6),
    "server adaptive": lambda: private(flower.DifferentialPrivacyServerSideAdaptiveClipping, FedAvg(**ALL), 6),
    "client fixed": lambda: private(flower.DifferentialPrivacyClientSideFixedClipping, FedAvg(**ALL), 1.0, 6),
    "client adaptive": lambda: private(flower.DifferentialPrivacyClientSideAdaptiveClipping, FedAvgM(**ALL), 6),
}
MODS = {"client fixed": [fixedclipping_mod], "client adaptive": [adaptiveclipping_mod]}


def test_every_strategy_of_flower_is_in_the_table_or_refused() -> None:
    abstract, trees = {"Strategy", "Result", "FedOpt"}, {"FedXgbBagging", "FedXgbCyclic"}
    made = {type(make()).__name__ for make in STRATEGIES.values()}
    assert {name for name in flower.__all__ if name not in abstract | trees} == made
    for name in trees:
        with pytest.raises(ValueError, match="models of trees cannot be quantized or shifted"):
            FedShift(getattr(flower, name)())


@pytest.mark.parametrize("name", STRATEGIES)
def test_with_32_bits_the_result_is_the_bare_strategys_to_the_bit(name: str) -> None:
    results = []
    for wrap in (False, True):
        random.seed(3)
        np.random.seed(3)
        strategy, mods = STRATEGIES[name](), MODS.get(name, [])
        results.append(run(FedShift(strategy), [QuantizeMod(32), *mods]) if wrap else run(strategy, mods))
    assert same(results[0].arrays, results[1].arrays)
    assert results[0].train_metrics_clientapp == results[1].train_metrics_clientapp


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedMedian", "Krum"])
def test_with_32_bits_floating_tensors_beside_integers_are_the_bare_strategys_to_the_bit(name: str) -> None:
    results = []
    for wrap in (False, True):
        random.seed(3)
        strategy, start = STRATEGIES[name](), model(counter=True)
        run_ = run(FedShift(strategy), [QuantizeMod(32)], start=start) if wrap else run(strategy, start=start)
        results.append({n: array for n, array in run_.arrays.items() if n != "two.count"})
        assert not wrap or run_.arrays["two.count"].numpy() == np.int64(4 + 3)
    assert same(*map(ArrayRecord, results))


@pytest.mark.parametrize("name", STRATEGIES)
def test_with_4_bits_the_result_is_the_strategys_on_decoded_uploads_and_then_shifted(name: str) -> None:
    strategy = FedShift(STRATEGIES[name]())
    result = run(strategy, [QuantizeMod(4, codec=NEAREST), *MODS.get(name, [])], rounds=1)
    assert [(x.used, x.lossy, x.share, x.failed) for x in strategy.rounds] == [(6, 6, 1.0, {})]

    random.seed(3)
    np.random.seed(3)
    bare = run(STRATEGIES[name](), [decoded(4), *MODS.get(name, [])], rounds=1)
    expected = shift(to_params(bare.arrays), 0.5)  # the cap
    assert same(result.arrays, to_record(expected))
    assert abs(float(expected["one.weight"].mean())) > 1e-4


def decoded(bits: int) -> Callable[..., Message]:
    """Mod that sends the decoded values of a quantized upload as plain arrays."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        params = to_params(reply.content["arrays"])  # type: ignore[arg-type]
        reply.content["arrays"] = to_record(unpack(pack(Codec(KMeans(bits)), params), like=params))
        return reply

    return mod


@pytest.mark.parametrize(("weighted", "share"), [(True, 22 / 44), (False, 1 / 3)])
def test_the_share_follows_the_weights_of_the_strategy(weighted: bool, share: float) -> None:
    nodes = [{"partition-id": i, **({"bits": 4} if i == 12 else {})} for i in (0, 2, 12)]  # 10, 12 and 22 examples
    strategy = FedShift(FedAvg(min_train_nodes=3) if weighted else Middle(), max_share=1.0)
    result = run(strategy, [QuantizeMod(32, codec=NEAREST)], nodes=nodes, rounds=1)
    assert strategy.rounds[0].share == pytest.approx(share)
    bare = run(FedAvg(min_train_nodes=3) if weighted else Middle(), [by_config()], nodes=nodes, rounds=1)
    assert same(result.arrays, to_record(shift(to_params(bare.arrays), strategy.rounds[0].share)))


def by_config() -> Callable[..., Message]:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        return (
            decoded(int(context.node_config["bits"]))(message, context, call_next)
            if ("bits" in context.node_config)
            else call_next(message, context)
        )

    return mod


class Middle(Strategy):
    """A custom strategy without weights: the mean of all, in the order of the replies."""

    def summary(self) -> None: ...

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        for node in grid.get_node_ids():  # a generator, and no config record at all
            yield Message(RecordDict({"arrays": arrays}), node, "train")

    def aggregate_train(self, server_round: int, replies: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        models = [to_params(reply.content["arrays"]) for reply in replies if reply.has_content()]
        return to_record({name: torch.stack([w[name] for w in models]).mean(0) for name in models[0]}), None

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        return []

    def aggregate_evaluate(self, server_round: int, replies: Any) -> MetricRecord | None:
        return None


def test_the_shift_of_one_round_is_where_fedavgm_starts_the_next_through_nested_strategies_too() -> None:
    for nest in (False, True):
        inner = FedAvgM(**ALL, server_momentum=0.9)
        outer = flower.DifferentialPrivacyServerSideFixedClipping(inner, 0.0, 1e9, 6) if nest else inner
        result = run(FedShift(outer), [QuantizeMod(4, codec=NEAREST)], rounds=2)
        assert inner.current_arrays is not None
        assert same(inner.current_arrays, result.arrays)


def test_integers_stay_integers_and_biases_are_not_shifted() -> None:
    start = model(counter=True)
    strategy = FedShift(FedAvg(**ALL))
    result = run(strategy, [QuantizeMod(4, codec=NEAREST)], start=start, rounds=1)
    after = to_params(result.arrays)
    assert after["two.count"].dtype == torch.int64
    assert int(after["two.count"]) == 5
    bare = to_params(run(FedAvg(**ALL), [decoded(4)], start=start, rounds=1).arrays)
    assert torch.allclose(after["one.bias"], bare["one.bias"], atol=1e-6)


@pytest.mark.parametrize(
    ("node", "message", "config", "bits"),
    [({"bits": 2}, 3, {"bits": 5}, 2), ({}, 3, {"bits": 5}, 3), ({}, None, {"bits": 5}, 5), ({}, None, {}, 6)],
)
def test_bits_come_from_the_node_then_the_message_then_the_run_then_the_mod(
    node: dict[str, int], message: int | None, config: dict[str, int], bits: int
) -> None:
    frames: list[bytes] = []

    def watch(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if message.metadata.message_type == "train":
            frames.append(reply.content.array_records["arrays"][KEY].data)
        return reply

    start = to_record({"w": torch.randn(100, 100)})
    strategy = FedShift(FedAvg(min_train_nodes=2), bits_for=lambda node, number: message)
    run(
        strategy,
        [watch, QuantizeMod(6)],
        start=start,
        nodes=[{"partition-id": i, **node} for i in (0, 1)],
        rounds=1,
        run_config=config,
    )
    expected = [forged(frame, to_params(start), Codec(KMeans(bits)), described=True) for frame in frames]
    assert list(map(len, frames)) == list(map(len, expected))
    assert strategy.rounds[0].bytes_up == sum(map(len, frames))


def test_a_server_chooses_bits_for_each_node_and_round() -> None:
    asked: list[tuple[int, int]] = []

    def bits_for(node: int, number: int) -> int:
        asked.append((node, number))
        return 32 if number == 1 else 2

    strategy = FedShift(FedAvg(**ALL), bits_for=bits_for)
    run(strategy, [QuantizeMod()], rounds=2)
    assert len(set(asked)) == 12
    assert [x.lossy for x in strategy.rounds] == [0, 6]
    with pytest.raises(ValueError, match=r"bits_for\(\d+, 1\): 9 is not allowed; use 1 to 8"):
        run(FedShift(FedAvg(**ALL), bits_for=lambda node, number: 9), [QuantizeMod()])
    with pytest.raises(ValueError, match=r"bits_for\(\d+, 1\) = 'leen': no such uplink; known are exact, paper, lean"):
        run(FedShift(FedAvg(**ALL), bits_for=lambda node, number: "leen"), [QuantizeMod()])


def test_nodes_without_the_mod_take_part_exactly() -> None:
    def sometimes(message: Message, context: Context, call_next: Any) -> Message:
        mod = QuantizeMod(4, codec=NEAREST) if int(context.node_config["partition-id"]) % 2 else None
        return mod(message, context, call_next) if mod else call_next(message, context)

    strategy = FedShift(FedAvg(**ALL))
    run(strategy, [sometimes], rounds=1)
    assert strategy.rounds[0].lossy == 3
    assert strategy.rounds[0].share == pytest.approx((11 + 13 + 15) / (10 + 11 + 12 + 13 + 14 + 15))


@pytest.mark.parametrize("arrival", ["reversed", "shuffled"])
def test_the_result_does_not_depend_on_the_order_in_which_uploads_arrive(arrival: str) -> None:
    class Late(LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
            replies = super().send_and_receive(messages, timeout=timeout)
            random.Random(5).shuffle(replies) if arrival == "shuffled" else replies.reverse()
            return replies

    results = []
    for kind in (LocalGrid, Late):
        random.seed(3)
        grid = kind(client_app([QuantizeMod(4, codec=NEAREST)]), 6, seed=1)
        results.append(FedShift(FedAvg(**ALL)).start(grid, model(), num_rounds=3).arrays)
    assert same(*results)


def test_strategies_that_cannot_be_wrapped_raise_an_error() -> None:
    class SecAggPlus(FedAvg): ...

    with pytest.raises(ValueError, match="with secure aggregation the server cannot decode uploads"):
        FedShift(flower.DifferentialPrivacyServerSideFixedClipping(SecAggPlus(), 0.0, 1.0, 2))
    with pytest.raises(TypeError, match=r"FedShift\(the class FedAvg\): needs an instance"):
        FedShift(FedAvg)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_share must be between 0 and 1"):
        FedShift(FedAvg(), max_share=2)
    with pytest.raises(ValueError, match="patience must be 1 or more"):
        FedShift(FedAvg(), patience=0)


def test_a_bare_strategy_raises_an_error_on_quantized_uploads() -> None:
    grid = LocalGrid(client_app([QuantizeMod(4, codec=NEAREST)]), 6, seed=1)
    FedAvg(**ALL).start(grid, model(), num_rounds=1)
    assert "only a FedShift strategy can read quantized uploads" in grid.errors[0]
    with pytest.raises(TypeError, match=FRAME):
        ArrayRecord({KEY: enclose(b"...")}).to_numpy_ndarrays()
