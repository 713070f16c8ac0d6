"""A model that is sent as one array: clients see the arrays that were packed, and training is the same to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, message_size_mod
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given
from hypothesis import strategies as st

from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold, ScaffoldMod
from fedshift.flower.addon.arrays import CONTROL, KEY, PACKED, enclose, packed, unpacked
from fedshift.flower.addon.mod import WRONG_ORDER
from fedshift.flower.addon.outcome import NO_MOD
from fedshift.flower.testing import LocalGrid
from tests.flower.apps import client_app, model, run, same
from tests.flower.test_saved import CASES, CrashError, train
from tests.flower.test_scaffold import moved_a_known_way

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 6}


def fields(record: ArrayRecord) -> list[tuple[str, str, tuple[int, ...], str, bytes]]:
    """All there is to know of a record, in its order."""
    return [(name, x.dtype, x.shape, x.stype, x.data) for name, x in record.items()]


ARRAYS = st.builds(
    Array,
    st.sampled_from(["float32", "float16", "int64", "bool", "uint8", "of its own"]),
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    st.sampled_from(["numpy.ndarray", "safetensors", "ü"]),
    st.binary(max_size=50),
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=8), ARRAYS, max_size=6))
def test_what_was_packed_is_unpacked_byte_for_byte_and_in_its_order(arrays: dict[str, Array]) -> None:
    record = ArrayRecord(arrays)
    assert fields(unpacked(packed(record))) == fields(record)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {KEY: Array(np.ones(3))},
        {KEY: enclose(b"FEDS")},
        {"weight": Array(np.asfortranarray(np.ones((2, 3)))), "scale": Array(np.array(2.0))},
    ],
)
def test_a_record_that_is_not_packed_is_left_as_it_is(arrays: dict[str, Array]) -> None:
    record = ArrayRecord(arrays)
    assert unpacked(record) is record


def truncated(reply: Message) -> Message:
    """Remove a hundred bytes from an upload."""
    record = reply.content.array_records["arrays"]
    reply.content["arrays"] = ArrayRecord({KEY: enclose(record[KEY].data[:-100])})
    return reply


@pytest.mark.parametrize("name", [*CASES, "scaffold"])
def test_training_is_the_same_to_the_bit_whether_the_model_is_packed_or_not(name: str, tmp_path: Path) -> None:
    """With a bad upload in every round, and a server that is stopped after two rounds and resumed."""
    make, mods = CASES.get(name, (lambda: Scaffold(FedAvg(**ALL)), [ScaffoldMod(4, error_feedback=True)]))
    start = model(counter=name != "QFedAvg")  # which cannot average integers
    private = name.startswith(("client", "server"))  # its wrapper skips a round with a bad upload

    def grid(seen: list[Any]) -> LocalGrid:
        def look(message: Message, context: Context, call_next: Any) -> Message:
            if message.metadata.message_type == "train":
                seen.append(fields(message.content.array_records["arrays"]))
            return call_next(message, context)  # type: ignore[no-any-return]

        made = LocalGrid(client_app([*mods, look], moved_a_known_way), 6, seed=1)
        liar = made.node_of(partition=3)
        made.tamper = lambda reply: truncated(reply) if reply.metadata.src_node_id == liar and not private else reply
        return made

    plainly, packedly = list[Any](), list[Any]()
    plain = FedShift(make())
    expected = train(plain, 3, grid(plainly), start=start)
    nodes = grid(packedly)
    with pytest.raises(CrashError):
        train(FedShift(make(), checkpoint=tmp_path, pack=True), 3, nodes, crash=2, start=start)
    resumed = FedShift(make(), checkpoint=tmp_path, pack=True)
    assert same(expected, train(resumed, 3, nodes, start=start))
    assert packedly == plainly
    assert resumed.rounds == plain.rounds[2:]
    assert resumed.rounds[0].used == (6 if private else 5)


def on_the_way(strategy: FedShift, mod: QuantizeMod) -> list[Message]:
    """Messages of the server in one round."""

    class Watched(LocalGrid):
        def push_messages(self, messages: Any) -> list[str]:
            sent.extend(messages)
            return super().push_messages(messages)

    sent: list[Message] = []
    strategy.start(Watched(client_app([mod], moved_a_known_way), 6, seed=1), model(), num_rounds=1)
    assert strategy.rounds[0].used == 6
    return sent


def objects(message: Message) -> int:
    """Objects of a message's content, each of which Flower transfers separately."""
    return len(get_all_nested_objects(message.content))


def test_a_packed_model_is_one_array_that_all_messages_share() -> None:
    """Of a model of three tensors: content, config, record, and two objects for each array."""
    assert {objects(message) for message in on_the_way(FedShift(FedAvg(**ALL)), QuantizeMod("lean"))} == {9}
    sent = on_the_way(FedShift(FedAvg(**ALL), pack=True), QuantizeMod("lean"))
    assert {objects(message) for message in sent} == {5}
    assert len({id(message.content["arrays"]) for message in sent}) == 1
    assert sent[0].content.array_records["arrays"][KEY].stype == PACKED


def test_a_control_is_packed_too() -> None:
    sent = on_the_way(FedShift(Scaffold(FedAvg(**ALL)), pack=True), ScaffoldMod("lean"))
    assert {objects(message) for message in sent} == {8}
    assert {name for name, record in sent[0].content.array_records.items() if list(record) == [KEY]} == {
        "arrays",
        CONTROL,
    }


def test_evaluation_is_not_packed_and_needs_no_mod() -> None:
    inner, app = client_app(), ClientApp()
    app.train(mods=[QuantizeMod(4)])(inner)
    seen = list[list[str]]()

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        seen.append(list(message.content.array_records["arrays"]))
        return inner(message, context)

    strategy = FedShift(FedAvg(min_train_nodes=6, min_evaluate_nodes=6), pack=True)
    result = strategy.start(LocalGrid(app, 6, seed=1), model(), num_rounds=1)
    assert seen == [list(model())] * 6
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(2.0)


def test_without_the_mod_a_packed_model_ends_the_run_with_an_error() -> None:
    with pytest.raises(NoUploadsError) as problem:
        run(FedShift(FedAvg(**ALL), pack=True))
    assert str(problem.value) == f"round 1: {NO_MOD}"


def test_a_node_without_the_mod_is_left_out_of_a_packed_training() -> None:
    def mostly(message: Message, context: Context, call_next: Any) -> Message:
        plain = context.node_config["partition-id"] == 2
        return call_next(message, context) if plain else QuantizeMod(4)(message, context, call_next)

    strategy = FedShift(FedAvg(**ALL), pack=True)
    run(strategy, [mostly], rounds=2)
    assert [x.used for x in strategy.rounds] == [5, 5]
    assert all(f"'{PACKED}'" in why for x in strategy.rounds for why in x.failed.values())


def test_mods_before_quantization_look_at_a_packed_model_or_are_found_in_the_wrong_order() -> None:
    strategy = FedShift(FedAvg(**ALL), pack=True)
    run(strategy, [message_size_mod, QuantizeMod(4)], rounds=1)
    assert strategy.rounds[0].used == 6
    with pytest.raises(NoUploadsError) as problem:
        run(FedShift(FedAvg(**ALL), pack=True), [LocalDpMod(1.0, 1.0, 1.0, 0.1), QuantizeMod(4)])
    assert str(problem.value) == f"round 1: {WRONG_ORDER}"
