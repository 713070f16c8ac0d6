"""The smallest app that runs on Flower: every SuperNode adds its number to three weights."""

from pathlib import Path

PROJECT = """
[project]
name = "tiny"
version = "0.1.0"
dependencies = []

[tool.flwr.app]
publisher = "fedshift"

[tool.flwr.app.components]
serverapp = "tiny.server:app"
clientapp = "tiny.client:app"

[tool.flwr.app.config]
num-server-rounds = 1
nodes = 2
"""

SERVER = """
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    nodes = int(context.run_config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    start = ArrayRecord([np.zeros(3, np.float32)])
    result = strategy.start(grid, start, num_rounds=int(context.run_config["num-server-rounds"]))
    print("learnt", result.arrays.to_numpy_ndarrays()[0].tolist(), "of", len(list(grid.get_node_ids())))
"""

CLIENT = """
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content["arrays"].to_numpy_ndarrays()
    number = 1.0 + int(context.node_config["partition-id"])
    content = {"arrays": ArrayRecord([w + number for w in weights]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
"""


def write_app(folder: Path) -> Path:
    """Write the app into a folder for `flwr run`; return the folder."""
    package = folder / "tiny"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, content in {"__init__": "", "server": SERVER, "client": CLIENT}.items():
        (package / f"{name}.py").write_text(content)
    return folder
