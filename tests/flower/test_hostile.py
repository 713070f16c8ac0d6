"""Uploads that are lost, broken or made up: each is left out and named, and the others count as if it had not come."""

import random
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedshift import Codec, Identity, KMeans, pack
from fedshift.flower import FedShift, NoUploadsError, QuantizeMod
from fedshift.flower.arrays import KEY, enclose, to_params, to_record
from fedshift.flower.testing import LocalGrid
from tests.flower.apps import client_app, model, run, same

BAD = 3  # the partition of the node that sends something else
Edit = Callable[[RecordDict], None]


def frame(edit: Callable[[bytes], bytes]) -> Edit:
    def change(content: RecordDict) -> None:
        data = content["arrays"][KEY].data  # type: ignore[union-attr]
        content["arrays"] = ArrayRecord({KEY: enclose(edit(data))})

    return change


def arrays(edit: Callable[[dict[str, Array]], dict[str, Array]]) -> Edit:
    """Plain arrays in place of a frame."""

    def change(content: RecordDict) -> None:
        content["arrays"] = ArrayRecord(edit(dict(model())))

    return change


def params(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **header: Any) -> Edit:
    """A frame that is right in itself, of something else."""

    def change(content: RecordDict) -> None:
        packed = pack(Codec(Identity()), edit(to_params(model())), **({"base": 1} | header))
        content["arrays"] = ArrayRecord({KEY: enclose(packed)})

    return change


def metrics(values: dict[str, Any]) -> Edit:
    def change(content: RecordDict) -> None:
        content["metrics"] = MetricRecord(values)

    return change


def put(name: str, record: Any) -> Edit:
    def change(content: RecordDict) -> None:
        content[name] = record

    return change


def drop(name: str) -> Edit:
    def change(content: RecordDict) -> None:
        del content[name]

    return change


def raw(x: Any) -> Array:
    return Array(np.asarray(x, np.float32))


def headed(text: bytes) -> Array:
    """An array whose header is anything: numpy's own reader fails on these in as many ways."""
    return Array("float32", (8,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)


def one(array: Array) -> Edit:
    return arrays(lambda w: w | {"one.bias": array})


HEADERS = (
    b"-" * 9000 + b"1",
    b"(" * 9000,
    b"1+" * 3000 + b"1",
    b"{'descr': (), 'fortran_order': False, 'shape': (8,)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,)}",
)
ATTACKS: dict[str, tuple[Edit, str]] = {
    "truncated": (frame(lambda data: data[:-100]), "bytes, but"),
    "empty": (frame(lambda data: b""), "0 bytes are too few"),
    "flipped": (frame(lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:]), "checksum does not match"),
    "another version": (frame(lambda data: data[:4] + b"\x02\x00" + data[6:]), "version 2"),
    "no version": (frame(lambda data: b"GARB" + data[4:]), "begins with"),
    "oversized": (frame(lambda data: data + bytes(10_000_000)), "bytes, but"),
    "another round": (params(lambda w: w, base=7), "of round 7, not 1"),
    "wrong shape": (params(lambda w: w | {"one.weight": torch.zeros(5, 8)}), "shape"),
    "missing tensor": (params(lambda w: {n: x for n, x in w.items() if n != "one.bias"}), "2 tensors, the model 3"),
    "wrong dtype": (params(lambda w: w | {"one.bias": torch.zeros(8, dtype=torch.float64)}), "dtype"),
    "plain, NaN": (arrays(lambda w: w | {"one.bias": raw([np.nan] * 8)}), "one.bias: holds NaN or infinity"),
    "plain, infinite": (arrays(lambda w: w | {"one.bias": raw([np.inf] * 8)}), "NaN or infinity"),
    "plain, wrong shape": (arrays(lambda w: w | {"one.bias": raw(np.zeros(9))}), r"\(9,\) where float32 \(8,\)"),
    "plain, wrong dtype": (arrays(lambda w: w | {"one.bias": Array(np.zeros(8, np.int32))}), "int32"),
    "plain, missing": (arrays(lambda w: {n: x for n, x in w.items() if n != "one.bias"}), r"missing \['one.bias'\]"),
    "plain, one more": (arrays(lambda w: w | {"more": raw([1.0])}), r"unexpected \['more'\]"),
    "plain, garbage": (
        arrays(lambda w: w | {"one.bias": Array("float32", (8,), "numpy.ndarray", b"garbage")}),
        "one.bias",
    ),
    **{f"plain, header {i}": (one(headed(text)), "such an array") for i, text in enumerate(HEADERS)},
    "plain, truncated": (
        arrays(lambda w: w | {"one.bias": Array("float32", (8,), "numpy.ndarray", w["one.bias"].data[:-3])}),
        "bytes are not those of such an array",
    ),
    "plain, pickled": (
        arrays(lambda w: w | {"one.bias": Array("object", (8,), "numpy.ndarray", pickled())}),
        "object",
    ),
    "plain, other type": (arrays(lambda w: w | {"one.bias": Array("float32", (8,), "magic", b"")}), "magic"),
    "no arrays": (drop("arrays"), "holds 0 records of type ArrayRecord"),
    "two arrays": (put("more", ArrayRecord()), "holds 2 records of type ArrayRecord"),
    "no metrics": (drop("metrics"), "holds 0 records of type MetricRecord"),
    "no weight": (metrics({"train_loss": 1.0}), "no 'num-examples'"),
    "a weight of NaN": (metrics({"num-examples": float("nan"), "train_loss": 1.0}), "num-examples=nan"),
    "a weight below zero": (metrics({"num-examples": -5, "train_loss": 1.0}), "num-examples=-5"),
    "a list of weights": (metrics({"num-examples": [1, 2], "train_loss": 1.0}), "must be one number"),
    "other metrics": (metrics({"num-examples": 3, "loss": 1.0}), "not those that most nodes sent"),
    "a list of losses": (metrics({"num-examples": 3, "train_loss": [1.0, 2.0]}), "not those that most nodes sent"),
}


