"""On a GPU: the same draws, the same codes, the same bytes."""

import pytest
import torch

from fedshift import (
    BitPack,
    Cast,
    Codec,
    Identity,
    KMeans,
    Mean,
    Params,
    PerChannel,
    RandomStep,
    Range,
    Step,
    Stochastic,
    Ternary,
    Uniform,
    pack,
    unpack,
)
from fedshift.codecs import Quantizer
from fedshift.core import rng
from tests.cuda import without_waiting
from tests.federations import Normed, federation, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
QUANTIZERS: list[Quantizer] = [
    Uniform(1),
    Uniform(4),
    Uniform(8),
    KMeans(4),
    KMeans(8),
    KMeans(8, exact=True),
    Stochastic(3),
    KMeans(3, random=True),
    Step(rate=0.5),
    RandomStep(rate=0.5),
    Ternary(),
]
CASTS: list[Quantizer] = [Cast("float16"), Cast("bfloat16"), Identity()]


@pytest.mark.parametrize("quantizer", [*QUANTIZERS, *CASTS])
@pytest.mark.parametrize("n", [100, 5_000, 200_000])
def test_codes_and_side_are_those_of_the_cpu(quantizer: Quantizer, n: int) -> None:
    x, keys = torch.randn(3, n, generator=torch.Generator().manual_seed(0)), rng.key(0, "cuda", torch.arange(3))
    codes, side = quantizer.encode(x, keys)
    on_gpu, its_side = quantizer.encode(x.cuda(), keys.cuda())
    assert on_gpu.is_cuda
    assert its_side.is_cuda
    assert torch.equal(on_gpu.cpu(), codes)
    assert torch.equal(its_side.cpu(), side)
    assert torch.equal(quantizer.decode(on_gpu, its_side).cpu(), quantizer.decode(codes, side))


@pytest.mark.parametrize("quantizer", [*QUANTIZERS, *CASTS])
def test_frames_are_those_of_the_cpu(params: Params, quantizer: Quantizer) -> None:
    gpu = {name: x.cuda() for name, x in params.items()}
    for codec in Codec(quantizer), Codec(quantizer, groups=PerChannel()):
        frame = pack(codec, gpu, key=rng.key(0, "cuda"))
        assert frame == pack(codec, params, key=rng.key(0, "cuda"))
        read, expected = unpack(frame, gpu), unpack(frame, params)
        mean = Mean(gpu)
        mean.add(frame)
        averaged = mean.result()
        for name in params:
            assert read[name].is_cuda
            assert torch.equal(read[name].cpu(), expected[name])
            assert torch.allclose(averaged[name].cpu().double(), expected[name].double())


def test_estimated_lengths_are_those_of_the_cpu_and_nothing_waits_for_the_gpu() -> None:
    codes = torch.randint(0, 256, (3, 100_000), generator=torch.Generator().manual_seed(0)) ** 3 >> 16
    counts = torch.stack([torch.bincount(row, minlength=256) for row in codes])
    on_gpu = counts.cuda()
    coders: tuple[BitPack | Range, ...] = BitPack(), Range()
    with without_waiting():
        estimates = [coder.estimate(on_gpu) for coder in coders]
    for coder, estimate in zip(coders, estimates, strict=True):
        assert estimate.is_cuda
        assert torch.allclose(estimate.cpu(), coder.estimate(counts), rtol=1e-12)


def test_nan_is_refused() -> None:
    for quantizer in (*QUANTIZERS, *CASTS):
        with pytest.raises(ValueError, match="NaN"):
            quantizer.encode(torch.full((1, 10_000), float("nan")).cuda(), torch.zeros(1, dtype=torch.int64).cuda())


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold"])
def test_a_round_is_the_cpus_within_rounding(algorithm: str) -> None:
    """The same draws, so the same batches: weights differ by rounding alone."""
    trained = []
    for device in ("cpu", "cuda"):
        fed = federation(algorithm={"name": algorithm}, engine={"device": device}, train={"clip": 1.0})
        trained.append(train(fed, rounds=2)[0].out)
    for name, x in trained[0].params.items():
        torch.testing.assert_close(trained[1].params[name], x, rtol=0, atol=1e-4)


def test_dropout_and_batch_norm_train_and_repeat() -> None:
    fed = federation(Normed(), engine={"device": "cuda"}, uplink={"bits": "32+4", "feedback": True})
    first, second = (train(fed)[0].out.params for _ in range(2))
    for name, x in first.items():
        torch.testing.assert_close(second[name], x, rtol=0, atol=1e-4)
