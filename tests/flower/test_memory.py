"""Memory of nodes, in Flower's state and on disk, also when it is not the one that the server expects."""

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st

from fedshift import Codec, Identity, KMeans, Params, Range, Step, Stochastic, Uplink, Zstd, header
from fedshift.core.files import RunError
from fedshift.flower import FedShift, QuantizeMod, Seeded, introduce
from fedshift.flower.addon.arrays import to_params, to_record
from fedshift.flower.addon.memory import NodeMemory, Recalled, RoundInfo
from fedshift.flower.testing import LocalGrid
from fedshift.rounds.uplink import named, quantized, send
from fedshift.wire.writer import Writer
from tests.flower.apps import client_app, model, moved, run, same

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 6}
STEPS = Codec(Step(rate=0.8), Range(), min_axes=1)  # biases included
FEEDBACK: dict[str, Callable[..., QuantizeMod]] = {
    "2 bits": partial(QuantizeMod, 2, error_feedback=True),
    "steps": partial(QuantizeMod, codec=STEPS, updates=True, error_feedback=True),
}


def context(node: int = 5) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


def memory_of(number: int) -> Params:
    return {"w": torch.full((2,), float(number))}


@pytest.fixture(params=["state", "disk", "default folder"])
def memory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeMemory:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    if request.param == "default folder":
        monkeypatch.setattr("fedshift.flower.addon.memory.IN_STATE", -1)
    return NodeMemory(context(), tmp_path / "states" if request.param == "disk" else None)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Flower's folder on a node whose state has space for 16 bytes of memories."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr("fedshift.flower.addon.memory.IN_STATE", 16)
    return tmp_path / "fedshift"


def recalled(memory: NodeMemory, accepted: int, saved: int, session: str = "a") -> tuple[float | None, bool]:
    found, lost = memory.recall("mod", RoundInfo(99, session, accepted, saved))
    return float(found["w"][0]) if found else None, lost


def test_a_node_that_never_trained_has_nothing_and_has_lost_nothing(memory: NodeMemory) -> None:
    assert memory.recall("mod", RoundInfo(1, "a", 0, 0)) == Recalled({}, False)


def test_the_memory_of_the_accepted_upload_is_used_not_the_newest(memory: NodeMemory) -> None:
    memory.keep("mod", "a", 3, memory_of(3))
    memory.keep("mod", "a", 5, memory_of(5))
    assert recalled(memory, accepted=3, saved=3) == (3.0, False)  # the upload of round 5 never arrived
    assert recalled(memory, accepted=5, saved=5) == (None, True)  # and its memory was removed


def test_a_server_may_resume_from_a_checkpoint(memory: NodeMemory) -> None:
    for number in (2, 4, 6):
        memory.keep("mod", "a", number, memory_of(number))
        assert recalled(memory, accepted=number, saved=3) == (number, False)
    assert recalled(memory, accepted=2, saved=3) == (2.0, False)  # resumed: memories of later rounds are removed
    assert recalled(memory, accepted=4, saved=4) == (None, True)


def test_memories_that_are_not_needed_any_more_are_removed(memory: NodeMemory) -> None:
    for number in (2, 4, 6):
        memory.keep("mod", "a", number, memory_of(number))
    recalled(memory, accepted=6, saved=5)
    assert memory._rounds("mod", "a") == [4, 6]
    recalled(memory, accepted=6, saved=6)
    assert memory._rounds("mod", "a") == [6]


def test_memories_of_two_trainings_are_separate(memory: NodeMemory) -> None:
    memory.keep("mod", "a", 3, memory_of(3))
    assert recalled(memory, accepted=3, saved=3, session="b") == (None, True)
    assert recalled(memory, accepted=3, saved=3) == (3.0, False)


def test_damage_on_disk_is_a_loss_and_not_a_wrong_memory(tmp_path: Path) -> None:
    memory = NodeMemory(context(), tmp_path)
    memory.keep("mod", "a", 3, memory_of(3))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert recalled(memory, accepted=3, saved=3) == (None, True)


