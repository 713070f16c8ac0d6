"""The GPU kernels compared with plain torch: on a GPU if there is one, else in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core import rng
from fedshift.data.augment import crop_and_flip
from fedshift.data.datasets import dataset
from fedshift.engines import Batched, Sequential
from fedshift.engines.gpu.kernels import (
    LARGEST_BATCH,
    Held,
    framed,
    images,
    levels,
    linear_sgd,
    linear_sgd_pair,
    look_ahead,
    sgd,
)
from fedshift.engines.gpu.paper_cnn import stack
from fedshift.engines.gpu.paper_cnn.convpool import arranged, conv_relu_pool, fits, fits_framed, framed_conv_relu_pool
from fedshift.engines.gpu.paper_cnn.convpool import forward as pooled_maximum
from fedshift.engines.gpu.stacked import Mapped
from fedshift.models import PaperCNN
from fedshift.rounds.engine import Task
from fedshift.rounds.uplink import read
from tests.engines.test_batched import images as images_8x8
from tests.engines.test_batched import uploads
from tests.federations import federation

NATIVE = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = torch.device("cuda" if NATIVE and not INTERPRETED else "cpu")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
running = pytest.mark.skipif(not NATIVE and not INTERPRETED, reason="in a separate process: test_in_the_interpreter")

if INTERPRETED:  # it treats bfloat16 as the integers of the same bits
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


@pytest.mark.slow
@pytest.mark.skipif(NATIVE or INTERPRETED, reason="the tests run here")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def plain(x: Tensor, w: Tensor) -> Tensor:
    """The same in torch: x (K, B, H, W, C), w (K, O, C, 5, 5) -> channels last for C < 16, else first"""
    outputs = [
        F.max_pool2d(F.relu(F.conv2d(a.movedim(-1, 1), b, padding=1)), 2, padding=1) for a, b in zip(x, w, strict=True)
    ]
    return torch.stack(outputs).movedim(2, -1) if x.shape[4] < 16 else torch.stack(outputs)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def gradients(out: Tensor, tensors: list[Tensor], grad: Tensor | None = None) -> tuple[Tensor, ...]:
    grad = torch.ones_like(out) if grad is None else grad
    return torch.autograd.grad(out, [t for t in tensors if t.requires_grad], grad)


def draw(k: int, b: int, h: int, w: int, c: int, o: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k + b + h + w + c + o)
    x = torch.randn(k, b, h, w, c, generator=g).to(HERE)
    return x, (torch.randn(k, o, c, 5, 5, generator=g) / (25 * c) ** 0.5).to(HERE)


SHAPES = [  # K, B, H, W, C, O
    (2, 3, 8, 8, 16, 16),
    (1, 1, 10, 10, 32, 64),
    (2, 3, 9, 7, 3, 16),
    (2, 1, 7, 10, 16, 32),
    (2, 2, 6, 6, 1, 16),
    (1, 1, 4, 5, 64, 16),
]
PRECISIONS = [("fp32", torch.float32, 1e-5), ("tf32", torch.float32, 2e-3), ("bf16", torch.bfloat16, 2e-2)]
CASES = [
    (shape, *p)
    for p in PRECISIONS
    for shape in (SHAPES if p[0] != "tf32" or NATIVE else SHAPES[:2] + SHAPES[3:4] + SHAPES[5:])
]


@running
@pytest.mark.parametrize(("shape", "precision", "dtype", "error"), CASES)
def test_conv_relu_pool_is_torchs(shape: tuple[int, ...], precision: str, dtype: torch.dtype, error: float) -> None:
    x, w = (t.to(dtype) for t in draw(*shape))
    assert fits(tuple(x.shape), tuple(w.shape))
    deep = x.shape[4] >= 16
    ours = [x.clone().requires_grad_(deep), w.clone().requires_grad_()]
    true = [x.double().requires_grad_(deep), w.double().requires_grad_()]
    out, expected = conv_relu_pool(ours[0], ours[1], precision), plain(true[0], true[1])
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert distance(out, expected) < error
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(HERE, dtype)
    slack = 30 if NATIVE and precision == "tf32" else 1  # where rounding changes the winner
    for a, b in zip(gradients(out, ours, grad), gradients(expected, true, grad.double()), strict=True):
        assert a.dtype == dtype
        assert distance(a, b) < error * slack


def in_frame(x: Tensor) -> Tensor:
    """x (K, B, H, W, C) with the frame of `kernels.images`"""
    k, b, h, w, c = x.shape
    out = torch.zeros(k, b, *framed(h, w), dtype=x.dtype, device=x.device)
    out[:, :, 2 : 2 + h, 2 : 2 + w, :c] = x
    return out


@running
@pytest.mark.parametrize("shape", [(2, 3, 9, 7, 3, 16), (2, 2, 6, 6, 1, 32), (1, 3, 8, 11, 4, 16)])
def test_conv_relu_pool_of_images_in_frames_is_torchs(shape: tuple[int, ...]) -> None:
    x, w = (t.to(torch.bfloat16) for t in draw(*shape))
    assert fits_framed(tuple(in_frame(x).shape), tuple(w.shape), (shape[2], shape[3]))
    ours, true = w.clone().requires_grad_(), w.double().requires_grad_()
    out, expected = framed_conv_relu_pool(in_frame(x), ours, (shape[2], shape[3])), plain(x.double(), true)
    assert out.shape == expected.shape
    assert distance(out, expected) < 2e-2
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(HERE, torch.bfloat16)
    (a,), (b,) = gradients(out, [ours], grad), gradients(expected, [true], grad.double())
    assert distance(a, b) < 2e-2


@running
def test_images_in_frames_of_another_size_are_refused() -> None:
    x, w = (t.to(torch.bfloat16) for t in draw(1, 1, 6, 6, 3, 16))
    with pytest.raises(ValueError, match="do not fit the kernels for images of 8x8"):
        framed_conv_relu_pool(in_frame(x), w, (8, 8))


@running
@pytest.mark.parametrize("channels", [3, 16])
def test_the_first_of_equal_candidates_gets_the_gradient(channels: int) -> None:
    """Integers, so that nothing is rounded, and constant images, so that all inner candidates are equal."""
    x = torch.arange(1, 5, device=HERE).view(2, 2, 1, 1, 1).expand(2, 2, 8, 9, channels).float().contiguous()
    w = torch.arange(2 * 16 * channels * 25, device=HERE).view(2, 16, channels, 5, 5).remainder(7).sub(2).float()
    x.requires_grad_(channels >= 16)
    w.requires_grad_()
    out, expected = conv_relu_pool(x, w, "fp32"), plain(x, w)
    assert torch.equal(out, expected)
    grad = torch.arange(out.numel(), device=HERE).remainder(5).view(out.shape).float()
    for a, b in zip(gradients(out, [x, w], grad), gradients(expected, [x, w], grad), strict=True):
        assert torch.equal(a, b)


@running
@pytest.mark.parametrize("channels", [1, 16])
def test_the_gradient_is_zero_if_no_output_is_positive(channels: int) -> None:
    x = torch.ones(1, 2, 6, 6, channels, device=HERE, requires_grad=channels >= 16)
    w = torch.full((1, 16, channels, 5, 5), -1.0, device=HERE, requires_grad=True)
    out, index = pooled_maximum(x.detach(), arranged(w.detach()), 16, "fp32")
    assert (index == 4).all()
    assert (out == 0).all()
    assert all((g == 0).all() for g in gradients(conv_relu_pool(x, w, "fp32"), [x, w]))


@running
def test_nan_is_propagated() -> None:
    x, w = draw(2, 1, 6, 6, 16, 16)
    w[1, 3] = float("nan")
    out = conv_relu_pool(x, w, "fp32")
    assert torch.equal(out.isnan(), plain(x, w).isnan())


@running
def test_every_element_is_written() -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty is then full of NaN
    try:
        x, w = (t.requires_grad_() for t in draw(1, 3, 7, 5, 16, 16))
        out = conv_relu_pool(x, w, "fp32")
        found = [out, *gradients(out, [x, w])]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(t.isfinite().all() for t in found)


@running
def test_the_result_of_a_client_does_not_depend_on_others() -> None:
    x, w = draw(2, 1, 8, 8, 3, 16)
    w.requires_grad_()
    alone = w.detach()[1:2].clone().requires_grad_()
    out, single = conv_relu_pool(x, w, "fp32"), conv_relu_pool(x[1:2].contiguous(), alone, "fp32")
    assert torch.equal(out[1:2], single)
    assert torch.equal(gradients(out, [w])[0][1:2], gradients(single, [alone])[0])


def test_fits_is_true_for_supported_shapes_only() -> None:
    assert fits((100, 50, 32, 32, 3), (100, 32, 3, 5, 5))
    assert fits((100, 50, 16, 16, 32), (100, 64, 32, 5, 5))
    assert not fits((100, 50, 16, 16, 32), (99, 64, 32, 5, 5))
    assert not fits((100, 50, 16, 16, 32), (100, 64, 32, 3, 3))
    assert not fits((100, 50, 16, 16, 32), (100, 48, 32, 5, 5))
    assert not fits((100, 50, 16, 16, 8), (100, 64, 8, 5, 5))
    assert not fits((100, 50, 3, 3, 3), (100, 32, 3, 5, 5))


@running
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shadowed", [False, True])
@pytest.mark.parametrize(("pulled", "moved"), [(False, False), (True, False), (False, True), (True, True)])
def test_sgd(dtype: torch.dtype, shadowed: bool, pulled: bool, moved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    w, v, g, offset = (torch.randn(3, 7, 301, generator=generator).to(HERE) for _ in range(4))
    pull = torch.tensor([0.5, 0.0, -2.0], device=HERE)
    g = g.to(dtype)
    v[1, 0, :2] = torch.tensor([float("nan"), float("inf")])
    lr = torch.tensor([0.1, 0.0, 1.0], device=HERE)
    shadow = torch.full_like(w, 9.0, dtype=torch.bfloat16) if shadowed else None
    speed = 0.9 * v.double() + g.double()
    speed += pull.double()[:, None, None] * w if pulled else 0
    speed += offset if moved else 0
    expected = w.double() - lr.double()[:, None, None] * speed
    before = w.clone()
    sgd(w, v, g, lr, 0.9, shadow, pull if pulled else None, offset if moved else None)
    assert torch.equal(w[1], before[1])
    torch.testing.assert_close(v.double(), speed, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(w[::2].double(), expected[::2], rtol=1e-6, atol=1e-6)
    if shadow is not None:
        torch.testing.assert_close(shadow.float(), w, rtol=2**-8 if HERE.type == "cuda" else 2**-7, atol=0)


def drawn_step(*shape: int) -> dict[str, Tensor]:
    """Tensors of a step of three clients with weights of this shape; the second client has finished."""
    generator = torch.Generator().manual_seed(0)
    w, v, offset = (torch.randn(3, *shape, generator=generator).to(HERE) for _ in range(3))
    lr, pull = torch.tensor([0.1, 0.0, 1.0], device=HERE), torch.tensor([0.0, 0.5, 0.25], device=HERE)
    return {"w": w, "v": v, "lr": lr, "pull": pull, "offset": offset}


def moved(of: dict[str, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
    """v and w after the step, in float64"""
    w, v, lr, pull, offset = (of[name].double() for name in ("w", "v", "lr", "pull", "offset"))
    speed = 0.9 * v + (g.double() + pull[:, None, None] * w + offset)
    return speed, w - lr[:, None, None] * speed


@running
def test_sgd_adds_a_pull_towards_zero_and_an_offset_to_the_gradient() -> None:
    step, g = drawn_step(5, 67), torch.randn(3, 5, 67, generator=torch.Generator().manual_seed(1)).to(HERE)
    speed, expected = moved(step, g)
    sgd(step["w"], step["v"], g, step["lr"], 0.9, None, step["pull"], step["offset"])
    torch.testing.assert_close(step["v"].double(), speed, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(step["w"].double(), expected, rtol=1e-5, atol=1e-5)


@running
@pytest.mark.parametrize(("examples", "outputs", "inputs"), [(5, 16, 80), (70, 72, 48)])
@pytest.mark.parametrize("adjusted", [False, True])
def test_a_linear_layers_backward_pass_and_its_step(examples: int, outputs: int, inputs: int, adjusted: bool) -> None:
    step, generator = drawn_step(outputs, inputs), torch.Generator().manual_seed(1)
    step["w"] = step["w"].bfloat16().float()  # the interpreter truncates
    if not adjusted:
        step["pull"], step["offset"] = torch.zeros_like(step["pull"]), torch.zeros_like(step["offset"])
    x, dy = (torch.randn(3, examples, n, generator=generator).to(HERE, torch.bfloat16) for n in (inputs, outputs))
    shadow, before = step["w"].bfloat16(), step["w"].clone()
    speed, expected = moved(step, dy.double().mT @ x.double())
    changes = (step["pull"], step["offset"]) if adjusted else (None, None)
    dx = linear_sgd(x, dy, step["w"], step["v"], shadow, step["lr"], 0.9, *changes)
    assert dx.dtype == torch.bfloat16
    assert distance(dx, dy.double() @ before.double()) < 1e-2
    assert distance(step["v"], speed) < 1e-6
    assert distance(step["w"], expected) < 1e-6
    assert torch.equal(step["w"][1], before[1])
    torch.testing.assert_close(shadow.float(), step["w"], rtol=2**-7, atol=0)


@running
@pytest.mark.parametrize(("pulled", "moved"), [(False, False), (True, False), (True, True)])
def test_a_pair_of_steps_is_two_steps(pulled: bool, moved: bool) -> None:
    step, generator = drawn_step(24, 48), torch.Generator().manual_seed(1)
    w, v, lr, pull = step["w"], step["v"], step["lr"], step["pull"] if pulled else None
    offset = step["offset"] if moved else None
    xs, dys = ([torch.randn(3, 5, n, generator=generator).to(HERE, torch.bfloat16) for _ in (0, 1)] for n in (48, 24))
    other, next_lr = torch.tensor([0.2, 0.0, 0.0], device=HERE), torch.tensor([0.3, 0.0, 0.5], device=HERE)
    before, twice_w, twice_v, shadow = w.clone(), w.clone(), v.clone(), w.bfloat16()
    linear_sgd(xs[0], dys[0], twice_w, twice_v, shadow, lr, 0.9, pull, offset)
    expected = linear_sgd(xs[1], dys[1], twice_w, twice_v, shadow, other, 0.9, pull, offset)
    soon, found, ahead = (torch.empty_like(shadow) for _ in range(3))
    look_ahead(twice_w, twice_v, next_lr, 0.9, soon, pull, offset)
    dx = linear_sgd_pair(Held(xs[0], dys[0], lr), xs[1], dys[1], w, v, found, ahead, other, next_lr, 0.9, pull, offset)
    for ours, theirs in (w, twice_w), (v, twice_v):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(w[1], before[1])
    for ours, theirs in (dx, expected), (found, shadow), (ahead, soon):
        assert distance(ours, theirs) < 2e-3
    known = 0.9 * v.double() + (0 if pull is None else pull.double()[:, None, None] * w.double())
    known += 0 if offset is None else offset.double()
    assert distance(ahead, w.double() - next_lr.double()[:, None, None] * known) < 1e-2


def test_a_linear_layers_step_refuses_large_batches() -> None:
    x, w = torch.zeros(1, LARGEST_BATCH + 1, 16), torch.zeros(1, 16, 16)
    with pytest.raises(ValueError, match="more than 128 examples per client"):
        linear_sgd(x, x, w, w, w, torch.zeros(1), 0.9)


@running
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_those_of_crop_and_flip(dtype: torch.dtype, channels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (9, channels, 6, 7), dtype=torch.uint8, generator=generator)
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.3, 0.4)[:channels]
    data = dataset(x, [0] * 9, x, [0] * 9, mean=mean, std=std)
    index = torch.randint(0, 9, (3, 5), generator=generator)
    keys = rng.key(0, "crop", torch.arange(15)).view(3, 5)
    steps = (rng.uniform(keys.flatten(), 3) * 2**24).long().view(3, 5, 3)
    offsets = torch.cat([(steps[..., :2] * 9 >> 24) - 4, steps[..., 2:] >> 23], -1).int()
    source, at, shifts, table = (t.to(HERE) for t in (x, index, offsets, levels(data, dtype)))
    out = images(source, at, shifts, table).cpu()
    assert out.is_contiguous()
    assert torch.equal(out, data.inputs(crop_and_flip(x[index], keys)).movedim(2, -1).to(dtype))
    assert torch.equal(images(source, at, shifts, table, frame=True).cpu(), in_frame(out))
    still = images(source, at, None, table).cpu()
    assert torch.equal(still, data.inputs(x[index]).movedim(2, -1).to(dtype))


@running
def test_the_net_of_the_papers_cnn_computes_the_same_as_the_model() -> None:
    """Two clients with different weights, with the kernels and with vmap."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    data = dataset(x, torch.arange(5), x, torch.arange(5), mean=(0.5,) * 3, std=(0.2,) * 3).to(HERE)
    task = Task(PaperCNN((3, 8, 8)).to(HERE), data, F.cross_entropy, None)
    params = {name: torch.stack([x, 0.5 * x.flip(0)]).to(HERE) for name, x in task.params.items()}
    index, drawn = torch.tensor([[0, 3], [4, 1]], device=HERE), torch.tensor([[1, -2, 1], [0, 3, 0]], device=HERE)
    found, expected = (
        net(params, net.inputs(data.x, index, drawn.int().expand(2, 2, 3)))
        for net in (stack(task, "fp32"), Mapped(task, "fp32"))
    )
    assert found.shape == (2, 2, 10)
    assert distance(found, expected) < 1e-5


