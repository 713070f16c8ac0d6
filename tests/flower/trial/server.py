"""A server that pauses on request, and writes its result."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import save

from fedshift.flower import FedShift, Seeded
from fedshift.flower.addon.arrays import to_params, to_record

PATIENCE = 900.0  # seconds until a waiting server continues by itself
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    run(grid, context.run_config)


def run(grid: Grid, config: Mapping[str, Any]) -> None:
    """Train; write the model and the statistics of each round into the folder `out`."""
    out = Path(config["out"])
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=config["nodes"], min_available_nodes=config["nodes"])
    checkpoint = out / "checkpoint" if config["checkpoint"] else None
    strategy = FedShift(Seeded(inner), checkpoint=checkpoint, pack=config["pack"])

    def pause(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        deadline = time.monotonic() + PATIENCE
        if number == config["pause-after"]:
            (out / "paused").touch()
            while not (out / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        return None

    rounds, timeout = config["num-server-rounds"], config["timeout"]
    result = strategy.start(grid, model(), num_rounds=rounds, timeout=timeout, evaluate_fn=pause)
    (out / "rounds.json").write_text(json.dumps([stats._asdict() for stats in strategy.rounds]))
    (out / "model.safetensors").write_bytes(save(to_params(result.arrays)))


def model() -> ArrayRecord:
    generator = torch.Generator().manual_seed(7)
    shapes = {"one.weight": (40, 30), "one.bias": (40,), "two.weight": (10, 40)}
    return to_record({name: torch.randn(shape, generator=generator) + 0.3 for name, shape in shapes.items()})
