"""Models by name, built for the shape of the examples and the number of classes."""

import math
from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class PaperCNN(nn.Module):
    """The paper's CNN: 4 weight tensors, no biases, 2,155,872 parameters on 32x32 colour images.

    conv 5x5 3->32, pad 1; ReLU; maxpool 2x2 pad 1 (32 -> 30 -> 16); conv 5x5 32->64, pad 1; ReLU;
    maxpool 2x2 pad 1 (16 -> 14 -> 8); fc 4096->512; ReLU; fc 512->10. Kaiming normal, fan-in.
    """

    def __init__(self, shape: Sequence[int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise ValueError(f"PaperCNN(shape={tuple(shape)}): needs images (channels, height, width) of 4x4 or more")
        channels, height, width = shape[0], *(_pooled(_pooled(n)) for n in shape[1:])
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=1, bias=False)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=1, bias=False)
        self.fc1 = nn.Linear(64 * height * width, 512, bias=False)
        self.fc2 = nn.Linear(512, classes, bias=False)
        for weight in self.parameters():
            nn.init.kaiming_normal_(weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, padding=1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, padding=1)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


def _pooled(n: int) -> int:
    """Height after conv 5x5 pad 1 and maxpool 2x2 pad 1."""
    return (n - 2) // 2 + 1


class MLP(nn.Module):
    """One hidden layer: inputs -> hidden -> classes, ReLU, with biases."""

    def __init__(self, shape: Sequence[int] = (64,), classes: int = 10, hidden: int = 128) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": MLP, "paper-cnn": PaperCNN}
