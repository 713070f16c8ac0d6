"""Convolutional networks of two convolutions and two fully connected layers, for small images."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class PaperCNN(nn.Module):
    """The paper's CNN: 4 weight tensors, no biases, 2,155,872 parameters on 32x32 colour images.

    conv 5x5 3->32, pad 1; ReLU; maxpool 2x2 pad 1 (32 -> 30 -> 16); conv 5x5 32->64, pad 1; ReLU;
    maxpool 2x2 pad 1 (16 -> 14 -> 8); fc 4096->512; ReLU; fc 512->10. Kaiming normal, fan-in.
    """

    def __init__(self, shape: Sequence[int] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        check_images("PaperCNN", shape, 4)
        channels, height, width = shape[0], *(_pooled(_pooled(n)) for n in shape[1:])
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=1, bias=False)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=1, bias=False)
        self.fc1 = nn.Linear(64 * height * width, 512, bias=False)
        self.fc2 = nn.Linear(512, classes, bias=False)
        for weight in self.parameters():
            nn.init.kaiming_normal_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return _paper_forward(self, x)


class SmallPaperCNN(nn.Module):
    """The paper's CNN on images of half the height and width: 12,024 parameters on 28x28 grey images.

    mean of 2x2 pixels (28 -> 14); conv 5x5 1->8, pad 1; ReLU; maxpool 2x2 pad 1 (14 -> 12 -> 7); conv 5x5 8->16, pad 1;
    ReLU; maxpool 2x2 pad 1 (7 -> 5 -> 3); fc 144->hidden; ReLU; fc hidden->10. No biases; Kaiming normal, fan-in.
    """

    def __init__(self, shape: Sequence[int] = (1, 28, 28), classes: int = 10, hidden: int = 56) -> None:
        super().__init__()
        check_images("SmallPaperCNN", shape, 8)
        channels, height, width = shape[0], *(_pooled(_pooled(n // 2)) for n in shape[1:])
        self.conv1 = nn.Conv2d(channels, 8, 5, padding=1, bias=False)
        self.conv2 = nn.Conv2d(8, 16, 5, padding=1, bias=False)
        self.fc1 = nn.Linear(16 * height * width, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, classes, bias=False)
        for weight in self.parameters():
            nn.init.kaiming_normal_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return _paper_forward(self, F.avg_pool2d(x, 2))


def _paper_forward(net: PaperCNN | SmallPaperCNN, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(net.conv1(x)), 2, padding=1)
    x = F.max_pool2d(F.relu(net.conv2(x)), 2, padding=1)
    x = F.relu(net.fc1(x.flatten(1)))
    logits: Tensor = net.fc2(x)
    return logits


def _pooled(n: int) -> int:
    """Height after conv 5x5 pad 1 and maxpool 2x2 pad 1."""
    return (n - 2) // 2 + 1


class CNN(nn.Module):
    """CNN for MNIST and Fashion-MNIST: 454,922 parameters on 28x28 grey images.

    conv 5x5 1->32, pad 2; ReLU; maxpool 2x2 (28 -> 14); conv 5x5 32->64, pad 2; ReLU; maxpool 2x2 (14 -> 7);
    fc 3136->hidden; ReLU; fc hidden->10; all with biases. Torch's default initialisation: with Kaiming's larger ones,
    clients of two labels diverge at usual learning rates. hidden = 512 is the CNN of FedAvg (McMahan et al., AISTATS
    2017), 1,663,370 parameters.
    """

    def __init__(self, shape: Sequence[int] = (1, 28, 28), classes: int = 10, hidden: int = 128) -> None:
        super().__init__()
        check_images("CNN", shape, 4)
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


def check_images(model: str, shape: Sequence[int], least: int) -> None:
    """Raise ValueError unless examples are images of at least `least` pixels on each side."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ValueError(
            f"{model}(shape={tuple(shape)}): needs images (channels, height, width) of {least}x{least} or more"
        )
