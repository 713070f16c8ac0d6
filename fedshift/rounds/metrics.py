"""Metrics by name."""

import math

import torch
from torch import Tensor

from fedshift.rounds.evaluate import AnyMetric, OfLoss, accuracy, hard_labels


def perplexity(loss: float) -> float:
    """exp(mean loss)

    >>> round(perplexity(math.log(4)), 9), perplexity(1e4)
    (4.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """True for examples whose label is among the five largest outputs.

    >>> top5(torch.arange(7.0).expand(2, 7), torch.tensor([1, 2]))
    tensor([False,  True])
    """
    largest = outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices
    return (largest == hard_labels(outputs, targets)[:, None]).any(-1)


class F1:
    """Macro F1: the mean of 2 tp / (2 tp + fp + fn) over all labels that are predicted or present.

    Three examples of label 0, of which one is predicted as 1, and one example of label 1: F1 is 0.8 and 2 / 3.

    >>> outputs, targets = torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 0, 1])
    >>> round(F1().result(F1()(outputs, targets)), 6) == round((0.8 + 2 / 3) / 2, 6)
    True
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Prediction and label of each example."""
        return torch.stack([outputs.argmax(-1), hard_labels(outputs, targets)], dim=1)

    def result(self, rows: Tensor) -> float:
        predicted, label = rows.unbind(1)
        most = int(rows.max()) + 1
        hits = label[predicted == label].bincount(minlength=most)
        both = predicted.bincount(minlength=most) + label.bincount(minlength=most)  # 2 tp + fp + fn
        return float((2 * hits[both > 0].double() / both[both > 0]).mean())


class AUC:
    """Area under the ROC curve: the probability that a positive example has a higher score than a negative one.

    Ties count one half. One output, or the difference of two, is the score of label 1. With more outputs, it is the
    mean over labels of one label against the rest, with probabilities (softmax) as scores. Labels that no example or
    all examples have are left out; NaN if none is left.

    >>> AUC().result(AUC()(torch.tensor([[0.1], [0.4], [0.35], [0.8]]), torch.tensor([0, 0, 1, 1])))
    0.75
    """

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Scores and label of each example."""
        scores, labels = outputs.double(), hard_labels(outputs, targets).double()
        if scores.ndim == 2 and scores.shape[1] == 2:
            scores = scores[:, 1] - scores[:, 0]
        elif scores.ndim == 2 and scores.shape[1] > 2:
            scores = scores.softmax(1)
        return torch.cat([scores.view(len(labels), -1), labels.view(len(labels), 1)], dim=1)

    def result(self, rows: Tensor) -> float:
        scores, labels = rows[:, :-1], rows[:, -1]
        if not bool(torch.isfinite(scores).all()):
            return math.nan
        classes = torch.arange(scores.shape[1]) if scores.shape[1] > 1 else torch.ones(1)
        found = areas(scores.T.contiguous(), labels == classes[:, None])
        return float(found.nanmean())


def areas(scores: Tensor, positive: Tensor) -> Tensor:
    """(sum of the ranks of P positives - P (P + 1) / 2) / (P N) of each row, with mean ranks of ties: (C, n) -> (C,).

    NaN for rows without positives, or without negatives.

    >>> areas(torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[False, False, True]]))
    tensor([0.7500], dtype=torch.float64)
    """
    ordered = scores.sort(dim=1).values
    below, upto = (torch.searchsorted(ordered, scores, right=right) for right in (False, True))
    ranks = (below + upto + 1).double() / 2
    p, n = positive.sum(1).double(), (~positive).sum(1).double()
    return ((ranks * positive).sum(1) - p * (p + 1) / 2) / (p * n)  # 0 / 0 is NaN


METRICS: dict[str, AnyMetric] = {
    "accuracy": accuracy,
    "loss": None,
    "perplexity": OfLoss(perplexity),
    "f1": F1(),
    "auc": AUC(),
    "top5": top5,
}
