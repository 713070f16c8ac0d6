"""Crop and flip: against a loop that does it image by image, and the same in every stack."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data import crop_and_flip

KEYS = rng.key(0, "augment", torch.arange(200))
IMAGES = torch.randint(1, 256, (200, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def one_by_one(x: Tensor, keys: Tensor, padding: int) -> Tensor:
    out = []
    for image, u in zip(x, rng.uniform(keys, 3), strict=True):
        dy, dx = (int(v) for v in (u[:2].double() * (2 * padding + 1)).floor())
        c, h, w = image.shape
        black = image.new_zeros(c, h + 2 * padding, w + 2 * padding)
        black[:, padding : padding + h, padding : padding + w] = image
        crop = black[:, dy : dy + h, dx : dx + w]
        out.append(crop.flip(-1) if u[2] >= 0.5 else crop)
    return torch.stack(out)


@pytest.mark.parametrize("padding", [0, 1, 4, 10])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_equal_to_a_loop_over_images(padding: int, dtype: torch.dtype) -> None:
    x = IMAGES.to(dtype)
    out = crop_and_flip(x, KEYS, padding)
    assert out.dtype == dtype
    assert torch.equal(out, one_by_one(x, KEYS, padding))


def test_any_stack_gives_the_same_images() -> None:
    together = crop_and_flip(IMAGES, KEYS)
    assert torch.equal(together[70:80], crop_and_flip(IMAGES[70:80], KEYS[70:80]))
    stacked = crop_and_flip(IMAGES.view(4, 50, 3, 9, 7), KEYS.view(4, 50))
    assert torch.equal(stacked.view_as(together), together)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_same_images() -> None:
    assert torch.equal(crop_and_flip(IMAGES.cuda(), KEYS.cuda()).cpu(), crop_and_flip(IMAGES, KEYS))


def test_offsets_and_flips_are_even() -> None:
    """9 offsets and 2 directions, 18 outcomes of 20,000 draws: 1,111 each, within five standard deviations."""
    x = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4).expand(20_000, 1, 4, 4)
    out = crop_and_flip(x, rng.key(1, "augment", torch.arange(20_000)), padding=1)[:, 0, 1, 1:3].tolist()
    counts = torch.tensor([*Counter(map(tuple, out)).values()])
    assert len(counts) == 18
    assert ((counts - 20_000 / 18).abs() < 5 * (20_000 / 18) ** 0.5).all()


def test_without_padding_only_the_flip_is_left() -> None:
    out = crop_and_flip(IMAGES, KEYS, padding=0)
    kept = (out == IMAGES).flatten(1).all(1)
    turned = (out == IMAGES.flip(-1)).flatten(1).all(1)
    assert (kept ^ turned).all()
    assert 60 < int(turned.sum()) < 140


def test_an_empty_batch_stays_empty() -> None:
    assert crop_and_flip(IMAGES[:0], KEYS[:0]).shape == (0, 3, 9, 7)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padding=-1\): padding must be 0 or more"):
        crop_and_flip(IMAGES, KEYS, padding=-1)
    with pytest.raises(ValueError, match=r"need keys of shape \(200,\), got \(199,\)"):
        crop_and_flip(IMAGES, KEYS[1:])
