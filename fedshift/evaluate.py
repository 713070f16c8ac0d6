"""How good a model is on the test set."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedshift.data.datasets import Dataset

NUMBERS = 1 << 18  # of a chunk of examples: depends on the data alone, so that a score does not on who worked it out
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean over the batch
Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,), one number an example


class Score(NamedTuple):
    """Sums over examples; of several chunks, add them up in order."""

    examples: int
    metric: float
    loss: float
    predicted: tuple[int, ...]  # how often each label was predicted


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Top-1"""
    return outputs.argmax(-1) == targets


def chunks(data: Dataset) -> list[slice]:
    size = min(max(NUMBERS // math.prod(data.shape), 64), 1024)
    return [slice(i, i + size) for i in range(0, len(data.test_x), size)]


def score(model: nn.Module, data: Dataset, part: slice, loss: Loss, metric: Metric) -> Score:
    """One chunk; the model is in evaluation mode already."""
    with torch.no_grad():
        outputs = model(data.inputs(data.test_x[part]))
        return judge(outputs, data.test_y[part], data.classes, loss, metric)


def judge(outputs: Tensor, targets: Tensor, classes: int, loss: Loss, metric: Metric) -> Score:
    """What outputs are worth."""
    n, each = len(targets), metric(outputs, targets)
    if not isinstance(each, Tensor) or each.shape != (n,):
        seen = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        raise ValueError(f"a metric must give one number for each of {n} examples, a tensor, not {seen}")
    sums = [each.double().sum(), torch.as_tensor(loss(outputs, targets), dtype=torch.float64, device=each.device)]
    if classes and isinstance(outputs, Tensor) and outputs.ndim == 2:  # labels that data does not have are none
        sums += (outputs.argmax(-1)[:, None] == torch.arange(classes, device=each.device)).sum(0).double()
    total, mean_loss, *predicted = torch.stack(sums).tolist()  # at once: a GPU answers slowly
    return Score(n, total, n * mean_loss, tuple(map(int, predicted or [0] * classes)))


def total(scores: Iterable[Score]) -> Score:
    """
    >>> total([Score(2, 1.0, 3.0, (2, 0)), Score(1, 1.0, 0.5, (0, 1))])
    Score(examples=3, metric=2.0, loss=3.5, predicted=(2, 1))
    """
    parts = list(scores)
    return Score(
        sum(part.examples for part in parts),
        sum(part.metric for part in parts),
        sum(part.loss for part in parts),
        tuple(map(sum, zip(*(part.predicted for part in parts), strict=True))),
    )