def test_nodes_share_a_folder(tmp_path: Path) -> None:
    first, other = NodeMemory(context(1), tmp_path), NodeMemory(context(2), tmp_path)
    first.keep("mod", "a", 3, memory_of(1))
    other.keep("mod", "a", 3, memory_of(2))
    assert recalled(first, 3, 3) == (1.0, False)
    assert recalled(other, 3, 3) == (2.0, False)


def test_a_memory_is_in_flowers_state_if_two_of_its_size_fit(home: Path) -> None:
    """Two weights are 8 bytes, and two such memories 16; three weights do not fit."""
    node = context()
    NodeMemory(node).keep("mod", "a", 1, {"w": torch.ones(2)})
    assert list(node.state) == ["fedshift/mod/a/1"]
    assert not home.exists()
    NodeMemory(node).keep("mod", "a", 2, {"w": torch.ones(3)})
    assert list(node.state) == ["fedshift/mod/a/1"]
    assert [path.name.split(".")[:2] for path in home.iterdir()] == [["fedshift-5-mod-a", "2"]]
    assert recalled(NodeMemory(node), accepted=2, saved=2) == (1.0, False)
    assert not node.state


def test_memories_of_other_clients_count(home: Path) -> None:
    node = context()
    NodeMemory(node).keep("client-0", "a", 1, memory_of(1))
    NodeMemory(node).keep("client-1", "a", 1, memory_of(1))
    assert list(node.state) == ["fedshift/client-0/a/1"]
    assert [path.name.split(".")[0] for path in home.iterdir()] == ["fedshift-5-client-1-a"]


def test_a_memory_that_became_small_returns_to_the_state(home: Path) -> None:
    """An upload without error feedback keeps an empty memory."""
    node = context()
    NodeMemory(node).keep("mod", "a", 1, {"w": torch.ones(3)})
    NodeMemory(node).keep("mod", "a", 2, {})
    assert NodeMemory(node).recall("mod", RoundInfo(3, "a", 2, 2)) == Recalled({}, False)
    assert (list(node.state), list(home.iterdir())) == (["fedshift/mod/a/2"], [])


