"""Experiments on nodes that fail, leave, return, lose their memory or lie: only their clients are left out."""

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from torch import Tensor

from fedshift.experiment.settings import Experiment
from fedshift.flower.addon.arrays import enclose
from fedshift.flower.app.apps import client_app
from fedshift.flower.testing import LocalGrid
from tests.federations import forged, same, settings
from tests.flower.experiments import DATA, grid_of, in_process, on_flower, plain

SENT = settings(algorithm={"name": "scaffold", "control": "sent"}, data={"clients": 5}, train={"rounds": 2})
BAD = 3  # the client whose node fails
Edit = Callable[[RecordDict], None]


def without(experiment: Experiment, client: int, at: int) -> tuple[Any, list[Any]]:
    """The run in one process, without the upload of a client in one round."""
    run = in_process(experiment)
    train = run.engine.train

    def leave_out(jobs: Any) -> Any:
        uploads = train(jobs)[0]
        lost = jobs[0].number == at
        return ([x._replace(failure="x", frame=b"") if lost and x.client == client else x for x in uploads],)

    run.engine.train = leave_out  # type: ignore[method-assign]
    return run, [outcome._replace(failed={}) for outcome in plain(list(run))]


def frame(edit: Callable[[bytes], bytes], name: str = str(BAD)) -> Edit:
    def change(content: RecordDict) -> None:
        arrays = dict(content.array_records["frames"])
        arrays[name] = enclose(edit(arrays[name].data))
        content["frames"] = ArrayRecord(arrays)

    return change


def reported(**changes: Any) -> Edit:
    def change(content: RecordDict) -> None:
        report = json.loads(str(content.config_records["config"][str(BAD)])) | changes
        content["config"] = ConfigRecord({str(BAD): json.dumps(report)})

    return change


def put(name: str, record: Any) -> Edit:
    return lambda content: content.__setitem__(name, record)


def sealed(data: bytes) -> bytes:
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def of_run(data: bytes) -> bytes:
    return sealed(data[:6] + struct.pack("<Q", 7) + data[14:])


def of_round(data: bytes) -> bytes:
    return sealed(data[:14] + b"\x07" + data[15:])


def of_client(data: bytes) -> bytes:
    return sealed(data[:15] + b"\x03" + data[16:])  # a frame contains the number plus one


def nan(data: bytes) -> bytes:
    return sealed(data[:-8] + struct.pack("<f", float("nan")) + data[-4:])


def of_another_model(data: bytes) -> bytes:
    return forged(data, {"w": torch.zeros(3)}, described=True)


def of_another_layout(data: bytes) -> bytes:
    return forged(data, {"w": torch.zeros(3)})


def large(data: bytes) -> bytes:
    return forged(data, {f"w{i}": torch.zeros(10_000) for i in range(4)}, described=True)


