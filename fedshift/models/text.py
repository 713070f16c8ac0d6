"""Models of text that predict characters from those before: examples (length,) int64, classes = vocabulary."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CharLSTM(nn.Module):
    """Two LSTM layers: 133,520 parameters for a vocabulary of 80.

    embedding 80->8; LSTM 8->100 and 100->100; fc 100->80 of the last position: logits (B, 80), or of the last
    positions: (B, 80, positions), as `torch.nn.functional.cross_entropy` expects them. Biases of forget gates are 1 at
    first, the other biases of gates 0. The sizes of FedProx (Li et al., MLSys 2020); LEAF has 256 units per layer.
    """

    def __init__(
        self,
        shape: Sequence[int] = (80,),
        classes: int = 80,
        embedding: int = 8,
        hidden: int = 100,
        positions: int = 1,
    ) -> None:
        super().__init__()
        check_windows("CharLSTM", shape, positions)
        self.positions = positions
        self.embed = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.fc = nn.Linear(hidden, classes)
        for name, p in self.lstm.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(p)
            if name.startswith("bias_ih"):  # gates are in the order input, forget, cell, output
                nn.init.ones_(p.data[hidden : 2 * hidden])

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embed(x))
        logits: Tensor = self.fc(outputs[:, -self.positions :]).mT  # (B, classes, positions)
        return logits if self.positions > 1 else logits[:, :, 0]


class Attention(nn.Module):
    """Causal attention of several heads: queries of the last positions, keys and values of all.

    softmax(q k^T / sqrt(d)) v, as products of matrices, which can be stacked; fused attention on a CPU cannot.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, last: int) -> Tensor:
        q, k, v = self._split(self.query(x[:, -last:])), self._split(self.key(x)), self._split(self.value(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, heads, last, length)
        if last > 1:
            later = torch.ones(last, x.shape[1], dtype=torch.bool, device=x.device).triu(x.shape[1] - last + 1)
            scores = scores.masked_fill(later, -math.inf)
        mixed: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        """(B, length, width) -> (B, heads, length, width / heads)"""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Layer(nn.Module):
    """Pre-norm transformer layer: x = x + attention(norm(x)); x = x + fc2(gelu(fc1(norm(x)))); the last positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, last: int) -> Tensor:
        x = x[:, -last:] + self.attention(self.norm1(x), last)
        y: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x + y


class CharTransformer(nn.Module):
    """Pre-norm causal transformer: 175,120 parameters for windows of 80 and a vocabulary of 80.

    embedding 80->80 plus learned positions; two layers of 4 heads with fc 80->320->80 and GELU; norm; fc 80->80 of
    the last position, or of the last positions, the only ones that the last layer computes: logits as those of
    `CharLSTM`. Weights are normal with deviation 0.02, those that end a residual branch 0.02 / sqrt(2 layers), as in
    GPT-2 (Radford et al., 2019).
    """

    def __init__(
        self,
        shape: Sequence[int] = (80,),
        classes: int = 80,
        width: int = 80,
        layers: int = 2,
        heads: int = 4,
        positions: int = 1,
    ) -> None:
        super().__init__()
        check_windows("CharTransformer", shape, positions)
        self.predicted = positions
        if heads < 1 or layers < 1 or width % heads:
            raise ValueError(
                f"CharTransformer(width={width}, layers={layers}, heads={heads}): layers and heads must be 1 or more, "
                "and heads must divide width"
            )
        self.embed = nn.Embedding(classes, width)
        self.positions = nn.Parameter(torch.empty(shape[0], width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.normal_(self.positions, std=0.02)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                ends = name.endswith(("out.weight", "fc2.weight"))  # of residual branches
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if ends else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        y = self.embed(x) + self.positions[:length]
        for place, layer in enumerate(self.layers, 1):
            y = layer(y, self.predicted if place == len(self.layers) else length)
        logits: Tensor = self.fc(self.norm(y)).mT  # (B, classes, positions)
        return logits if self.predicted > 1 else logits[:, :, 0]


def check_windows(model: str, shape: Sequence[int], positions: int) -> None:
    """Raise ValueError unless examples are windows of characters, of which the last positions are predicted."""
    if len(shape) != 1:
        raise ValueError(
            f"{model}(shape={tuple(shape)}): needs windows of characters, whole numbers of shape (length,)"
        )
    if not 1 <= positions <= shape[0]:
        raise ValueError(f"{model}(positions={positions}): must be between 1 and {shape[0]}, the length of a window")