def test_the_default_folder_is_named_once_per_training(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    for session, number in ("a", 1), ("a", 2), ("b", 1):
        NodeMemory(context()).keep("mod", session, number, {"w": torch.ones(500_000)})
    expected = (
        f"a memory of 2 MB is too large for Flower's state of this node and is kept in files under {home}; "
        "set state_dir to choose the folder"
    )
    assert [record.getMessage() for record in caplog.records] == [expected] * 2


def test_memories_of_earlier_trainings_are_removed_from_the_default_folder_after_a_month(home: Path) -> None:
    for days, session in (31, "old"), (29, "recent"):
        NodeMemory(context(1)).keep("mod", session, 1, {"w": torch.ones(3)})
        for path in home.glob(f"*-{session}.*"):
            os.utime(path, (time.time() - 86_400 * days,) * 2)
    NodeMemory(context(2)).keep("mod", "new", 1, {"w": torch.ones(3)})
    sessions = {path.name.split(".")[0] for path in home.iterdir()}
    assert sessions == {"fedshift-1-mod-recent", "fedshift-2-mod-new"}


def test_nodes_with_the_same_partition_id_do_not_share_memories_in_the_default_folder(home: Path) -> None:
    nodes = [Context(1, node, {"partition-id": 0}, RecordDict(), {}) for node in (1, 2)]
    for number, node in enumerate(nodes):
        NodeMemory(node).keep("mod", "a", 3, {"w": torch.full((3,), float(number))})
    assert [recalled(NodeMemory(node), 3, 3) for node in nodes] == [(0.0, False), (1.0, False)]


def test_a_default_folder_that_cannot_be_written_to_is_an_error_that_names_state_dir(home: Path) -> None:
    home.touch()
    with pytest.raises(RunError, match=f"state_dir {home}: cannot be written to: File exists"):
        NodeMemory(context()).keep("mod", "a", 1, {"w": torch.ones(3)})


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), max_size=12))
def test_server_and_node_always_agree_or_the_loss_is_reported(events: list[tuple[bool, bool, int]]) -> None:
    """A node whose uploads may be lost, and a server that sometimes saves a checkpoint and may resume from it."""
    memory, accepted, saved = NodeMemory(context()), 0, (0, 0)  # (round, what was accepted then)
    number = 0
    for arrives, saves, back in events:
        if back == 3:
            number, accepted = saved
        number += 1
        found, lost = recalled(memory, accepted, saved[0])
        assert not lost
        assert found == (float(accepted) if accepted else None)
        memory.keep("mod", "a", number, memory_of(number))
        accepted = number if arrives else accepted
        saved = (number, accepted) if saves else saved


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("codec", [Codec(KMeans(2)), STEPS])
def test_error_feedback_is_that_of_the_uplink(codec: Codec, disk: bool, tmp_path: Path) -> None:
    """Rounds of one client, compared with `send`."""
    seen: list[bytes] = []

    def watch(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        seen.append(reply.content["arrays"]["fedshift"].data)  # type: ignore[union-attr]
        return reply

    mod = QuantizeMod(codec=codec, error_feedback=True, updates=True, state_dir=tmp_path if disk else None)
    uplink = Uplink(codec, update=True, feedback=True)
    strategy = FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1), max_share=0.0)
    run(strategy, [watch, mod], nodes=1, rounds=3)
    start, error = to_params(model()), Params()
    for number in (1, 2, 3):
        w, _ = moved(start, 0, None)  # type: ignore[arg-type]
        frame = seen[number - 1]
        found, writer = header(frame), Writer(quantized(uplink, w), w, described=True)
        assert (found.update, found.base, found.examples, found.reset, found.lossy) == (True, number, 10, False, True)
        sent = send(uplink, w, start, error, list(w), found, None, writer)
        assert sent.frame == frame
        start, error = sent.decoded, sent.error


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_restarted_node_reports_a_lost_memory_unless_it_is_on_disk(name: str, tmp_path: Path, caplog: Any) -> None:
    for state_dir, resets in ((None, 1), (tmp_path, 0)):
        strategy = FedShift(FedAvg(**ALL))
        grid = LocalGrid(client_app([FEEDBACK[name](state_dir=state_dir)]), 6, seed=1)
        strategy.start(grid, model(), num_rounds=1)
        node = grid.node_of(2)
        grid.contexts[node].state = RecordDict()  # as a SuperNode that was restarted under its own key
        messages = strategy.configure_train(2, model(), ConfigRecord(), grid)
        strategy.aggregate_train(2, grid.send_and_receive(messages))
        assert strategy.rounds[1].reset == [node] * resets
        assert (f"node {node} lost its memory" in caplog.text) == bool(resets)
        caplog.clear()


def losing(strategy: FedShift) -> Any:
    """The first two uploads never arrive."""
    return lambda reply: None if strategy.skipped < 2 and not any(strategy.accepted.values()) else reply


@pytest.mark.parametrize("name", FEEDBACK)
def test_the_memory_of_a_refused_upload_is_not_used(name: str) -> None:
    """The error of a refused upload must not be fed back, because the upload was not used."""
    alone: list[Any] = []
    for lose in (False, True):
        random.seed(3)
        strategy = FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1), patience=9)
        grid = LocalGrid(client_app([FEEDBACK[name]()]), 1, seed=1, tamper=losing(strategy) if lose else None)
        result = strategy.start(grid, model(), num_rounds=3 if lose else 1)
        alone.append(result.arrays)
    assert same(*alone)


def test_codecs_that_round_at_random_draw_anew_in_every_round_and_alike_in_every_run() -> None:
    codec = Codec(Stochastic(4), Zstd())
    results = []
    for _ in range(2):
        random.seed(3)
        results.append(run(FedShift(FedAvg(**ALL)), [QuantizeMod(codec=codec)], rounds=2).arrays)
    assert same(*results)
    assert QuantizeMod(codec=codec).uplink().codec == codec
    assert QuantizeMod(codec=codec).uplink(7).codec == Codec(Stochastic(7), Zstd())


