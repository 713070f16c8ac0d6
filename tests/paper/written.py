"""Published records with known values."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift import Experiment
from fedshift.experiment.toml import merge
from fedshift.paper.experiments import BASE, TABLES, Cell, settings
from fedshift.paper.records import Results, published

EVEN = (0.1,) * 10
LAYERS = ("conv1.weight", "fc2.weight")


def write(
    to: Path,
    cell: Cell,
    accuracy: float | Sequence[float] = 0.6,
    seed: int = 0,
    predicted: Sequence[float] = EVEN,
    figures: Mapping[str, float | Sequence[float]] | None = None,
    sent: int = 1000,
    base: Mapping[str, Any] = BASE,
    rounds: int | None = None,
) -> Path:
    """Write a record; accuracy and layer figures may vary by round, `sent` are the bytes uploaded per round."""
    experiment = Experiment(**merge(base, settings(cell, seed, rounds)))
    folder, rounds = to / experiment.name, experiment.train.rounds
    folder.mkdir(parents=True)
    (folder / "settings.toml").write_text(experiment.toml())
    (folder / "about.json").write_text(json.dumps({"cpu": "a Xeon", "commit": "abc", "torch": "2.13"}))
    scores = [accuracy] * rounds if isinstance(accuracy, float) else accuracy
    values = {"step": 1.0, "drift": 1.0, "mean_after": 1.0} | dict(figures or {})
    layers = {f"{name}.{layer}": value for name, value in values.items() for layer in LAYERS}
    header = ["round", "accuracy", "loss", *(f"predicted.{n}" for n in range(10)), *layers, "bytes.up", "bytes.down"]
    lines = [",".join(header)]
    for t in range(rounds):
        cells = [value if isinstance(value, float) else value[t] for value in layers.values()]
        lines.append(",".join(map(str, [t + 1, scores[t], 1.0, *predicted, *cells, sent, 1000])))
    (folder / "rounds.csv").write_text("\n".join([*lines, ""]))
    return folder


def read(folder: Path) -> Results:
    return published(folder, [cell for table in TABLES.values() for cell in table()])[0]
