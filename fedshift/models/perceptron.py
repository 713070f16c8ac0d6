"""Fully connected models: one hidden layer, or none."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """One hidden layer: inputs -> hidden -> classes, ReLU, with biases."""

    def __init__(self, shape: Sequence[int] = (64,), classes: int = 10, hidden: int = 128) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class Logistic(nn.Module):
    """Multinomial logistic regression: one linear layer, 610 parameters on 60 features and 10 classes.

    fc inputs->classes with bias. All parameters are 0 at first; with cross-entropy the loss is convex. The model of
    Synthetic(alpha, beta) in FedProx (Li et al., MLSys 2020).
    """

    def __init__(self, shape: Sequence[int] = (60,), classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(shape), classes)
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(x.flatten(1))
        return logits