HOSTILE: dict[str, tuple[Edit, str]] = {
    "truncated": (frame(lambda data: data[:-9]), "is incomplete"),
    "empty": (frame(lambda data: b""), "too few for a frame"),
    "flipped": (frame(lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]), "the checksum does not match"),
    "not a number": (frame(nan), "contains NaN"),
    "of another run": (frame(of_run), "the frame belongs to run 0000000000000007, not "),
    "of another round": (frame(of_round), "the frame belongs to round 7, not 1"),
    "of another client": (frame(of_client), "the frame belongs to client 2, not client 3"),
    "of another version": (frame(lambda data: sealed(data[:4] + b"\x09" + data[5:])), "has version 9"),
    "of another layout": (frame(of_another_layout), "names, shapes or dtypes of their tensors differ"),
    "of another model": (frame(of_another_model), "the frame has 1 tensors"),
    "oversized": (frame(large), "not the model's"),
    "control truncated": (frame(lambda data: data[:50], f"{BAD}/second"), "is incomplete"),
    "control of another run": (frame(of_run, f"{BAD}/second"), "the frame belongs to run 0000000000000007, not "),
    "control of another round": (frame(of_round, f"{BAD}/second"), "the frame belongs to round 7, not 1"),
    "control of another client": (frame(of_client, f"{BAD}/second"), "belongs to client 2, not client 3"),
    "control not a number": (frame(nan, f"{BAD}/second"), "contains NaN"),
    "control of another model": (frame(of_another_model, f"{BAD}/second"), "the frame has 1 tensors"),
    "plain array": (
        put("frames", ArrayRecord({str(BAD): Array(torch.zeros(3).numpy())})),
        "'numpy.ndarray' instead of a frame",
    ),
    "no frames": (put("frames", ArrayRecord({})), "its node's reply lacks '3'"),
    "frames are none": (put("frames", ConfigRecord({"a": 1})), "its node's reply lacks 'frames'"),
    "no report": (put("config", ConfigRecord({})), "its node's reply lacks '3'"),
    "no records": (lambda content: content.clear(), "its node's reply lacks 'config'"),
    "garbage report": (put("config", ConfigRecord({str(BAD): "{"})), "its report is invalid"),
    "number for report": (put("config", ConfigRecord({str(BAD): 5})), "its report is invalid"),
    "deep report": (put("config", ConfigRecord({str(BAD): "[" * 100_000})), "its report is invalid"),
    "drift of NaN": (reported(drift=[[0.1, float("nan")]] * 2), "its report is invalid"),
    "drift too short": (reported(drift=[]), "its report is invalid"),
    "negative time": (reported(seconds=[-1, 0]), "its report is invalid"),
    "endless time": (reported(seconds=[float("inf"), 0]), "its report is invalid"),
    "strange histogram": (reported(histograms=[["x", 0, 1, [0] * 64, [0] * 64]]), "its report is invalid"),
    "text for loss": (reported(loss="low"), "its report is invalid"),
    "endless loss": (reported(loss=10**400), "its report is invalid"),
    "failure": (reported(failure="no\nwill", drift=[]), "no will"),
}


def tampered(experiment: Experiment, edit: Edit, at: int = 1) -> LocalGrid:
    """A grid where the reply of one node is changed in one round."""
    grid = grid_of(experiment, experiment.data.clients)

    def tamper(reply: Message) -> Message:
        bad = reply.metadata.src_node_id == grid.node_of(BAD) and reply.metadata.group_id == str(at)
        if bad:
            edit(reply.content)
        return reply

    grid.tamper = tamper
    return grid


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_does_not_change_the_result(name: str) -> None:
    edit, why = HOSTILE[name]
    reference, expected = without(SENT, BAD, at=1)
    run = on_flower(SENT, tampered(SENT, edit))
    outcomes = list(run)
    assert list(outcomes[0].failed) == [BAD]
    assert why in outcomes[0].failed[BAD]
    assert not outcomes[1].failed
    assert [outcome._replace(failed={}) for outcome in plain(outcomes)] == expected
    assert same(run.params, reference.params)
    assert same(run.state.out.control, reference.state.out.control)


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), 1e300])
def test_an_upload_without_the_loss_that_a_policy_needs_is_left_out(loss: float | None) -> None:
    experiment = SENT.changed(uplink={"policy": "adaquantfl"})
    reference, expected = without(experiment, BAD, at=1)
    run = on_flower(experiment, tampered(experiment, reported(loss=loss)))
    outcomes = list(run)
    assert outcomes[0].failed == {BAD: "its loss is missing, NaN or infinite"}
    assert [outcome._replace(failed={}) for outcome in plain(outcomes)] == expected
    assert same(run.params, reference.params)
    assert same(run.state.policy, reference.state.policy)


def recorded(experiment: Experiment) -> dict[str, dict[str, Array]]:
    """Frames of an honest run by round, then by client."""
    grid, seen = grid_of(experiment, experiment.data.clients), dict[str, dict[str, Array]]()

    def watch(reply: Message) -> Message:
        seen.setdefault(reply.metadata.group_id, {}).update(reply.content.array_records.get("frames", {}))
        return reply

    grid.tamper = watch
    list(on_flower(experiment, grid))
    return seen


