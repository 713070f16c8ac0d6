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
    """Top-1; of soft labels, the most probable one counts.

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


def chunks(data: Dataset) -> list[slice]:
    size = min(max(NUMBERS // math.prod(data.shape), 64), 1024)
    return [slice(i, i + size) for i in range(0, len(data.test_x), size)]


def score(model: nn.Module, data: Dataset, part: slice, loss: Loss, metric: Metric | None) -> Score:
    """One chunk; the model is in evaluation mode already."""
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
    if classes and isinstance(outputs, Tensor) and outputs.ndim == 2:  # labels that data does not have are none
        sums += (outputs.argmax(-1)[:, None] == torch.arange(classes, device=device)).sum(0).double()
    found = torch.stack(sums).tolist()  # at once: a GPU answers slowly
    total = n * found[0] if metric is None else found.pop(0)
    mean_loss, *predicted = found
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
