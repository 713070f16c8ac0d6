"""Small networks on the 8x8 digits, one for each kind of layer that filter centring applies to.

Every function returns a module that maps (batch, 64) pixels to (batch, 10) logits; an experiment names it as, for
example, `models:cnn`. The weights are drawn from torch's default generator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE, PIXELS, CLASSES = 8, 64, 10
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class Pooled(nn.Module):
    """(B, 64) pixels averaged to an image (B, 1, side, side); side 8 is the original image."""

    def __init__(self, side: int = SIDE) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x.view(-1, 1, SIDE, SIDE), self.side)


def mlp(
    hidden: int = 128, activation: str = "relu", side: int = SIDE, norm: bool = False, bottleneck: int = 0
) -> nn.Module:
    """side^2 - hidden - 10, with LayerNorm before the activation if `norm`; `bottleneck` adds a narrow layer."""
    act = ACTIVATIONS[activation]
    parts: list[nn.Module] = [Pooled(side), nn.Flatten(), nn.Linear(side * side, hidden)]
    parts += [nn.LayerNorm(hidden)] if norm else []
    parts += [act()]
    if bottleneck:
        parts += [nn.Linear(hidden, bottleneck), act(), nn.Linear(bottleneck, hidden), act()]
    return nn.Sequential(*parts, nn.Linear(hidden, CLASSES))


def patches(height: int, width: int, channels: int = 32, activation: str = "relu") -> nn.Module:
    """Patches of height x width pixels, one linear map for all of them, and a linear head."""
    cells = (SIDE // height) * (SIDE // width)
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, channels, (height, width), stride=(height, width)),
        ACTIVATIONS[activation](),
        nn.Flatten(),
        nn.Linear(channels * cells, CLASSES),
    )


def norm_of(kind: str, channels: int) -> list[nn.Module]:
    match kind:
        case "":
            return []
        case "group":
            return [nn.GroupNorm(4, channels)]
        case "batch":
            return [nn.BatchNorm2d(channels)]
    raise ValueError(f"norm = {kind!r}: must be '', 'group' or 'batch'")


def cnn(kernel: int = 3, activation: str = "relu", norm: str = "", width: int = 16) -> nn.Module:
    """conv k x k 1 -> width, pool, conv 3x3 width -> 2 width, pool, linear; a norm before each activation."""
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, width, kernel, padding="same"),
        *norm_of(norm, width),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding="same"),
        *norm_of(norm, 2 * width),
        act(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4, CLASSES),
    )


def separable(kernel: int = 3, width: int = 16, activation: str = "relu", norm: str = "") -> nn.Module:
    """A 5x5 stem, then a depthwise k x k and a 1x1 convolution on `width` channels, pool, linear."""
    act = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, width, 5, padding=2),
        act(),
        nn.Conv2d(width, width, kernel, padding="same", groups=width),
        *norm_of(norm, width),
        act(),
        nn.Conv2d(width, 2 * width, 1),
        act(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, CLASSES),
    )


def upsampling(width: int = 16) -> nn.Module:
    """Encoder of two strided convolutions, decoder of a transposed convolution, and a linear head."""
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 16, CLASSES),
    )


class Attention(nn.Module):
    """Multi-head self-attention, written out so that clients can be trained as one stack."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5).softmax(-1)
        mixed: Tensor = self.out((scores @ v).transpose(1, 2).reshape(b, t, d))
        return mixed


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Tokens of `rows` rows of pixels, or each pixel's value 0..16 as a word if `words`; mean over tokens, linear."""

    def __init__(self, rows: int, width: int, blocks: int, words: bool) -> None:
        super().__init__()
        self.tokens = PIXELS if words else SIDE // rows
        self.embed: nn.Module = nn.Embedding(17, width) if words else nn.Linear(rows * SIDE, width)
        self.words = words
        self.place = nn.Parameter(0.02 * torch.randn(self.tokens, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 16).round().long() if self.words else x.view(len(x), self.tokens, -1)
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.place)).mean(1))
        return logits


def transformer(rows: int = 1, width: int = 32, blocks: int = 2, words: bool = False) -> nn.Module:
    return Transformer(rows, width, blocks, words)


class Words(nn.Module):
    """Each pixel's value 0..16 as a word: an embedding of `width` numbers, a linear layer, relu, a linear head."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.hidden, self.head = nn.Linear(PIXELS * width, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = self.embed((x * 16).round().long()).flatten(1)
        logits: Tensor = self.head(F.relu(self.hidden(words)))
        return logits


def words(width: int = 8, hidden: int = 64) -> nn.Module:
    return Words(width, hidden)


class Unrolled(nn.LSTM):
    """One layer of nn.LSTM written out step by step; it returns the last state and can be trained as a stack."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        w, u, bias = self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0 + self.bias_hh_l0
        h = c = x.new_zeros(len(x), self.hidden_size)
        for step in x.unbind(1):
            i, f, g, o = (step @ w.T + h @ u.T + bias).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


class Recurrent(nn.Module):
    """An LSTM over groups of rows, a linear head on its last state."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.rows = rows
        self.lstm, self.head = Unrolled(rows * SIDE, hidden, batch_first=True), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x.view(len(x), SIDE // self.rows, -1)))
        return logits


def lstm(rows: int = 1, hidden: int = 64) -> nn.Module:
    return Recurrent(rows, hidden)
