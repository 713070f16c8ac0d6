"""Evaluation of a model on the test set, and on held-out examples of each client."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedshift.data.datasets import Dataset
from fedshift.data.partition import Partition

NUMBERS = 1 << 18  # numbers per chunk of examples; the same on every engine, so that scores are equal
WORST = 0.1  # share of clients in the worst decile
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> mean over the batch
# (outputs, targets) -> (n, ...), one row per example; the score is the mean of (n,), or metric.result(all rows)
Metric = Callable[[Tensor, Tensor], Tensor]


class OfLoss(NamedTuple):
    """Metric that is a function of the mean loss."""

    of: Callable[[float], float]


AnyMetric = Metric | OfLoss | None  # None: the loss itself


class Score(NamedTuple):
    """Sums over examples, and further scores."""

    examples: int
    metric: float  # of a metric that is not a mean: the score times the number of examples
    loss: float
    predicted: tuple[int, ...]  # number of predictions of each label
    others: tuple[float, ...] = ()  # scores by the further metrics of the task


class Part(NamedTuple):
    """Sums over the examples of one chunk; `total` adds those of several chunks."""

    examples: int
    loss: float
    predicted: tuple[int, ...]
    states: tuple[float | Tensor, ...]  # of each metric: sum over examples, or all rows of one with a `result`


class Held(NamedTuple):
    """Held-out examples of each client."""

    examples: Partition
    train: bool  # examples of the training set, instead of the test set


class ClientChunk(NamedTuple):
    """Chunk of held-out examples, ordered by client."""

    places: Tensor  # in the test or the training set
    train: bool
    sizes: tuple[int, ...]  # numbers of consecutive examples of one client

    def of(self, data: Dataset) -> tuple[Tensor, Tensor]:
        """Examples and targets of the set that the chunk indexes."""
        return (data.x, data.y) if self.train else (data.test_x, data.test_y)


class ClientScores(NamedTuple):
    """Scores of N clients by each metric, the run's own metric first; NaN for clients without a score."""

    examples: tuple[int, ...]  # (N,) number of held-out examples
    values: tuple[tuple[float, ...], ...]  # (metrics, N)