REPLAYS: dict[str, tuple[Experiment, int, str, str]] = {  # experiment, round and client of the frame, error
    "run": (SENT.changed(seed=1), 2, str(BAD), "the frame belongs to run "),
    "round": (SENT, 1, str(BAD), "the frame belongs to round 1, not 2"),
    "client": (SENT, 2, "1", f"the frame belongs to client 1, not client {BAD}"),
}


@pytest.mark.parametrize("second", ["", "/second"], ids=["first", "second"])
@pytest.mark.parametrize("other", REPLAYS)
def test_a_replayed_frame_of_another_run_round_or_client_is_refused(other: str, second: str) -> None:
    """Each is a valid frame of the same model."""
    experiment, number, client, why = REPLAYS[other]
    replayed = recorded(experiment)[str(number)][client + second].data
    reference, expected = without(SENT, BAD, at=2)
    run = on_flower(SENT, tampered(SENT, frame(lambda _: replayed, f"{BAD}{second}"), at=2))
    outcomes = list(run)
    assert [list(outcome.failed) for outcome in outcomes] == [[], [BAD]]
    assert outcomes[1].failed[BAD].startswith(why)
    assert [outcome._replace(failed={}) for outcome in plain(outcomes)] == expected
    assert same(run.params, reference.params)
    assert same(run.state.out.control, reference.state.out.control)


def test_controls_that_add_up_to_infinity_are_refused() -> None:
    grid, control = grid_of(SENT, 5), in_process(SENT).state.out.control
    huge = {name: torch.full(x.shape, 3e38) for name, x in control.items()}

    def tamper(reply: Message) -> Message:
        if reply.metadata.group_id == "1":
            frames = dict(reply.content.array_records["frames"])
            seconds = {name: enclose(forged(x.data, huge)) for name, x in frames.items() if "/" in name}
            reply.content["frames"] = ArrayRecord(frames | seconds)
        return reply

    grid.tamper = tamper
    outcome = next(on_flower(SENT, grid))
    assert outcome.arrived == 1
    assert len(outcome.failed) == 4
    reason = "the server's state computed from the upload is NaN or infinite"
    assert all(reason in why for why in outcome.failed.values())


ANSWERS: dict[str, Callable[[Message], Message | None]] = {
    "its node answered with error 2: some reason": lambda reply: Message(Error(2, "some\nreason"), reply_to=reply),
    "its node did not answer within 0.2 s": lambda reply: None,
}


@pytest.mark.parametrize("why", ANSWERS)
def test_errors_and_missing_replies_fail_the_client(why: str) -> None:
    grid = grid_of(SENT, 5)

    def tamper(reply: Message) -> Message | None:
        bad = reply.metadata.src_node_id == grid.node_of(BAD) and reply.metadata.group_id == "1"
        return ANSWERS[why](reply) if bad else reply

    grid.tamper = tamper
    reference, expected = without(SENT, BAD, at=1)
    run = on_flower(SENT, grid, timeout=0.2)
    outcomes = list(run)
    assert outcomes[0].failed == {BAD: why}
    assert [outcome._replace(failed={}) for outcome in plain(outcomes)] == expected
    assert same(run.params, reference.params)


def test_an_exception_of_a_client_fails_this_client_and_not_its_node() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(targets) == 4:  # in the last batch of an epoch
            raise KeyError("not today")
        return F.cross_entropy(outputs, targets)

    experiment = settings(data={"clients": 5, "partition": "dirichlet", "least": 2}, train={"rounds": 1})
    sizes = in_process(experiment).fed.partition.sizes
    raising = [client for client in range(5) if int(sizes[client]) % 8 == 4]
    assert raising
    assert len(raising) < 5
    grid = LocalGrid(client_app(experiment, data=DATA, loss=loss), 1)
    (outcome,) = on_flower(experiment, grid)
    assert list(outcome.failed) == raising
    assert all("KeyError: 'not today'" in why and "test_faults.py" in why for why in outcome.failed.values())


SCAFFOLD = settings(
    algorithm={"name": "scaffold"},
    uplink={"bits": "32+4", "feedback": True},
    data={"clients": 5},
    train={"rounds": 6, "selection": "stratified"},
)
