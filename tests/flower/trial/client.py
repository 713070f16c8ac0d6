"""Clients that move the model in different directions, wait on request, and lie if they are hostile.

Their uploads depend only on partition-id, round and model.
"""

import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedshift import Codec, Params, Range, Step, header
from fedshift.codecs.exact import EXACT
from fedshift.flower import QuantizeMod, introduce
from fedshift.flower.addon.arrays import KEY, enclose, to_params, to_record
from fedshift.wire.writer import Writer

PATIENCE = 900.0  # seconds until a waiting client continues by itself


def quantize(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    config: dict[str, Any] = dict(context.run_config)
    state_dir = config["state-dir"] or None
    if config["steps"]:
        codec = Codec(Step(rate=0.8), Range(), min_axes=1)
        mod = QuantizeMod(codec=codec, updates=True, error_feedback=True, state_dir=state_dir)
    else:
        mod = QuantizeMod(4, error_feedback=config["error-feedback"], state_dir=state_dir)
    return mod(message, context, call_next)


def lie(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Replace the upload by the lie of this round; `lies` in the config of a hostile node names one per round."""
    reply = call_next(message, context)
    lies = str(context.node_config.get("lies", "")).split()
    if context.run_config["hostile"] and lies and message.metadata.message_type == "train":
        number = number_of(message)
        frame = reply.content["arrays"][KEY].data  # type: ignore[union-attr]
        arrays = message.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        reply.content["arrays"] = lied(lies[number - 1], frame, to_params(arrays))
    return reply


def lied(lie: str, frame: bytes, sent: Params) -> ArrayRecord:
    if lie == "nan":
        return to_record(sent | {"one.bias": torch.full_like(sent["one.bias"], torch.nan)})
    huge = {name: torch.full_like(x, 3e38) for name, x in sent.items()}
    changed = {
        "huge": lambda: exact(huge, frame),
        "truncated": lambda: frame[:-100],
        "oversized": lambda: frame + bytes(50_000_000),
        "unversioned": lambda: b"GARB" + frame[4:],
        "wrong-shape": lambda: exact(sent | {"one.weight": sent["one.weight"].T}, frame),
    }
    return ArrayRecord({KEY: enclose(changed[lie]())})


def exact(params: Params, frame: bytes) -> bytes:
    """Frame of these tensors with the header of the honest one."""
    return Writer(EXACT, params, described=True).pack(params, header(frame))


app = introduce(ClientApp(mods=[lie, quantize]))


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    partition, number = int(context.node_config["partition-id"]), number_of(message)
    wait(context, partition, number)
    generator = torch.Generator().manual_seed(100 * number + partition)
    moved = {name: w + 0.1 * (torch.randn(w.shape, generator=generator) - w) for name, w in to_params(arrays).items()}
    content = {"arrays": to_record(moved), "metrics": MetricRecord({"num-examples": 10 + partition})}
    return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]


def wait(context: Context, partition: int, number: int) -> None:
    """In the round `wait-in` of the run's config, nodes with `waits` create a file and wait for the file `go`."""
    out, deadline = Path(str(context.run_config["out"])), time.monotonic() + PATIENCE
    if number == context.run_config["wait-in"] and context.node_config.get("waits"):
        (out / f"training-{partition}").touch()
        while not (out / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


def number_of(message: Message) -> int:
    return int(message.content["config"]["server-round"])  # type: ignore[arg-type]
