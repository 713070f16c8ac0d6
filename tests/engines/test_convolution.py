"""Convolutions of stacked clients as products: outputs and gradients of `conv2d`, client by client."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedshift.engines.gpu import convolution
from fedshift.engines.gpu.convolution import Products

Pair = tuple[int, int]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("outputs", [4, 90])  # fewer and more than positions
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        ((3, 3), (1, 1), (1, 1)),
        ((3, 3), (2, 2), (1, 1)),
        ((5, 5), (1, 1), (2, 2)),
        ((1, 1), (2, 2), (0, 0)),
        ((1, 1), (1, 1), (1, 1)),  # more padding than the kernel reaches
        ((3, 5), (2, 3), (0, 1)),  # positions at the end that no patch contains
        ((2, 2), (3, 3), (2, 2)),
    ],
)
def test_outputs_and_gradients_are_those_of_each_client_alone(
    kernel: Pair, stride: Pair, padding: Pair, outputs: int
) -> None:
    x, w, b = normal(3, 2, 5, 9, 8), normal(3, outputs, 5, *kernel, seed=1), normal(3, outputs, seed=2)
    with Products():
        found = vmap(lambda x, w, b: F.conv2d(x, w, b, stride, padding))(x, w, b)
    expected = torch.stack([F.conv2d(*each, stride, padding) for each in zip(x, w, b, strict=True)])
    torch.testing.assert_close(found, expected)
    dy = torch.randn_like(expected)
    grads = torch.autograd.grad(found, (x, w, b), dy), torch.autograd.grad(expected, (x, w, b), dy)
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the inputs of convolutions that are computed with products."""
    seen: list[torch.Size] = []
    columns = convolution._columns

    def counted(x: Tensor, kernel: tuple[int, ...], stride: Pair, padding: Pair) -> Tensor:
        seen.append(x.shape)
        return columns(x, kernel, stride, padding)

    monkeypatch.setattr(convolution, "_columns", counted)
    return seen


def test_layers_within_the_mode_are_products_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, x = calls(monkeypatch), normal(2, 3, 4, 6, 6).detach().float()
    layers = [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2)]
    layers.append(nn.Conv2d(4, 4, 3, padding="same"))
    for layer in layers:
        outside = vmap(layer)(x)
        with Products():
            torch.testing.assert_close(vmap(layer)(x), outside)
    assert seen == [x.shape]  # the first, with a weight that clients share
    with Products():
        torch.testing.assert_close(vmap(layers[0])(x[:, 0]), vmap(layers[0])(x)[:, 0])  # one image per client
        torch.testing.assert_close(vmap(layers[0])(x[:1]), vmap(layers[0])(x)[:1])  # one client


def test_one_client_is_not_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an evaluation, where the columns of ten thousand examples would need gigabytes."""
    seen, layer = calls(monkeypatch), nn.Conv2d(4, 4, 3)
    with Products():
        vmap(layer)(torch.zeros(1, 3, 4, 6, 6))
        layer(torch.zeros(3, 4, 6, 6))
    assert not seen


def test_autocast_casts_the_products_as_it_casts_convolutions() -> None:
    x, w, b = (
        part.detach().float().requires_grad_() for part in (normal(2, 3, 4, 6, 6), normal(2, 5, 4, 3, 3), normal(2, 5))
    )
    with torch.autocast("cpu", torch.float16), Products():
        found = vmap(F.conv2d)(x, w, b)
    assert found.dtype == torch.float16
    expected = torch.stack([F.conv2d(*each) for each in zip(x, w, b, strict=True)])
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=2e-2)
    grads = torch.autograd.grad(found.float().sum(), (x, w)), torch.autograd.grad(expected.sum(), (x, w))
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=5e-2)
