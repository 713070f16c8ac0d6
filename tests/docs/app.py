"""The app that the README's five lines stand in: ten nodes in this process, each of which moves the model a little."""

from typing import Any

import flwr.clientapp
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam

from fedshift.flower.testing import LocalGrid

__all__ = ["ClientApp", "FedAdam", "arrays", "grid"]

grid = LocalGrid(flwr.clientapp.ClientApp(), 10)
arrays = ArrayRecord({"weight": torch.zeros(20, 30)})


def train(message: Message, context: Context) -> Message:
    weight = message.content["arrays"].to_torch_state_dict()["weight"]  # type: ignore[union-attr]
    trained, metrics = ArrayRecord({"weight": weight + torch.randn(20, 30)}), MetricRecord({"num-examples": 60})
    return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)


def ClientApp(**options: Any) -> flwr.clientapp.ClientApp:  # noqa: N802
    """An app with a training function, on the nodes of the grid."""
    grid.app = flwr.clientapp.ClientApp(**options)
    grid.app.train()(train)
    return grid.app
