"""Evaluation of a model on the test set."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedshift.data.datasets import Dataset

NUMBERS = 1 << 18  # numbers per chunk of examples; the same on every engine, so that scores are equal
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean over the batch
Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (n,), one number per example


class Score(NamedTuple):
    """Sums over examples; `total` adds those of several chunks."""

    examples: int
    metric: float
    loss: float
    predicted: tuple[int, ...]  # number of predictions of each label


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Top-1 accuracy of each example; for soft labels, the most probable class is the target.

    >>> accuracy(torch.eye(2), torch.tensor([0, 0])), accuracy(torch.eye(2), torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
    (tensor([ True, False]), tensor([True, True]))
    """
    soft = targets.is_floating_point() and targets.shape == outputs.shape
    return outputs.argmax(-1) == (targets.argmax(-1) if soft else targets)


def soft_labels(y: Tensor) -> bool:
    """True for floating point targets that are class probabilities: (n, classes, ...), none negative, with sums of 1.

    >>> soft_labels(torch.tensor([[0.8, 0.2]])), soft_labels(torch.tensor([[1.0]])), soft_labels(torch.tensor([1.0]))
    (True, False, False)
    """
    return y.ndim > 1 and y.shape[1] > 1 and bool((y >= 0).all() and ((y.sum(1) - 1).abs() < 1e-3).all())


def chunk_size(data: Dataset) -> int:
    """Number of examples that are evaluated at once."""
    return min(max(NUMBERS // math.prod(data.shape), 64), 1024)


def chunks(data: Dataset) -> list[slice]:
    """Chunks of the test set."""
    size = chunk_size(data)
    return [slice(i, i + size) for i in range(0, len(data.test_x), size)]


def score(model: nn.Module, data: Dataset, part: slice, loss: Loss, metric: Metric | None) -> Score:
    """Score one chunk; the model must be in evaluation mode."""
    with torch.no_grad():
        outputs = model(data.inputs(data.test_x[part]))
        return judge(outputs, data.targets(data.test_y[part]), data.classes, loss, metric)


def judge(outputs: Tensor, targets: Tensor, classes: int, loss: Loss, metric: Metric | None) -> Score:
    """Score of outputs; without a metric, the loss is the score."""
    n, device, sums = len(targets), targets.device, []
    if metric is not None:
        each = metric(outputs, targets)
        if not isinstance(each, Tensor) or each.shape != (n,):
            seen = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(f"a metric must return a tensor with one number for each of {n} examples, not {seen}")
        sums.append(each.double().sum())
    mean = torch.as_tensor(loss(outputs, targets), dtype=torch.float64, device=device)
    if mean.ndim:
        raise ValueError(f"a loss must return one number, the mean over the batch, not shape {tuple(mean.shape)}")
    sums.append(mean)
    if classes and isinstance(outputs, Tensor) and outputs.ndim == 2:  # other labels are not counted
        sums += (outputs.argmax(-1)[:, None] == torch.arange(classes, device=device)).sum(0).double()
    values = torch.stack(sums).tolist()  # one transfer, because each synchronizes with the GPU
    total = n * values[0] if metric is None else values.pop(0)
    mean_loss, *predicted = values
    return Score(n, total, n * mean_loss, tuple(map(int, predicted or [0] * classes)))


def total(scores: Iterable[Score]) -> Score:
    """Sum of the scores of several chunks, in order.

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
