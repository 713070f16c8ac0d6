"""The Flower apps that `fedshift bench flower` measures: a round in this process, and uploads in a deployment."""

import time
from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedshift.flower.mod import QuantizeMod
from fedshift.flower.strategy import FedShift
from fedshift.flower.testing.grid import LocalGrid
from fedshift.types import Params

SHAPE, TIMEOUT = (1000, 1300), 300.0  # of the layer that is uploaded; seconds
APP = """
from fedshift.flower import bench

client = bench.client
server = bench.server
"""


def everybody(nodes: int) -> FedShift:
    return FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes))


def on_grid(start: Params, train: Callable[[Params, int], Params], bits: int, clients: int) -> Callable[[], Params]:
    """A round of clients that train so, on the grid in this process."""
    app = ClientApp(mods=[QuantizeMod(bits)])

    @app.train()
    def train_(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        return reply_with(train(dict(sent), int(context.node_config["partition-id"])), message)

    grid, first = LocalGrid(app, clients), ArrayRecord(start)
    return lambda: dict(everybody(clients).start(grid, first, num_rounds=1).arrays.to_torch_state_dict())


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    rounds, nodes = int(context.run_config["rounds"]), int(context.run_config["nodes"])
    strategy = everybody(nodes)
    strategy.start(grid, ArrayRecord({"weight": torch.zeros(SHAPE)}), rounds, TIMEOUT)
    if [told.used for told in strategy.rounds] != [nodes] * rounds:
        raise RuntimeError(f"uploads are missing: {strategy.rounds}")


def quantize(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """With `bits = 0` in the run's config there is no mod."""
    return QuantizeMod()(message, context, call_next) if context.run_config["bits"] else call_next(message, context)


client = ClientApp(mods=[quantize])


@client.train()
def add_noise(message: Message, context: Context) -> Message:
    """Nobody trains, but what is sent is new in every round: bytes the server has had already do not travel again."""
    noise = torch.Generator().manual_seed(time.time_ns())
    sent = message.content.array_records["arrays"].to_torch_state_dict()
    return reply_with({name: w + 0.05 * torch.randn(w.shape, generator=noise) for name, w in sent.items()}, message)


def reply_with(params: Params, message: Message) -> Message:
    content = {"arrays": ArrayRecord(params), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]
