"""Federated averaging written by hand: a module, an optimizer and state dicts; nothing is checked or recorded."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core.types import Params


class Handwritten:
    """Local SGD, mean and accuracy of one model."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, lr: float) -> None:
        self.model, self.lr = model, lr
        self.x, self.y, self.test_x, self.test_y = x, y, test_x, test_y

    def train(self, start: Params, batches: Iterable[Tensor]) -> Params:
        """State of the model after one SGD step per batch; a batch is the indices of its examples."""
        self.model.load_state_dict(start)
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr)
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(self.x[batch]), self.y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {name: x.clone() for name, x in self.model.state_dict().items()}

    def accuracy(self, params: Params) -> float:
        """Share of correctly classified test examples; the loss is computed as well, as a run does."""
        self.model.load_state_dict(params)
        self.model.eval()
        with torch.no_grad():
            outputs = self.model(self.test_x)
            F.cross_entropy(outputs, self.test_y)
            return float((outputs.argmax(1) == self.test_y).float().mean())


def average(uploads: Sequence[Params]) -> Params:
    """w = 1/K sum_k w_k"""
    return {name: torch.stack([upload[name] for upload in uploads]).mean(0) for name in uploads[0]}


def shuffled(examples: Tensor, epochs: int, batch: int, generator: torch.Generator | None = None) -> Iterable[Tensor]:
    """Batches of a client's examples, reshuffled in each epoch; the last batch of an epoch may be short."""
    for _ in range(epochs):
        order = examples[torch.randperm(len(examples), generator=generator)]
        yield from (order[i : i + batch] for i in range(0, len(order), batch))
