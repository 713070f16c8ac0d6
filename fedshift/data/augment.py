"""The paper's augmentation: a random crop of the padded image, flipped with probability 1/2."""

import torch
from torch import Tensor

from fedshift.core import rng


def crop_and_flip(x: Tensor, keys: Tensor, padding: int = 4) -> Tensor:
    """out[c, h, w] = x[c, h + dy, w + dx], or x[c, h + dy, W - 1 - w + dx] when flipped; black outside of x.

    x (..., C, H, W), keys int64 (...), one per image. dy and dx are uniform on -padding .. padding, and the flip
    has probability 1/2. All three depend only on the key of the image, so the result is the same on any device
    and in any stack. Black is 0, so crop before normalising.

    >>> x = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    >>> crop_and_flip(x, rng.key(0, "crop", torch.tensor([5])), padding=1).tolist()
    [[[[5, 6, 0], [8, 9, 0], [0, 0, 0]]]]
    """
    if keys.shape != x.shape[:-3]:
        raise ValueError(
            f"crop_and_flip: images (..., C, H, W) of shape {tuple(x.shape)} need keys of shape "
            f"{tuple(x.shape[:-3])}, got {tuple(keys.shape)}"
        )
    return cropped(x, draws(keys, padding), padding)


def draws(keys: Tensor, padding: int = 4) -> Tensor:
    """Draw dy, dx and flip for each key: int64 (..., 3)."""
    if padding < 0:
        raise ValueError(f"crop_and_flip(padding={padding}): padding must be 0 or more")
    draw = (rng.uniform(keys.reshape(-1), 3) * 2**24).long()  # (n, 3): integers, so nothing is rounded
    moves = (draw[:, :2] * (2 * padding + 1) >> 24) - padding
    return torch.cat([moves, draw[:, 2:] >> 23], dim=1).view(*keys.shape, 3)


def cropped(x: Tensor, drawn: Tensor, padding: int = 4) -> Tensor:
    """Crop and flip images by these draws (..., 3), none of which exceeds the padding."""
    c, h, w = x.shape[-3:]
    wide = w + 2 * padding
    padded = torch.nn.functional.pad(x.reshape(-1, c, h, w), (padding,) * 4)  # (n, C, H + 2p, W + 2p)
    dy, dx, flip = drawn.reshape(-1, 3).unbind(1)
    first, step = dx + padding + flip * (w - 1), 1 - 2 * flip
    column = first[:, None] + step[:, None] * torch.arange(w, device=x.device)  # (n, W)
    row = (dy[:, None] + padding + torch.arange(h, device=x.device)) * wide  # (n, H)
    index = (row[:, :, None] + column[:, None, :]).view(-1, 1, h * w).expand(-1, c, -1)
    return padded.flatten(2).gather(2, index).view(x.shape)
