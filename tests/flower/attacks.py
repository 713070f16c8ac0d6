"""Replies of a hostile node, and training with one."""

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedshift.flower import QuantizeMod
from fedshift.flower.addon.arrays import KEY, enclose, to_params
from fedshift.flower.testing import LocalGrid
from tests.federations import forged
from tests.flower.apps import client_app, model

BAD = 3  # partition of the hostile node
Edit = Callable[[RecordDict], None]


def frame(edit: Callable[[bytes], bytes]) -> Edit:
    def change(content: RecordDict) -> None:
        data = content["arrays"][KEY].data  # type: ignore[union-attr]
        content["arrays"] = ArrayRecord({KEY: enclose(edit(data))})

    return change


def arrays(edit: Callable[[dict[str, Array]], dict[str, Array]]) -> Edit:
    """Plain arrays instead of a frame."""

    def change(content: RecordDict) -> None:
        content["arrays"] = ArrayRecord(edit(dict(model())))

    return change


def params(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **header: Any) -> Edit:
    """A valid frame with other content, or with other fields in its header."""
    return frame(lambda data: forged(data, edit(to_params(model())), described=True, **header))


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
    """An array with an arbitrary header; NumPy's reader fails on these in different ways."""
    return Array("float32", (8,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)


def bias(array: Array) -> Edit:
    return arrays(lambda w: w | {"one.bias": array})


HEADERS = (
    b"-" * 9000 + b"1",
    b"(" * 9000,
    b"1+" * 3000 + b"1",
    b"{'descr': (), 'fortran_order': False, 'shape': (8,)}",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,)}",
)
ATTACKS: dict[str, tuple[Edit, str]] = {
    "truncated": (frame(lambda data: data[:-100]), "is incomplete"),
    "empty": (frame(lambda data: b""), "0 bytes are too few"),
    "flipped": (frame(lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:]), "checksum does not match"),
    "another version": (frame(lambda data: data[:4] + b"\x01" + data[5:]), "version 1"),
    "no version": (frame(lambda data: b"GARB" + data[4:]), "begins with"),
    "oversized": (frame(lambda data: data + bytes(10_000_000)), "checksum does not match"),
    "another run": (params(lambda w: w, run=7), "belongs to run 0000000000000007, not "),
    "another round": (params(lambda w: w, base=7), "belongs to round 7, not 1"),
    "another node": (params(lambda w: w, client=7), "belongs to client 7, not client "),
    "no node": (params(lambda w: w, client=None), "belongs to no client, not client "),
    "another layout": (frame(lambda data: forged(data, {"more": torch.zeros(1)})), "does not contain its layout"),
    "no layout": (frame(lambda data: forged(data, to_params(model()))), "does not contain its layout"),
    "wrong shape": (params(lambda w: w | {"one.weight": torch.zeros(5, 8)}), "shape"),
    "wrong dtype": (params(lambda w: w | {"one.bias": torch.zeros(8, dtype=torch.int64)}), "dtype"),
    "one tensor more": (params(lambda w: w | {"more": torch.zeros(1)}), r"unexpected \['more'\]"),
    "another tensor": (params(lambda w: {"more": w["one.bias"]}), r"unexpected \['more'\]"),
    "plain, NaN": (arrays(lambda w: w | {"one.bias": raw([np.nan] * 8)}), "one.bias: contains NaN or infinity"),
    "plain, infinite": (arrays(lambda w: w | {"one.bias": raw([np.inf] * 8)}), "NaN or infinity"),
    "plain, wrong shape": (arrays(lambda w: w | {"one.bias": raw(np.zeros(9))}), r"\(9,\) instead of float32 \(8,\)"),
    "plain, wrong dtype": (arrays(lambda w: w | {"one.bias": Array(np.zeros(8, np.int32))}), "int32"),
    "plain, one more": (arrays(lambda w: w | {"more": raw([1.0])}), r"unexpected \['more'\]"),
    "plain, garbage": (
        arrays(lambda w: w | {"one.bias": Array("float32", (8,), "numpy.ndarray", b"garbage")}),
        "one.bias",
    ),
    **{f"plain, header {i}": (bias(headed(text)), "bytes are not a NumPy array") for i, text in enumerate(HEADERS)},
    "plain, truncated": (
        arrays(lambda w: w | {"one.bias": Array("float32", (8,), "numpy.ndarray", w["one.bias"].data[:-3])}),
        "bytes are not a NumPy array of type float32",
    ),
    "plain, pickled": (
        arrays(lambda w: w | {"one.bias": Array("object", (8,), "numpy.ndarray", pickled())}),
        "object",
    ),
    "plain, other type": (arrays(lambda w: w | {"one.bias": Array("float32", (8,), "magic", b"")}), "magic"),
    "no arrays": (drop("arrays"), "contains 0 records of type ArrayRecord"),
    "two arrays": (put("more", ArrayRecord()), "contains 2 records of type ArrayRecord"),
    "no metrics": (drop("metrics"), "contains 0 records of type MetricRecord"),
    "no weight": (metrics({"train_loss": 1.0}), "no 'num-examples'"),
    "a weight of NaN": (metrics({"num-examples": float("nan"), "train_loss": 1.0}), "num-examples=nan"),
    "a weight below zero": (metrics({"num-examples": -5, "train_loss": 1.0}), "num-examples=-5"),
    "a list of weights": (metrics({"num-examples": [1, 2], "train_loss": 1.0}), "must be a single number"),
    "other metrics": (metrics({"num-examples": 3, "loss": 1.0}), "differ from those of most nodes"),
    "a list of losses": (metrics({"num-examples": 3, "train_loss": [1.0, 2.0]}), "differ from those of most nodes"),
}


def pickled() -> bytes:
    from io import BytesIO

    file = BytesIO()
    np.save(file, np.array([{}] * 8, dtype=object), allow_pickle=True)
    return file.getvalue()


class Hostile:
    """Attack on the replies of one node."""

    def __init__(self, attack: Callable[[Message], Message | None], kind: str = "train") -> None:
        self.attack, self.kind = attack, kind
        self.node = 0

    def __call__(self, reply: Message) -> Message | None:
        hostile = reply.metadata.src_node_id == self.node and reply.metadata.message_type == self.kind
        return self.attack(reply) if hostile and reply.has_content() else reply


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
    """Sort nodes by partition, so that two grids add up uploads in the same order."""
    numbers = {context.node_config["partition-id"]: node for node, context in grid.contexts.items()}
    grid.contexts = {numbers[i]: grid.contexts[numbers[i]] for i in sorted(numbers)}


class InOrder(FedAvg):
    """Every node, in the order of the grid."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        content = RecordDict({"arrays": arrays, "config": config})
        return self._construct_messages(content, list(grid.get_node_ids()), "train")