@running
@pytest.mark.parametrize(("precision", "algorithm"), [("fp32", "fedavg"), ("bf16", "fedavg"), ("bf16", "fedprox")])
def test_steps_with_the_kernels_move_the_weights_as_those_of_the_sequential_engine(
    precision: str, algorithm: str
) -> None:
    """Four steps of three clients with momentum and weight decay; without a GPU, the engine is told to fuse."""
    torch.manual_seed(0)
    train: dict[str, Any] = {"cohort": 3, "epochs": 1, "batch": 3, "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    device: dict[str, Any] = {"device": HERE.type}
    rule = {"name": algorithm} | ({"mu": 0.5} if algorithm == "fedprox" else {})
    fed = federation(PaperCNN((3, 8, 8)), images_8x8(), data={"clients": 6}, train=train, engine=device, algorithm=rule)
    engine = Batched(fed.task, "fp32")
    engine.net = engine.steps.net = stack(fed.task, precision)
    engine.steps.fused = True
    start = fed.start().out.params
    for batched, expected in zip(uploads(fed, engine), uploads(fed, Sequential(fed.task, "fp32")), strict=True):
        w, reference = read(batched.frame, start), read(expected.frame, start)
        for name, x in reference.items():
            far = distance(w[name].cpu() - start[name].cpu(), x.cpu() - start[name].cpu())
            assert far < (1e-3 if precision == "fp32" else 0.25), name


@running
def test_a_held_gradient_counts_in_the_forward_pass() -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    data = dataset(x, torch.arange(5), x, torch.arange(5), mean=(0.5,) * 3, std=(0.2,) * 3).to(HERE)
    task = Task(PaperCNN((3, 8, 8)).to(HERE), data, F.cross_entropy, None)
    net = stack(task, "bf16")
    params = {
        name: torch.stack([x, 0.5 * x.flip(0)]).detach().to(HERE, torch.bfloat16) for name, x in task.params.items()
    }
    inputs = net.inputs(data.x, torch.tensor([[0, 3], [4, 1]], device=HERE), None)
    last, slopes = (torch.randn(2, 3, n).to(HERE, torch.bfloat16) for n in (256, 512))
    held = Held(last, slopes, torch.tensor([0.02, 0.05], device=HERE))
    w = params["fc1.weight"]
    after = (w.float() - held.lr[:, None, None] * (slopes.float().mT @ last.float())).to(torch.bfloat16)
    expected = net(params | {"fc1.weight": after}, inputs)
    found, products = net.cut(params | {"fc1.weight": w.requires_grad_()}, inputs, {"fc1.weight": held})
    assert products.keys() == {"fc1.weight"}
    assert distance(found, expected) < 3e-2
    assert distance(net(params, inputs), expected) > 0.2
