"""docs/wire.md is complete: a reader written from it alone decodes every frame as unpack does."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedshift import (
    BitPack,
    Cast,
    Codec,
    Identity,
    KMeans,
    Params,
    PerBlock,
    PerChannel,
    PerTensor,
    RandomStep,
    Range,
    Step,
    Stochastic,
    Ternary,
    Uniform,
    Zstd,
    header,
    pack,
    unpack,
)
from fedshift.codecs import QSGD, FixedCode, Hadamard, Normal, Sign, TopK
from fedshift.codecs.base import Coder, Groups, Quantizer
from fedshift.core import rng
from fedshift.wire.plan import layout
from tests import page_reader

KEY = rng.key(0, "page")
QUANTIZERS: list[Quantizer] = [
    Identity(),
    *(Uniform(bits) for bits in (1, 3, 8)),
    *(KMeans(bits) for bits in (1, 4, 6)),
    *(Stochastic(bits) for bits in (2, 5)),
    Cast("float16"),
    Cast("bfloat16"),
    *(Step(2), Step(5, step=0.5), Step(rate=0.6)),
    *(RandomStep(3, rate=1.5), RandomStep()),
    *(Ternary(), Ternary(keep=0.4)),
    *(QSGD(1), QSGD(5, norm="max"), QSGD(127)),
    Sign(),
    *(Normal(bits) for bits in (1, 2, 5)),
    *(FixedCode(bits) for bits in (1, 2, 4)),
    *(TopK(KMeans(2), 0.3), TopK(QSGD(3), 0.5), TopK(Sign()), TopK(FixedCode(3), 0.2)),
]
CODERS: list[Coder] = [BitPack(), Zstd(), Range()]
GROUPS: list[Groups] = [PerTensor(), PerChannel(), PerBlock(7)]


@pytest.fixture
def model() -> Params:
    """Every dtype, tensors without values, small ones, and one with a buffer of its own."""
    g = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(41, 100, generator=g),
        "small": torch.randn(9, 11, generator=g),
        "empty": torch.zeros(3, 0),
        "bias": torch.randn(6, generator=g),
        "number": torch.tensor(2.5),
        "half": torch.randn(5, 7, generator=g).half(),
        "brain": torch.randn(5, 7, generator=g).bfloat16(),
        "wide": torch.randn(5, 7, generator=g).double(),
        "ints": torch.randint(-100, 100, (4, 5), generator=g),
        "bytes": torch.randint(0, 200, (4, 5), generator=g).to(torch.uint8),
        "shorts": torch.randint(-100, 100, (4, 5), generator=g).to(torch.int16),
        "mask": torch.tensor([[True, False, True]]),
        "very long name, über": torch.randn(2, 3, 4, generator=g),
    }


def as_numpy(x: torch.Tensor) -> NDArray[np.generic]:
    found: NDArray[np.generic] = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    return found


def check(frame: bytes, model: Params) -> None:
    read = page_reader.read(frame, [page_reader.Tensor(*tensor) for tensor in layout(model)])
    expected = unpack(frame, model)
    assert sorted(read.tensors) == sorted(model)
    for name, x in expected.items():
        mine, ours = read.tensors[name], as_numpy(x)
        assert (mine.dtype, mine.shape) == (ours.dtype, ours.shape), name
        assert mine.tobytes() == ours.tobytes(), name
    found = header(frame)
    assert (read.update, read.reset, read.lossy) == (found.update, found.reset, found.lossy)
    assert (read.run, read.base, read.client, read.examples) == (found.run, found.base, found.client, found.examples)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_frames_of_every_codec_are_decoded_as_by_unpack(
    quantizer: Quantizer, coder: Coder, groups: Groups, model: Params
) -> None:
    weights, everything = Codec(quantizer, coder, groups), Codec(quantizer, coder, groups, min_axes=0, integers=True)
    check(pack(weights, model, update=True, client=200, described=True, key=KEY), model)
    check(pack(everything, model, reset=True, base=300, examples=1 << 40, run=1 << 63, key=KEY), model)


@pytest.mark.parametrize("groups", [PerTensor(), PerBlock(7)])
@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("quantizer", [Normal(1), Uniform(3), QSGD(4), TopK(KMeans(2), 0.3)])
def test_rotated_frames_are_decoded_as_by_unpack(
    quantizer: Quantizer, coder: Coder, groups: Groups, model: Params
) -> None:
    model = {"odd": torch.randn(1, 7), "even": torch.randn(3, 4), "blocks": torch.randn(50, 1000)} | model
    for least, integers in ((2, False), (0, True)):
        codec = Codec(quantizer, coder, groups, Hadamard(), least, integers)
        check(pack(codec, model, client=1, key=KEY), model)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_of_the_page_are_those_of_the_quantizers(bits: int) -> None:
    for number, quantizer, width in ((10, Normal(bits), 1), (11, FixedCode(bits), 0)):
        mine = page_reader.table((number, bytes([bits])), 1000, np.ones(width, np.float32))
        assert mine.tolist() == quantizer.table(torch.ones(1, width))[0].tolist()


def test_frames_of_many_codecs_are_decoded_as_by_unpack(model: Params) -> None:
    """Several runs of codecs, and buffers that are shared by tensors which do not follow each other."""
    step, means = Codec(Step(rate=0.8), Range(), min_axes=0), Codec(KMeans(3), Zstd(), min_axes=0)
    exact = Codec(Identity(), Range())
    chosen = {"large": means, "small": step, "bias": step, "half": means, "brain": step, "wide": exact}
    for described in (False, True):
        check(pack(chosen, model, client=0, described=described), model)
    backwards = dict(reversed(model.items()))
    check(pack(chosen, backwards, described=True), model)


def test_a_frame_without_tensors(model: Params) -> None:
    check(pack(Codec(Identity()), {}), {})
    check(pack(Codec(Uniform(3)), {"empty": model["empty"]}, described=True), {"empty": model["empty"]})
