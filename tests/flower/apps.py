"""A small Flower app: a model of two layers, and clients that move it in different directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result, Strategy

from fedshift import Params
from fedshift.flower.addon.arrays import to_params, to_record
from fedshift.flower.testing.grid import LocalGrid

Train = Callable[[Params, int, Context], tuple[Params, dict[str, Any]]]


def model(*, counter: bool = False) -> ArrayRecord:
    """Weights of both signs with a nonzero mean, biases, and optionally an integer."""
    generator = torch.Generator().manual_seed(7)
    params = {
        "one.weight": torch.randn(8, 5, generator=generator) + 0.3,
        "one.bias": torch.randn(8, generator=generator),
        "two.weight": torch.randn(3, 8, generator=generator),
    }
    return to_record(params | ({"two.count": torch.tensor(4)} if counter else {}))


def moved(start: Params, client: int, context: Context) -> tuple[Params, dict[str, Any]]:
    """Move a tenth of the way to a random model of the client; return it with number of examples and loss."""
    generator = torch.Generator().manual_seed(client)
    trained = {
        name: w + 0.1 * (torch.randn(w.shape, generator=generator) - w) if w.is_floating_point() else w + 1
        for name, w in start.items()
    }
    return trained, {"num-examples": 10 + client, "train_loss": 1.0 + client}


def client_app(mods: Sequence[Any] = (), train: Train = moved) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train_(message: Message, context: Context) -> Message:
        start = to_params(message.content["arrays"])  # type: ignore[arg-type]
        params, metrics = train(start, int(context.node_config["partition-id"]), context)
        content = {"arrays": to_record(params), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 2.0})}), reply_to=message)

    return app


def run(
    strategy: Strategy,
    mods: Sequence[Any] = (),
    *,
    nodes: int | Sequence[Mapping[str, Any]] = 6,
    rounds: int = 3,
    train: Train = moved,
    start: ArrayRecord | None = None,
    **options: Any,
) -> Result:
    """Train on a grid in this process, with the same nodes in every call."""
    grid = LocalGrid(client_app(mods, train), nodes, seed=1, **options)
    return strategy.start(grid, start or model(), num_rounds=rounds)


def same(first: ArrayRecord, other: ArrayRecord) -> bool:
    """True if two records are bit-identical."""
    return {name: array.data for name, array in first.items()} == {name: array.data for name, array in other.items()}
