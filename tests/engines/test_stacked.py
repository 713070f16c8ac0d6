"""What cannot be trained as a stack is refused, with alternatives, before anything is trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Dataset, dataset
from fedshift.engines import Batched, StackError
from fedshift.experiment.build import build
from tests.federations import Normed, federation, points, settings


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Normed(), r"norm \(BatchNorm1d\) mixes the examples"),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), r"1 \(Dropout\) draws at random"),
    ],
)
def test_a_model_that_cannot_be_stacked_is_refused_with_alternatives(module: nn.Module, why: str) -> None:
    with pytest.raises(StackError, match=why) as caught:
        Batched(federation(module).task)
    for way_out in ("'sequential'", "'processes'", "GroupNorm"):
        assert way_out in str(caught.value)


class Counting(nn.Linear):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(x)


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Counting(), "seen changes while it trains"),
        (Centred(6, 4), "the gradient of weight depends on who else is in the batch"),
        (nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten()), "padding_idx"),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(module: nn.Module, why: str) -> None:
    with pytest.raises(StackError, match=why):
        Batched(federation(module, held=words() if "padding" in why else None).task)


def words() -> Dataset:
    x, y = torch.arange(60).view(60, 1) % 9, torch.arange(60) % 4
    return dataset(x, y, x[:20], y[:20])


def test_a_loss_that_is_no_mean_over_examples_is_refused() -> None:
    rare = torch.tensor([0.1, 1.0, 5.0, 20.0])
    fed = build(settings(), data=points(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets, weight=rare))
    with pytest.raises(StackError, match="must be the mean of its examples' losses"):
        Batched(fed.task)


def test_dropout_of_the_functional_kind_is_refused_too() -> None:
    class Sly(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), training=self.training)

    with pytest.raises(StackError, match="'sequential'"):
        Batched(federation(Sly(6, 4)).task)
