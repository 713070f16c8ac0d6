"""Small federations for tests."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Dataset, Experiment, Params, dataset, header
from fedshift.codecs.exact import EXACT
from fedshift.core.types import Decoded
from fedshift.engines import Engine, ForkError, Processes, Sequential, Task
from fedshift.experiment.build import build
from fedshift.experiment.toml import merge
from fedshift.rounds.federation import Federation, Outcome, State
from fedshift.rounds.loop import Ended, Ram, Training, run_rounds
from fedshift.wire.writer import Choice, Writer


def points(n: int = 240, tests: int = 60, features: int = 6, classes: int = 4) -> Dataset:
    """Clouds of points around the corners of a cube, one per class."""
    g = torch.Generator().manual_seed(0)
    y, test_y = (torch.arange(size) % classes for size in (n, tests))
    corners = torch.randn(classes, features, generator=g)
    x, test_x = (corners[labels] + 0.7 * torch.randn(len(labels), features, generator=g) for labels in (y, test_y))
    return dataset(x, y, test_x, test_y, name="points")


class Normed(nn.Module):
    """Features that make a round hard to reproduce: batch norm, dropout, a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.last, self.unused = nn.Linear(8, 4), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(F.relu(self.norm(self.first(x))))
        logits: Tensor = self.last(hidden) @ self.frozen
        return logits


def settings(**changed: Any) -> Experiment:
    base: dict[str, Any] = {
        "data": {"clients": 12, "partition": "iid"},
        "model": {"args": {"hidden": 8}},
        "train": {"rounds": 3, "cohort": 5, "epochs": 2, "batch": 8, "lr": 0.1, "momentum": 0.5},
        "shift": {"on": False},
        "engine": {"name": "sequential"},
    }
    return Experiment(**merge(base, changed))


def federation(model: nn.Module | None = None, dataset: Dataset | None = None, **changed: Any) -> Federation:
    return build(settings(**changed), model, dataset or points())


def train(fed: Federation, rounds: int = 3, engine: Engine | None = None) -> tuple[State, list[Outcome], Ram]:
    engine = engine or Sequential(fed.task)
    memory, outcomes = Ram(), []
    training = Training(fed, engine, rounds, memory=memory)
    for _, outcome in run_rounds([training], engine):
        if isinstance(outcome, Ended):
            raise outcome.problem
        outcomes.append(outcome)
    return training.state, outcomes, memory


def forged(
    frame: bytes | Decoded, params: Params, codec: Choice = EXACT, *, described: bool = False, **changed: Any
) -> bytes:
    """Frame of other tensors, with the header of an honest frame except for the changed fields."""
    assert isinstance(frame, bytes)
    return Writer(codec, params, described).pack(params, header(frame)._replace(**changed))


def same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def processes(task: Task, workers: int) -> Processes:
    try:
        return Processes(task, workers)
    except ForkError as problem:
        pytest.skip(str(problem))
