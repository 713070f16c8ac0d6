"""Models by name."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class PaperCNN(nn.Module):
    """The paper's CNN for 32x32 colour images: 4 weight tensors, no biases, 2,155,872 parameters.

    conv 5x5 3->32, pad 1; ReLU; maxpool 2x2 pad 1 (32 -> 30 -> 16); conv 5x5 32->64, pad 1; ReLU;
    maxpool 2x2 pad 1 (16 -> 14 -> 8); fc 4096->512; ReLU; fc 512->10. Kaiming normal, fan-in.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=1, bias=False)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=1, bias=False)
        self.fc1 = nn.Linear(64 * 8 * 8, 512, bias=False)
        self.fc2 = nn.Linear(512, classes, bias=False)
        for weight in self.parameters():
            nn.init.kaiming_normal_(weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, padding=1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, padding=1)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"paper-cnn": PaperCNN}
