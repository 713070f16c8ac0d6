"""Groups and whole codecs, alone and stacked."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift import Cast, Codec, Identity, KMeans, PerBlock, PerChannel, PerTensor, Stochastic, Uniform

SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=4)
GROUPS = st.one_of(st.just(PerTensor()), st.just(PerChannel()), st.integers(1, 20).map(PerBlock))
QUANTIZERS = [Uniform(3), KMeans(3), Stochastic(3), Cast("float16"), Cast("bfloat16"), Identity()]


@given(SHAPES, GROUPS)
def test_segments_cover_the_tensor(shape: list[int], groups: PerTensor | PerChannel | PerBlock) -> None:
    assert sum(rows * n for rows, n in groups.segments(shape)) == math.prod(shape)
    assert all(rows and n for rows, n in groups.segments(shape))


def test_channels_and_blocks() -> None:
    assert PerChannel().segments((4, 3, 5)) == [(4, 15)]
    assert PerBlock(8).segments((4, 5)) == [(2, 8), (1, 4)]
    assert PerTensor().segments((4, 5)) == [(1, 20)]


@given(SHAPES, GROUPS, st.sampled_from(QUANTIZERS))
def test_a_stack_decodes_to_the_same_values_as_its_clients_alone(
    shape: list[int],
    groups: PerTensor | PerChannel | PerBlock,
    quantizer: Uniform | KMeans | Stochastic | Cast | Identity,
) -> None:
    codec = Codec(quantizer, groups=groups)
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(3)
    stacked = codec.decode(codec.encode(x, keys), 3, shape)
    assert stacked.shape == x.shape
    for i in range(3):
        alone = codec.decode(codec.encode(x[i : i + 1], keys[i : i + 1]), 1, shape)
        assert torch.equal(stacked[i], alone[0])
    if not quantizer.lossy:
        assert torch.equal(stacked, x)


def test_biases_and_integers_are_sent_exactly_by_default() -> None:
    codec = Codec(Uniform(4))
    assert codec.covers(torch.zeros(2, 2))
    assert not codec.covers(torch.zeros(2))
    assert not codec.covers(torch.zeros(2, 2, dtype=torch.int64))
    assert Codec(Uniform(4), min_axes=0).covers(torch.zeros(()))
    assert Codec(Uniform(4), integers=True).covers(torch.zeros(2, 2, dtype=torch.int64))


def test_casts_round_as_torch_does() -> None:
    x = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Cast("float16").decode(*Cast("float16").encode(x)), x.half().float())
    assert torch.equal(Cast("bfloat16").decode(*Cast("bfloat16").encode(x)), x.bfloat16().float())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"PerBlock\(n=0\): n must be between"):
        PerBlock(0)
    with pytest.raises(ValueError, match=r"Cast.*must be 'float16' or 'bfloat16'"):
        Cast("float8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too large for float16"):
        Cast("float16").encode(torch.tensor([[1e6]]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        Identity().encode(torch.tensor([[float("nan")]]))