class Spread(NamedTuple):
    """Distribution of a score over the clients that have one."""

    mean: float
    weighted: float  # mean with the numbers of held-out examples as weights
    worst: float  # mean of the worst tenth of the clients
    std: float  # standard deviation over clients


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Top-1 accuracy of each example; for soft labels, the most probable class is the target.

    For several targets per example, outputs (n, classes, ...) and targets (n, ...), the mean over them.

    >>> accuracy(torch.eye(2), torch.tensor([0, 0])), accuracy(torch.eye(2), torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
    (tensor([ True, False]), tensor([True, True]))
    >>> accuracy(torch.eye(2)[None], torch.tensor([[0, 0]]))
    tensor([0.5000])
    """
    if outputs.ndim > 2 and targets.shape == outputs.argmax(1).shape:
        return (outputs.argmax(1) == targets).flatten(1).float().mean(1)
    return outputs.argmax(-1) == hard_labels(outputs, targets)


def hard_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    """Labels; for soft labels, the most probable class."""
    soft = targets.is_floating_point() and targets.shape == outputs.shape
    return targets.argmax(-1) if soft else targets


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


def client_chunks(data: Dataset, held: Held, size: int | None = None) -> list[ClientChunk]:
    """Chunks of the held-out examples of all clients, of up to `size` examples; a client may be in several chunks.

    >>> from fedshift.data import dataset
    >>> x, y = torch.zeros(3, 2), torch.arange(3)
    >>> held = Held(Partition(torch.tensor([2, 0, 1]), torch.tensor([0, 1, 1, 3])), train=True)
    >>> [(chunk.places.tolist(), chunk.sizes) for chunk in client_chunks(dataset(x, y, x, y), held, 2)]
    [([2, 0], (1, 1)), ([1], (1,))]
    """
    order, start, size = held.examples.order, held.examples.start, size or chunk_size(data)
    made = []
    for first in range(0, len(order), size):
        sizes = start.clamp(first, first + size).diff().tolist()
        made.append(ClientChunk(order[first : first + size], held.train, tuple(n for n in sizes if n)))
    return made


def score(model: nn.Module, data: Dataset, part: slice, loss: Loss, metrics: Sequence[AnyMetric]) -> Part:
    """Score one chunk of the test set; the model must be in evaluation mode."""
    with torch.no_grad():
        outputs = model(_own(data.inputs(data.test_x[part]), data.test_x))
        return judge(outputs, data.targets(data.test_y[part]), data.classes, loss, metrics)


def score_clients(
    model: nn.Module, data: Dataset, chunk: ClientChunk, loss: Loss, metrics: Sequence[AnyMetric]
) -> list[Tensor]:
    """Rows of each metric for a chunk of held-out examples; the model must be in evaluation mode."""
    with torch.no_grad():
        x, y = chunk.of(data)
        index = chunk.places.to(x.device)
        return judge_clients(model(data.inputs(x[index])), data.targets(y[index]), chunk.sizes, loss, metrics)


def judge(outputs: Tensor, targets: Tensor, classes: int, loss: Loss, metrics: Sequence[AnyMetric]) -> Part:
    """Sums and rows of outputs."""
    n, device, sums = len(targets), targets.device, []
    states: list[float | Tensor] = [0.0] * len(metrics)
    means = []  # places of the metrics that are means
    for place, metric in enumerate(metrics):
        if metric is None or isinstance(metric, OfLoss):
            continue
        if has_result(metric):
            states[place] = _rows(metric, outputs, targets).cpu()
        else:
            means.append(place)
            sums.append(_rows(metric, outputs, targets).double().sum())
    sums.append(loss_mean(loss, outputs, targets))
    if classes and isinstance(outputs, Tensor) and outputs.ndim == 2:  # other labels are not counted
        sums += (outputs.argmax(-1)[:, None] == torch.arange(classes, device=device)).sum(0).double()
    values = torch.stack(sums).tolist()  # one transfer, because each synchronizes with the GPU
    for place in means:
        states[place] = values.pop(0)
    mean_loss, *predicted = values
    return Part(n, n * mean_loss, tuple(map(int, predicted or [0] * classes)), tuple(states))


def judge_clients(
    outputs: Tensor, targets: Tensor, sizes: Sequence[int], loss: Loss, metrics: Sequence[AnyMetric]
) -> list[Tensor]:
    """Rows of each metric; `sizes` are the numbers of consecutive examples of one client.

    The rows of the loss are its mean over the examples of a client in this chunk: a loss returns only means.
    """
    of_loss = torch.empty(0)
    if any(metric is None or isinstance(metric, OfLoss) for metric in metrics):
        pairs = zip(torch.split(outputs, list(sizes)), torch.split(targets, list(sizes)), strict=True)
        means = torch.stack([loss_mean(loss, *pair) for pair in pairs]).cpu()
        of_loss = means.repeat_interleave(torch.tensor(sizes))
    return [
        of_loss if metric is None or isinstance(metric, OfLoss) else _rows(metric, outputs, targets).cpu()
        for metric in metrics
    ]


def apart(function: Callable[[Any, Tensor], Any], outputs: Any, targets: Tensor) -> Any:
    """Result of a loss or metric, which gets copies unless it is known to leave its arguments unchanged."""
    if pure(function):
        return function(outputs, targets)
    return function(outputs.clone() if isinstance(outputs, Tensor) else copy.deepcopy(outputs), targets.clone())


def pure(function: object) -> bool:
    """True for losses and metrics of this package and of torch, which do not change their arguments.

    >>> pure(accuracy), pure(torch.nn.functional.mse_loss), pure(math.dist)
    (True, True, False)
    """
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("fedshift", "torch")


def _own(x: Tensor, data: Tensor) -> Tensor:
    """Inputs in memory of their own, because a model may change them in place."""
    return x.clone() if x.untyped_storage().data_ptr() == data.untyped_storage().data_ptr() else x


def loss_mean(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """Loss of a batch as a float64 tensor."""
    return _number(apart(loss, outputs, targets), targets.device)


def _number(found: object, device: torch.device) -> Tensor:
    if isinstance(found, Tensor) and found.ndim:
        raise ValueError(f"a loss must return one number, the mean over the batch, not shape {tuple(found.shape)}")
    try:
        return torch.as_tensor(found, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"a loss must return one number, the mean over the batch, not {type(found).__name__}"
        ) from None


def try_loss(loss: Loss, outputs: Any, targets: Tensor) -> None:
    """Raise ValueError unless the loss is one number with a gradient."""
    found: object = loss(outputs, targets)
    _number(found, targets.device)
    if not isinstance(found, Tensor) or not found.requires_grad:
        seen = "a tensor without a gradient" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"a loss must return a tensor with one number that depends on the outputs, not {seen}")


def try_metric(metric: AnyMetric, outputs: Any, targets: Tensor) -> None:
    """Raise ValueError unless a metric returns one row per example, and its `result` one number."""
    if metric is None or isinstance(metric, OfLoss):
        return
    rows = _rows(metric, outputs, targets).cpu()
    if has_result(metric):
        _result(metric, rows)


def has_result(metric: AnyMetric) -> bool:
    """True for a metric that computes its score from the rows of all examples, with `metric.result(rows)`."""
    return not isinstance(metric, OfLoss) and callable(getattr(metric, "result", None))


def _name(metric: object) -> str:
    """Name of a function or of the class of an object."""
    return str(getattr(metric, "__name__", type(metric).__name__))


def _rows(metric: Metric, outputs: Tensor, targets: Tensor) -> Tensor:
    """Rows of a metric: (n,) for a mean, (n, ...) for a metric with a `result`."""
    n = len(targets)
    rows: Tensor = apart(metric, outputs, targets)
    shape = tuple(rows.shape) if isinstance(rows, Tensor) else None
    if has_result(metric):
        if shape is None or shape[:1] != (n,):
            seen = type(rows).__name__ if shape is None else f"shape {shape}"
            raise ValueError(
                f"{_name(metric)}: a metric with a result must return a tensor with {n} rows, one per example, "
                f"not {seen}"
            )
    elif shape != (n,):
        seen = type(rows).__name__ if shape is None else f"shape {shape}"
        raise ValueError(
            f"{_name(metric)}: a metric must return a tensor with one number for each of {n} examples, not {seen}"
        )
    return rows


def _result(metric: Any, rows: Tensor) -> float:
    """Score from the rows of all examples."""
    found = metric.result(rows)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError):
        seen = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{_name(metric)}: the result of a metric must be one number, not {seen}") from None


def total(parts: Iterable[Part], metrics: Sequence[AnyMetric]) -> Score:
    """Score from all chunks of the test set, in order; the first metric is that of the run, others are further ones.

    >>> total([Part(2, 3.0, (2, 0), (1.0,)), Part(1, 0.5, (0, 1), (1.0,))], [accuracy])
    Score(examples=3, metric=2.0, loss=3.5, predicted=(2, 1), others=())
    """
    found = list(parts)
    n, loss = sum(part.examples for part in found), sum(part.loss for part in found)
    predicted = tuple(map(sum, zip(*(part.predicted for part in found), strict=True)))
    states = zip(*(part.states for part in found), strict=True)
    sums = [_sum(metric, state, loss, n) for metric, state in zip(metrics, states, strict=True)]
    return Score(n, sums[0], loss, predicted, tuple(x / n for x in sums[1:]))


def _sum(metric: AnyMetric, states: Sequence[Any], loss: float, n: int) -> float:
    """Score times the number of examples, from the states of all chunks."""
    if metric is None:
        return loss
    if isinstance(metric, OfLoss):
        return n * metric.of(loss / n)
    return n * _result(metric, torch.cat(list(states))) if has_result(metric) else sum(states)


def by_client(chunks: Sequence[Sequence[Tensor]], held: Held, metrics: Sequence[AnyMetric]) -> ClientScores:
    """Scores of clients from the rows of all chunks.

    >>> held = Held(Partition(torch.arange(3), torch.tensor([0, 1, 1, 3])), train=False)
    >>> by_client([[torch.tensor([1.0, 0.0])], [torch.tensor([1.0])]], held, [accuracy])
    ClientScores(examples=(1, 0, 2), values=((1.0, nan, 0.5),))
    """
    sizes = held.examples.sizes
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    joined = [torch.cat(list(rows)) for rows in zip(*chunks, strict=True)]
    values = []
    for metric, rows in zip(metrics, joined, strict=True):
        if has_result(metric):
            found = [_result(metric, some) if len(some) else math.nan for some in torch.split(rows, sizes.tolist())]
        else:
            sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, owner, rows.double())
            found = (sums / sizes).tolist()  # 0 / 0 is NaN
            found = [metric.of(x) for x in found] if isinstance(metric, OfLoss) else found
        values.append(tuple(found))
    return ClientScores(tuple(sizes.tolist()), tuple(values))


def spread(values: Sequence[float], examples: Sequence[int], lower: bool = False) -> Spread:
    """Distribution of scores over clients; NaN, of clients without a score, is left out.

    The worst tenth are the ceil(N / 10) clients with the lowest scores, or with the highest if lower is better.

    >>> spread([0.5, 1.0, math.nan], [1, 3, 0])
    Spread(mean=0.75, weighted=0.875, worst=0.5, std=0.25)
    """
    known = [(x, n) for x, n in zip(values, examples, strict=True) if not math.isnan(x)]
    if not known:
        return Spread(math.nan, math.nan, math.nan, math.nan)
    x, n = (torch.tensor(column, dtype=torch.float64) for column in zip(*known, strict=True))
    worst = x.sort(descending=lower).values[: math.ceil(WORST * len(x))]
    std = (x - x.mean()).square().mean().sqrt()
    return Spread(*(float(figure) for figure in (x.mean(), (x * n).sum() / n.sum(), worst.mean(), std)))
