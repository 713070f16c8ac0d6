"""Experiments on a grid in this process, and the same without Flower."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fedshift.data.datasets import Dataset
from fedshift.experiment.settings import Experiment
from fedshift.flower.app.apps import begin, client_app
from fedshift.flower.testing import LocalGrid
from fedshift.rounds.federation import Outcome
from fedshift.runs.run import Run
from tests.federations import points

DATA = points()


def objects(model: nn.Module | None = None, data: Dataset = DATA) -> dict[str, Any]:
    return {"model": model, "data": data, "loss": None, "metric": None}


def grid_of(
    experiment: Experiment,
    nodes: int = 12,
    model: nn.Module | None = None,
    state_dir: Path | None = None,
    **options: Any,
) -> LocalGrid:
    return LocalGrid(client_app(experiment, **objects(model), state_dir=state_dir), nodes, **options)


def on_flower(
    experiment: Experiment,
    grid: LocalGrid | None = None,
    out: Path | None = None,
    *,
    model: nn.Module | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
    **limits: float,
) -> Run:
    return begin(experiment, out, grid or grid_of(experiment, model=model), objects(model), tell=tell, **limits)


def in_process(experiment: Experiment, out: Path | None = None, model: nn.Module | None = None, **further: Any) -> Run:
    return Run(experiment, out, **objects(model), **further)


def plain(outcomes: list[Outcome]) -> list[Outcome]:
    """Outcomes without times."""
    return [outcome._replace(seconds={}, uplink_seconds=None) for outcome in outcomes]
