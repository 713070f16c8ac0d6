"""Groups and whole codecs, alone and stacked."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift import Cast, Codec, Identity, KMeans, PerBlock, PerChannel, PerTensor, Stochastic, Ternary, Uniform
from fedshift.codecs.codec import counts, counts_by_lanes

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


def test_encoding_gives_codes_and_side_data_of_each_segment() -> None:
    """Blocks of 4 of nine values: two full ones, and one of a single value, for each of two clients."""
    x = torch.arange(18.0).view(2, 3, 3)
    coded = Codec(Ternary(keep=0.5), groups=PerBlock(4)).encode(x)
    assert coded.seeds is None
    assert [(tuple(codes.shape), tuple(side.shape)) for codes, side in coded.parts] == [
        ((4, 4), (4, 2)),
        ((2, 1), (2, 2)),
    ]
    assert coded.parts[1][1].tolist() == [[8.0, 0.0], [17.0, 0.0]]


@given(st.integers(1, 4), st.integers(1, 256), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), min_size=1))
def test_counts_are_those_of_each_stacked_tensor(stack: int, levels: int, segments: list[tuple[int, int]]) -> None:
    g = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, levels, (stack * rows, n), generator=g, dtype=torch.uint8) for rows, n in segments]
    found = counts(parts, stack, levels)
    assert (found.dtype, found.shape) == (torch.int64, (stack, levels))
    for k in range(stack):
        mine = torch.cat([part.view(stack, -1)[k] for part in parts])
        assert torch.equal(found[k], torch.bincount(mine, minlength=levels))
    by_lanes = [counts_by_lanes(part.view(stack, -1), levels) for part in parts]
    assert torch.equal(found, torch.stack(by_lanes).sum(0))


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