def test_statistics_of_a_normalisation_travel_exactly() -> None:
    start = to_record({"bn.weight": torch.randn(50), "bn.running_var": 1 + torch.rand(50)})
    codec = Codec(KMeans(1), min_axes=1)
    result = run(FedShift(FedAvg(**ALL)), [QuantizeMod(codec=codec)], start=start, rounds=1)
    bare = run(FedAvg(**ALL), start=start, rounds=1)
    error = {name: (to_params(result.arrays)[name] - to_params(bare.arrays)[name]).abs().max() for name in start}
    assert error["bn.running_var"] < 1e-6 < error["bn.weight"]


@pytest.mark.parametrize("bits", [0, 9, 33, True, 4.0])
def test_invalid_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match="is not allowed; use 1 to 8"):
        QuantizeMod(bits)
    strategy = FedShift(FedAvg(**ALL), patience=1)
    if isinstance(bits, int) and not isinstance(bits, bool):
        with pytest.raises(Exception, match=f"bits in the run's config: {bits!r} is not allowed; use 1 to 8"):
            run(strategy, [QuantizeMod(4)], run_config={"bits": bits}, rounds=1)


def test_a_named_uplink_sets_everything() -> None:
    mod = QuantizeMod("lean")
    assert mod.uplink() == named("lean")
    assert mod.uplink(32).codec.quantizer == Identity()
    assert not mod.remembers(mod.uplink())
    with pytest.raises(ValueError, match=r"QuantizeMod\('leen'\): no such uplink; known are exact, paper"):
        QuantizeMod("leen")
    with pytest.raises(
        ValueError, match=r"QuantizeMod\('lean'\): a named uplink sets codec, updates and error_feedback"
    ):
        QuantizeMod("lean", updates=True)
    with pytest.raises(ValueError, match="cannot have 4 bits"):
        mod.uplink(4)
    with pytest.raises(
        ValueError, match=r"QuantizeMod\(8\): RandomStep\(.*\) cannot have 8 bits; allowed are 16, 32, or"
    ):
        QuantizeMod(8, codec=named("lean").codec)  # 8 is the width of its codes before the coder, not a setting


@pytest.mark.parametrize(
    ("mod", "choices"),
    [
        (QuantizeMod(error_feedback=True), (32, 4, 32, 4)),
        (QuantizeMod(error_feedback=True), (32, 32, 32, 32)),
        (FEEDBACK["steps"](), ("exact", None, "exact", None)),
        (FEEDBACK["steps"](), (16, None, 32, "extreme")),
        (QuantizeMod("lean"), (16, None, 32, "extreme")),
        (QuantizeMod(4), (None, "lean", 8, "lean")),
    ],
)
def test_a_change_of_uplink_does_not_lose_the_memory(mod: QuantizeMod, choices: Any) -> None:
    strategy = FedShift(FedAvg(**ALL), bits_for=by_round(*choices))
    run(strategy, [mod], rounds=4)
    assert [(x.used, x.reset) for x in strategy.rounds] == [(6, [])] * 4


@pytest.mark.parametrize(
    ("mod", "choices"),
    [
        (QuantizeMod(updates=True, error_feedback=True), (2, 32)),
        (FEEDBACK["steps"](), (None, 32)),
        (FEEDBACK["steps"](), (None, "exact", 32)),  # without feedback in between, the error is kept
        (FEEDBACK["steps"](), (None, "paper", 32)),
    ],
)
def test_an_exact_upload_compensates_for_earlier_errors(mod: QuantizeMod, choices: Any) -> None:
    """Coarse updates followed by one of 32 bits have the same sum as exact updates."""
    ends = []
    for way in (["exact"] * len(choices), choices):
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        strategy = FedShift(inner, max_share=0.0, bits_for=by_round(*way))
        ends.append(to_params(run(strategy, [mod], nodes=1, rounds=len(choices), train=one_step).arrays))
    off = max(float((w - ends[1][name]).abs().max()) for name, w in ends[0].items())
    assert (off < 1e-5) == ("paper" not in choices)  # which has no error feedback


def by_round(*choices: int | str | None) -> Callable[[int, int], int | str | None]:
    return lambda node, number: choices[number - 1]


