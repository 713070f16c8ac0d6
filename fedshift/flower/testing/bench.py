"""Flower apps for `fedshift bench flower`: a round in this process, and uploads in a deployment."""

from collections.abc import Callable
from logging import getLogger

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedshift.codecs import Codec
from fedshift.core.types import Params
from fedshift.flower.addon.mod import QuantizeMod
from fedshift.flower.addon.strategy import FedShift
from fedshift.flower.testing.grid import LocalGrid

CLIENTS, STEPS, BATCH = 10, 10, 32
TIMEOUT = 300.0  # seconds
PLAIN = "none"  # `uplink` in the run's config: without the mod
ARRAYS = "bytes of arrays per node and round:"  # in the log of a run


class Work:
    """Ten clients that train an MLP of 1.3 million weights with ten SGD steps on batches of 32."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(CLIENTS, STEPS, BATCH, 1000, generator=g)
        self.y = torch.randint(0, 10, (CLIENTS, STEPS, BATCH), generator=g)
        fc1, fc2, fc3 = nn.Linear(1000, 1000), nn.Linear(1000, 300), nn.Linear(300, 10)
        self.model = nn.Sequential(fc1, nn.ReLU(), fc2, nn.ReLU(), fc3)
        self.start: Params = {
            name: torch.randn(w.shape, generator=g) * w.shape[-1] ** -0.5 for name, w in self.model.state_dict().items()
        }

    def train(self, params: Params, client: int) -> Params:
        self.model.load_state_dict(params)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for x, y in zip(self.x[client], self.y[client], strict=True):
            optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {name: w.detach().clone() for name, w in self.model.state_dict().items()}


def all_nodes(nodes: int, pack: bool = False, downlink: int = 32) -> FedShift:
    """FedAvg on all nodes in every round, without evaluation."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    return FedShift(strategy, pack=pack, downlink=downlink)


def on_grid(start: Params, train: Callable[[Params, int], Params], codec: Codec, clients: int) -> Callable[[], Params]:
    """Return a function that runs one round on a grid in this process."""
    app = ClientApp(mods=[QuantizeMod(codec=codec)])

    @app.train()
    def train_(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"].to_torch_state_dict()
        return reply_with(train(dict(sent), int(context.node_config["partition-id"])), message)

    grid, first = LocalGrid(app, clients), ArrayRecord(start)
    return lambda: dict(all_nodes(clients).start(grid, first, num_rounds=1).arrays.to_torch_state_dict())


LOG = getLogger("flwr.fedshift")
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    rounds, nodes = int(context.run_config["rounds"]), int(context.run_config["nodes"])
    plain, downlink = context.run_config["uplink"] == PLAIN, int(context.run_config["downlink"])
    strategy = all_nodes(nodes, pack=not plain, downlink=downlink)
    strategy.start(grid, ArrayRecord(Work().start), rounds, TIMEOUT)
    if [stats.used for stats in strategy.rounds] != [nodes] * rounds:
        raise RuntimeError(f"uploads are missing: {strategy.rounds}")
    LOG.info("%s %d", ARRAYS, sum(stats.bytes_up for stats in strategy.rounds) / rounds / nodes)


def quantize(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Mod that applies QuantizeMod unless `uplink` in the run's config is "none"."""
    plain = context.run_config["uplink"] == PLAIN
    return call_next(message, context) if plain else QuantizeMod()(message, context, call_next)


client = ClientApp(mods=[quantize])


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train, so that weights differ in every round and node: Flower does not transfer the same bytes twice."""
    sent = message.content.array_records["arrays"].to_torch_state_dict()
    return reply_with(Work().train(dict(sent), int(context.node_config["partition-id"])), message)


def reply_with(params: Params, message: Message) -> Message:
    content = {"arrays": ArrayRecord(params), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]
