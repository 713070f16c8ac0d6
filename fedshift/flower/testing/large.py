"""Flower app for `fedshift bench large`: a large model through QuantizeMod, and the memory of the client.

A client does not train; it adds noise to the model. Memory is measured from the end of this training, when the process
holds the received model, the trained model and the memory of earlier rounds, to the end of the mod.
"""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from logging import getLogger

import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedshift.codecs import Codec, Range, Step
from fedshift.core.memory import fresh_memory, reset_peak, resident
from fedshift.flower.addon.mod import QuantizeMod
from fedshift.flower.addon.strategy import FedShift
from fedshift.flower.testing.grid import LocalGrid
from fedshift.wire.measure import transformer, weights

ROUNDS = 2  # in the second, the client has memory of the first
TIMEOUT = 1800.0  # seconds
FOUND = "memory of the clients:"  # in the log of a run
LOG = getLogger("flwr.fedshift")
Mod = Callable[[Message, Context, ClientAppCallable], Message]


def measured(mod: Mod) -> Mod:
    """Add metrics to the reply, in bytes: increase of resident memory at the peak, frame, and memory kept."""

    def around(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        fresh_memory()  # so that memory freed by the training is returned and allocations are counted
        torch.set_num_threads(1)
        before = earlier = 0

        def train(message: Message, context: Context) -> Message:
            nonlocal before, earlier
            reply = call_next(message, context)
            gc.collect()
            before, earlier = reset_peak(), held(context.state)
            return reply

        reply = mod(message, context, train)
        peak = resident("VmHWM") - before
        metrics = reply.content.metric_records["metrics"]
        metrics.update({"peak": peak, "frame": held(reply.content), "kept": held(context.state) - earlier})
        return reply

    return around


def held(content: RecordDict) -> int:
    """Bytes of all arrays."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def client_app(mod: Mod) -> ClientApp:
    app = ClientApp(mods=[measured(mod)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        """Add noise that differs between nodes, one tensor at a time."""
        g = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
        arrays = ArrayRecord()
        for name, array in message.content.array_records["arrays"].items():
            w = torch.from_numpy(array.numpy().copy())
            arrays[name] = Array((w + 1e-3 * torch.randn(w.shape, generator=g)).numpy())
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    return app


def largest(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
    """Largest value of each metric among the clients."""
    metrics = [next(iter(reply.metric_records.values())) for reply in replies]
    return MetricRecord({name: max(float(each[name]) for each in metrics) for name in metrics[0]})  # type: ignore[arg-type]


def rounds(grid: Grid, layers: int, width: int, nodes: int, downlink: int | None = None) -> list[dict[str, float]]:
    """Train; return the metrics of each round, in sizes of the model."""
    params = weights(of=transformer(layers, width))
    size, first = sum(4 * w.numel() for w in params.values()), ArrayRecord(params)
    del params
    inner = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes, train_metrics_aggr_fn=largest
    )
    strategy = FedShift(inner, pack=downlink is not None, downlink=downlink)
    result = strategy.start(grid, first, ROUNDS, TIMEOUT)
    if [(stats.used, len(stats.reset)) for stats in strategy.rounds] != [(nodes, 0)] * ROUNDS:
        raise RuntimeError(f"uploads or memories are missing: {strategy.rounds}")
    found = result.train_metrics_clientapp
    return [{name: float(found[i][name]) / size for name in ("peak", "frame", "kept")} for i in sorted(found)]  # type: ignore[arg-type]


def memory(feedback: int, layers: int, width: int) -> tuple[float, ...]:
    """Peak, frame and kept memory of each round, with weights, or with updates and error feedback.

    It runs in this process, which should be a separate one, on a grid with one node.
    """
    torch.set_num_threads(1)
    mod = QuantizeMod(4, updates=bool(feedback), error_feedback=bool(feedback))
    with tempfile.TemporaryDirectory() as home:
        os.environ["FLWR_HOME"] = home  # for large memories
        rounds(LocalGrid(client_app(mod), 1), 1, 16, 1)  # loads libraries
        found = rounds(LocalGrid(client_app(mod), 1), layers, width, 1)
    return tuple(value for each in found for value in each.values())


client = client_app(QuantizeMod(codec=Codec(Step(rate=0.8), Range(), min_axes=1), updates=True, error_feedback=True))
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    layers, width, nodes = (int(context.run_config[name]) for name in ("layers", "width", "nodes"))
    torch.set_num_threads(1)
    LOG.info("%s %s", FOUND, json.dumps(rounds(grid, layers, width, nodes, downlink=8)))
