"""Residual networks for small images, with GroupNorm instead of BatchNorm.

The mean of batch statistics over clients with different labels fits none of them. Hsieh et al. (ICML 2020)
therefore replace BatchNorm with GroupNorm, and Reddi et al. (ICLR 2021) with two groups, the default here.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.models.convolutional import check_images


class Block(nn.Module):
    """y = relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))), two 3x3 convolutions; the first has the stride.

    The shortcut is x, or a normalised 1x1 convolution of x if the shape changes. The scale of the last norm is 0 at
    first, so that a block starts as its shortcut (Goyal et al., 2017).
    """

    def __init__(self, inputs: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            conv, norm = nn.Conv2d(inputs, width, 1, stride, bias=False), nn.GroupNorm(groups, width)
            self.shortcut = nn.Sequential()
            self.shortcut.add_module("conv", conv)
            self.shortcut.add_module("norm", norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    """Residual network with GroupNorm: a 3x3 stem, stages of basic blocks, the mean over positions, one linear layer.

    widths: channels of each stage; the first block of every stage but the first has stride 2. blocks: per stage.
    Convolutions are Kaiming normal, fan-out, without biases. He et al. (CVPR 2016), with `groups` groups per norm.
    """

    def __init__(
        self, shape: Sequence[int], classes: int, widths: Sequence[int], blocks: int = 1, groups: int = 2
    ) -> None:
        super().__init__()
        check_images("ResNet", shape, 1)
        if groups < 1 or any(width % groups for width in widths):
            raise ValueError(f"ResNet(groups={groups}): groups must divide the widths {', '.join(map(str, widths))}")
        self.conv = nn.Conv2d(shape[0], widths[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, widths[0])
        self.blocks = nn.Sequential()
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for place in range(blocks):
                self.blocks.append(Block(inputs, width, 2 if stage and not place else 1, groups))
                inputs = width
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Block):
                nn.init.zeros_(module.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet8(shape: Sequence[int] = (3, 32, 32), classes: int = 10, groups: int = 2) -> ResNet:
    """ResNet-8 with GroupNorm: 78,042 parameters on colour images with 10 classes.

    conv 3x3 3->16; one block each of 16, 32 and 64 channels (32 -> 16 -> 8 pixels); mean; fc 64->10.
    The network of He et al. (CVPR 2016) with 6n + 2 layers, n = 1.
    """
    return ResNet(shape, classes, (16, 32, 64), 1, groups)


def resnet18(shape: Sequence[int] = (3, 32, 32), classes: int = 10, groups: int = 2) -> ResNet:
    """ResNet-18 with GroupNorm: 11,173,962 parameters on colour images with 10 classes.

    conv 3x3 3->64; two blocks each of 64, 128, 256 and 512 channels (32 -> 16 -> 8 -> 4 pixels); mean; fc 512->10.
    The network of He et al. (CVPR 2016) with a 3x3 stem without pooling, because images are small.
    """
    return ResNet(shape, classes, (64, 128, 256, 512), 2, groups)