def test_errors_of_tensors_are_kept_until_they_are_sent_again() -> None:
    """A client that trains its layers in turn: the error of a layer is fed back when this layer is sent again."""

    def train(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
        after, metrics = one_step(start, client, context)
        return {trained[-1]: after[trained[-1]]}, metrics

    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy = FedShift(inner, max_share=0.0, bits_for=by_round(None, None, 32, 32))
    grid = LocalGrid(client_app([FEEDBACK["steps"]()], train), 1, seed=1)
    arrays, trained = model(), list[str]()
    for number, layer in enumerate(("one.weight", "two.weight", "one.weight", "two.weight"), 1):
        trained.append(layer)
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        after, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        assert after is not None
        arrays = after
    start, step = to_params(model()), one_step(to_params(model()), 0, None)[0]  # type: ignore[arg-type]
    for name in ("one.weight", "two.weight"):
        assert torch.allclose(to_params(arrays)[name], start[name] + 2 * (step[name] - start[name]), atol=1e-5)


def one_step(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
    """An update that does not depend on the start."""
    trained, metrics = moved(to_params(model()), client, context)
    return {name: start[name] + trained[name] - x for name, x in to_params(model()).items()}, metrics


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_node_with_a_new_id_reports_a_lost_memory(name: str, tmp_path: Path) -> None:
    """Without a key, and in simulations, ids are new: the server does not know the node, but the node has its files."""
    strategy = FedShift(FedAvg(**ALL))
    grid = LocalGrid(client_app([FEEDBACK[name](state_dir=tmp_path)]), 6, seed=1)
    strategy.start(grid, model(), num_rounds=1)
    new = grid.back(grid.node_of(2), anew=True)
    strategy.aggregate_train(2, grid.send_and_receive(strategy.configure_train(2, model(), ConfigRecord(), grid)))
    assert strategy.rounds[1].reset == [new]


@pytest.mark.parametrize("name", FEEDBACK)
def test_nodes_that_report_their_partition_keep_their_memory_under_new_ids(name: str, tmp_path: Path) -> None:
    """A stopped simulation resumes, with new ids, to the same bytes as an uninterrupted one."""

    def make(folder: str) -> tuple[FedShift, Any]:
        inner = Seeded(FedAvg(fraction_evaluate=0.0, fraction_train=0.5, min_train_nodes=3), seed=4)
        mod = FEEDBACK[name](state_dir=tmp_path / folder / "nodes")
        return FedShift(inner, checkpoint=tmp_path / folder), introduce(client_app([mod]))

    whole, app = make("whole")
    expected = whole.start(LocalGrid(app, 6), model(), num_rounds=6).arrays
    first, app = make("parts")
    first.start(LocalGrid(app, 6), model(), num_rounds=3)
    second, app = make("parts")
    assert same(second.start(LocalGrid(app, 6), model(), num_rounds=6).arrays, expected)
    assert [x.reset for x in second.rounds] == [[]] * 3


def test_a_node_that_reports_the_partition_of_another_does_not_affect_its_memory(caplog: Any) -> None:
    """Node 3's upload of round 2 is lost, while that of node 5, which also reports partition 3, is used."""

    def tamper(reply: Message) -> Message | None:
        node, kind = reply.metadata.src_node_id, reply.metadata.message_type
        if node == grid.node_of(5) and kind.startswith("query"):
            reply.content["about"] = ConfigRecord({"partition-id": 3})
        return None if node == grid.node_of(3) and kind == "train" and len(strategy.rounds) == 1 else reply

    grid = LocalGrid(introduce(client_app([QuantizeMod(2, error_feedback=True)])), 6, seed=1, tamper=tamper)
    strategy, accepted = FedShift(Seeded(FedAvg(**ALL), seed=1)), []
    for number in (1, 2, 3):
        messages = list(strategy.configure_train(number, model(), ConfigRecord(), grid))
        infos = {x.metadata.dst_node_id: RoundInfo.read(x.content.config_records["config"]) for x in messages}
        accepted.append([infos[grid.node_of(i)].accepted for i in (3, 5)])
        strategy.aggregate_train(number, grid.send_and_receive(messages))
    assert accepted == [[-1, -1], [1, 1], [1, 2]]
    assert [x.reset for x in strategy.rounds] == [[]] * 3
    assert "have the same partition-id 3; they are identified by node id instead" in caplog.text