def pickled() -> bytes:
    from io import BytesIO

    file = BytesIO()
    np.save(file, np.array([{}] * 8, dtype=object), allow_pickle=True)
    return file.getvalue()


class Hostile:
    """What happens on the way from one node to the server."""

    def __init__(self, attack: Callable[[Message], Message | None], kind: str = "train") -> None:
        self.attack, self.kind = attack, kind
        self.node = 0

    def __call__(self, reply: Message) -> Message | None:
        mine = reply.metadata.src_node_id == self.node and reply.metadata.message_type == self.kind
        return self.attack(reply) if mine and reply.has_content() else reply


def edited(edit: Edit) -> Callable[[Message], Message]:
    def attack(reply: Message) -> Message:
        edit(reply.content)
        return reply

    return attack


def survivors(strategy: Any, hostile: Hostile | None, rounds: int = 2) -> ArrayRecord:
    """The model after some rounds, with a hostile node, or without it."""
    random.seed(3)
    nodes = [{"partition-id": i} for i in range(6) if hostile or i != BAD]
    grid = LocalGrid(client_app([QuantizeMod(4)]), nodes, seed=1, tamper=hostile)
    if hostile:
        hostile.node = grid.node_of(BAD)
    in_order(grid)
    model_after: ArrayRecord = strategy.start(grid, model(), num_rounds=rounds).arrays
    return model_after


def in_order(grid: LocalGrid) -> None:
    """So that the sums of two grids are made in the same order."""
    numbers = {context.node_config["partition-id"]: node for node, context in grid.contexts.items()}
    grid.contexts = {numbers[i]: grid.contexts[numbers[i]] for i in sorted(numbers)}


class InOrder(FedAvg):
    """Every node, in the order of the grid."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        content = RecordDict({"arrays": arrays, "config": config})
        return self._construct_messages(content, list(grid.get_node_ids()), "train")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_upload_is_left_out_and_named_and_the_others_make_the_model(attack: str, caplog: Any) -> None:
    edit, why = ATTACKS[attack]
    strategy, hostile = FedShift(InOrder(fraction_evaluate=0.0)), Hostile(edited(edit))
    after = survivors(strategy, hostile, rounds=1)
    assert list(strategy.rounds[0].failed) == [hostile.node]
    assert re.search(why, strategy.rounds[0].failed[hostile.node]), strategy.rounds[0].failed
    assert f"the upload of node {hostile.node} is left out" in caplog.text
    assert same(after, survivors(FedShift(InOrder(fraction_evaluate=0.0)), None, rounds=1))


def test_an_upload_that_is_lost_or_an_error_is_left_out_too() -> None:
    alone = survivors(FedShift(InOrder(fraction_evaluate=0.0)), None)
    lost = FedShift(InOrder(fraction_evaluate=0.0))
    assert same(survivors(lost, Hostile(lambda reply: None)), alone)
    assert [(x.used, list(x.failed.values())) for x in lost.rounds] == [(5, ["it did not reply"])] * 2

    def refuse(reply: Message) -> Message:
        error = Message(RecordDict(), 1, "train")
        error.metadata.__dict__.update(reply.metadata.__dict__)
        return Message(metadata=reply.metadata, error=Error(2, "it broke"))  # type: ignore[call-overload,no-any-return]

    broken = FedShift(InOrder(fraction_evaluate=0.0))
    assert same(survivors(broken, Hostile(refuse)), alone)
    assert list(broken.rounds[0].failed.values()) == ["it broke"]


@pytest.mark.filterwarnings("ignore:overflow")
def test_finite_uploads_whose_mean_is_not_finite_leave_the_model_and_the_strategy_as_they_were() -> None:
    def huge(start: Any, client: int, context: Any) -> Any:
        big = 3e38 if strategy.rounds == [] else 1.0
        return {name: torch.full_like(w, big) for name, w in start.items()}, {"num-examples": 1}

    inner = flower.FedAvgM(fraction_evaluate=0.0, min_train_nodes=6, server_momentum=0.9, server_learning_rate=5.0)
    strategy = FedShift(inner)
    result = run(strategy, [QuantizeMod(32)], train=huge, rounds=2)
    assert [x.used for x in strategy.rounds] == [0, 6]
    assert np.isfinite(result.arrays["one.weight"].numpy()).all()
    assert inner.momentum_vector is not None
    assert np.isfinite(inner.momentum_vector[0]).all()


def test_a_hostile_evaluation_does_not_end_the_run() -> None:
    def other(reply: Message) -> Message:
        reply.content["metrics"] = MetricRecord({"something": 1.0})
        return reply

    random.seed(3)
    hostile = Hostile(other, "evaluate")
    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    result = FedShift(FedAvg(min_train_nodes=6, min_evaluate_nodes=6)).start(grid, model(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1] == {"loss": 2.0}


def test_a_run_without_usable_uploads_ends_with_the_reason() -> None:
    def diverged(start: Any, client: int, context: Any) -> Any:
        return {name: w * torch.nan for name, w in start.items()}, {"num-examples": 1}

    strategy = FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=6), patience=2)
    with pytest.raises(
        NoUploadsError, match=r"round 2: no usable upload in 2 rounds in a row; .*holds NaN or infinity"
    ):
        run(strategy, [QuantizeMod(4)], train=diverged)
    assert [len(x.failed) for x in strategy.rounds] == [6, 6]


@pytest.mark.parametrize("mod", [fixedclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 0.1)])
def test_mods_in_the_wrong_order_are_found_in_the_first_round(mod: Any) -> None:
    inner = flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.01, 1.0, 6)
    with pytest.raises(NoUploadsError, match="round 1: the clients' mods are in the wrong order; QuantizeMod must be"):
        run(FedShift(inner), [mod, QuantizeMod(4)])


@pytest.mark.parametrize("attack", [edited(ATTACKS["truncated"][0]), lambda reply: None])
def test_privacy_is_not_weakened_by_an_upload_that_is_bad_or_lost(attack: Any) -> None:
    """Noise is made for so many clients: with fewer, the wrapper of Flower skips the round, and so must we."""
    inner = flower.DifferentialPrivacyServerSideFixedClipping(InOrder(fraction_evaluate=0.0), 0.01, 1.0, 6)
    strategy = FedShift(inner)
    after = survivors(strategy, Hostile(attack), rounds=2)
    assert same(after, model())
    assert [(x.used, len(x.failed)) for x in strategy.rounds] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("loss", [float("nan"), -1.0])
def test_a_loss_that_is_a_weight_must_be_a_number(loss: float) -> None:
    strategy = FedShift(flower.QFedAvg(0.1, fraction_evaluate=0.0, min_train_nodes=6))
    random.seed(3)
    hostile = Hostile(edited(metrics({"num-examples": 13, "train_loss": loss})))
    grid = LocalGrid(client_app([QuantizeMod(32)]), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    result = strategy.start(grid, model(), num_rounds=1)
    assert f"train_loss={loss}" in strategy.rounds[0].failed[hostile.node]
    assert np.isfinite(result.arrays["one.weight"].numpy()).all()


def test_a_frame_of_a_bigger_codebook_or_other_codec_is_just_another_upload() -> None:
    """Clients choose how they encode; the frame says how, and the server reads what it says."""

    def change(content: RecordDict) -> None:
        packed = pack(Codec(KMeans(2)), to_params(model()), base=1)
        content["arrays"] = ArrayRecord({KEY: enclose(packed)})

    strategy = FedShift(InOrder(fraction_evaluate=0.0))
    survivors(strategy, Hostile(edited(change)), rounds=1)
    assert strategy.rounds[0].failed == {}
    assert to_record(to_params(model())) == model()


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_finite_upload_that_would_poison_the_strategys_state_for_good_costs_one_round() -> None:
    """1e30 is finite, its square is not: v_t of FedAdam would stay infinite, and the model would never move again."""

    def once(start: Any, client: int, context: Any) -> Any:
        w = {name: x + (1e30 if client == 0 and not strategy.rounds else 0.1) for name, x in start.items()}
        return w, {"num-examples": 1}

    inner = flower.FedAdam(fraction_evaluate=0.0, min_train_nodes=6)
    strategy = FedShift(inner)
    result = run(strategy, [QuantizeMod(32)], train=once, rounds=3)
    assert [x.used for x in strategy.rounds] == [0, 6, 6]
    assert not same(result.arrays, model())


@pytest.mark.filterwarnings("ignore:overflow")
def test_state_that_is_changed_in_place_is_taken_back_too() -> None:
    class Summing(InOrder):
        def __init__(self) -> None:
            super().__init__(fraction_evaluate=0.0)
            self.total: dict[str, Any] = {}

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            for name, array in arrays.items():
                self.total[name] = self.total.get(name, 0) + array.numpy() * (
                    np.float32(1e30) if server_round == 1 else 1
                )
            return ArrayRecord({name: Array(np.asarray(x)) for name, x in self.total.items()}), metrics

    def large(start: Any, client: int, context: Any) -> Any:
        return {name: x * 0 + (1e10 if not strategy.rounds else 1) for name, x in start.items()}, {"num-examples": 1}

    strategy = FedShift(Summing())
    result = run(strategy, [QuantizeMod(32)], train=large, rounds=2)
    assert [x.used for x in strategy.rounds] == [0, 6]
    assert np.allclose(result.arrays["one.bias"].numpy(), 1)


def test_an_update_that_becomes_infinite_on_its_base_is_left_out_alone() -> None:
    start = to_record({"w": torch.full((2, 2), 100.0, dtype=torch.float16)})

    def beyond(start: Any, client: int, context: Any) -> Any:
        return {"w": start["w"] + 1}, {"num-examples": 1}

    def huge(content: RecordDict) -> None:
        packed = pack(Codec(Identity()), {"w": torch.full((2, 2), 65504.0, dtype=torch.float16)}, base=1, update=True)
        content["arrays"] = ArrayRecord({KEY: enclose(packed)})

    strategy, hostile = FedShift(InOrder(fraction_evaluate=0.0)), Hostile(edited(huge))
    grid = LocalGrid(client_app([QuantizeMod(32, updates=True)], beyond), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    strategy.start(grid, start, num_rounds=1)
    assert strategy.rounds[0].used == 5
    assert "became infinite" in strategy.rounds[0].failed[hostile.node]


def test_a_reply_to_no_message_is_not_passed_on() -> None:
    def elsewhere(reply: Message) -> Message:
        reply.metadata.__dict__.update(_src_node_id=12345, _dst_node_id=12345, _reply_to_message_id="")
        return reply

    strategy = FedShift(InOrder(fraction_evaluate=0.0))
    survivors(strategy, Hostile(elsewhere), rounds=1)
    assert strategy.rounds[0].failed[12345] == "it answers no message of this round"
    assert strategy.rounds[0].used == 5


def test_a_long_reason_is_cut() -> None:
    def wordy(start: Any, client: int, context: Any) -> Any:
        raise ValueError("x" * 100_000)

    with pytest.raises(NoUploadsError) as problem:
        run(FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=6), patience=1), [QuantizeMod(4)], train=wordy)
    assert len(str(problem.value)) < 700
