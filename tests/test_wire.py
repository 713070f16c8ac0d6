"""Frames: golden bytes, round trips, exact sizes."""

import re
import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift import (
    BitPack,
    Cast,
    Codec,
    Header,
    Identity,
    KMeans,
    Params,
    PerBlock,
    PerChannel,
    PerTensor,
    Range,
    Step,
    Stochastic,
    Ternary,
    Uniform,
    Zstd,
    header,
    pack,
    size,
    unpack,
)
from fedshift.core import rng
from fedshift.models import PaperCNN

KEY = rng.key(0, "test")
GOLDEN = """
46 45 44 53  01 00  05 00  6c 00 00 00 00 00 00 00  e8 03 00 00 00 00 00 00  07 00 00 00  02 00 00 00
01 00  02  77  02 00 00 00  03 00 00 00  00 01 02 00 00  00 00 00 00  02 00 00 00 00 00 00 00
01 00  01  62  02 00 00 00  00 00 20 00 00  00 00 00 00  08 00 00 00 00 00 00 00
00 00 80 bf  00 00 00 40  e4 02
00 00 80 3e  00 00 00 c0
"""
quantizers = st.one_of(
    st.integers(1, 8).map(Uniform),
    st.integers(1, 8).map(KMeans),
    st.integers(1, 8).map(Stochastic),
    st.integers(1, 8).map(lambda bits: KMeans(bits, random=True)),
    st.integers(2, 8).map(Step),
    st.sampled_from([Step(rate=0.5), Ternary(), Ternary(keep=0.3)]),
    st.sampled_from([Identity(), Cast("float16"), Cast("bfloat16")]),
)
groups = st.one_of(st.just(PerTensor()), st.just(PerChannel()), st.integers(1, 20).map(PerBlock))
shapes = st.lists(st.integers(0, 6), max_size=4)


def golden() -> bytes:
    body = bytes.fromhex(GOLDEN)
    return body + struct.pack("<I", zlib.crc32(body))


def golden_params() -> Params:
    return {"w": torch.tensor([[-1.0, 0.0, 1.0], [2.0, 1.0, -1.0]]), "b": torch.tensor([0.25, -2.0])}


def test_golden_bytes() -> None:
    """docs/wire.md walks through this frame. 2-bit codes of -1 .. 2: 0 1 2 3 2 0, so 11100100 = e4 and 0010 = 02."""
    frame = pack(Codec(Uniform(2)), golden_params(), update=True, base=7, examples=1000)
    assert frame.hex(" ") == golden().hex(" ")
    assert header(frame) == Header(update=True, base=7, examples=1000, reset=False, lossy=True)


def test_golden_bytes_are_decoded() -> None:
    decoded = unpack(golden(), golden_params())
    assert torch.equal(decoded["w"], golden_params()["w"])
    assert torch.equal(decoded["b"], golden_params()["b"])


def test_the_specification_walks_through_the_golden_bytes() -> None:
    page = (Path(__file__).parent.parent / "docs" / "wire.md").read_text().split("byte by byte")[1]
    lines = re.findall(r"^((?:[0-9a-f]{2} +)+)", page, re.MULTILINE)
    assert bytes.fromhex("".join(lines)) == golden()


@settings(max_examples=300)
@given(shapes, quantizers, groups, st.integers(0, 2))
def test_size_is_exact_and_only_the_quantizer_loses_precision(
    shape: list[int],
    quantizer: Uniform | KMeans | Stochastic | Step | Ternary | Identity | Cast,
    groups: PerTensor | PerChannel | PerBlock,
    min_axes: int,
) -> None:
    codec = Codec(quantizer, groups=groups, min_axes=min_axes)
    params = {"x": torch.randn(shape, generator=torch.Generator().manual_seed(0))}
    frame = pack(codec, params, key=KEY)
    assert len(frame) == size(codec, params)
    decoded = unpack(frame, params)["x"]
    if codec.covers(params["x"]):
        key = rng.fold(KEY, zlib.crc32(b"x"))[None]
        assert torch.equal(decoded, codec.decode(codec.encode(params["x"][None], key), 1, shape)[0])
    else:
        assert torch.equal(decoded, params["x"])


@pytest.mark.parametrize("quantizer", [Uniform(5), KMeans(4), Identity(), Cast("bfloat16")])
@pytest.mark.parametrize("coder", [Zstd(), Range()])
@pytest.mark.parametrize("groups", [PerTensor(), PerChannel(), PerBlock(16)])
def test_entropy_coders_decode_to_the_same_values_as_packing(
    params: Params,
    quantizer: Uniform | KMeans | Identity | Cast,
    coder: Zstd | Range,
    groups: PerTensor | PerChannel | PerBlock,
) -> None:
    packed = unpack(pack(Codec(quantizer, BitPack(), groups), params), params)
    coded = unpack(pack(Codec(quantizer, coder, groups), params), params)
    assert all(torch.equal(packed[name], coded[name]) for name in params)
    with pytest.raises(ValueError, match="depends on the values"):
        size(Codec(quantizer, coder), params)


def test_a_large_tensor_spans_many_chunks() -> None:
    params = {"w": torch.randn(3, 100_003, generator=torch.Generator().manual_seed(0))}
    for bits in range(1, 9):
        for grouped in PerTensor(), PerChannel(), PerBlock(1000):
            codec = Codec(Uniform(bits), groups=grouped)
            decoded = unpack(pack(codec, params), params)["w"]
            assert torch.equal(decoded, codec.decode(codec.encode(params["w"][None]), 1, (3, 100_003))[0])


def test_small_and_integer_tensors_are_sent_exactly(params: Params) -> None:
    decoded = unpack(pack(Codec(KMeans(1)), params), params)
    for name, x in params.items():
        assert decoded[name].dtype == x.dtype
        assert torch.equal(decoded[name], x) == (name not in ("conv.weight", "fc.weight", "half.weight")), name


def test_small_and_integer_tensors_can_be_quantized_on_request(params: Params) -> None:
    codec = {"*.bias": Codec(Uniform(1), min_axes=1), "conv.*": Codec(KMeans(2))}
    decoded = unpack(pack(codec, params), params)
    assert len(set(decoded["fc.bias"].tolist())) == 2
    assert len(set(decoded["conv.weight"].flatten().tolist())) == 4
    assert torch.equal(decoded["fc.weight"], params["fc.weight"])
    assert len(pack(codec, params)) == size(codec, params)
    counts = {"n": torch.tensor([[0, 10, 19, 30]], dtype=torch.int16)}
    assert unpack(pack(Codec(Uniform(2), integers=True), counts), counts)["n"].tolist() == [[0, 10, 20, 30]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool])
def test_every_dtype_is_sent_exactly(dtype: torch.dtype) -> None:
    params = {"x": torch.tensor([0, 1, 1, 0]).to(dtype)}
    decoded = unpack(pack(Codec(Identity()), params), params)["x"]
    assert decoded.dtype == dtype
    assert torch.equal(decoded, params["x"])


def test_uploads_of_the_papers_cnn_have_the_documented_sizes() -> None:
    like = {name: torch.empty(x.shape) for name, x in PaperCNN().state_dict().items()}
    assert size(Codec(KMeans(4)), like) <= 1_077_936 + 256 + 512
    assert size(Codec(KMeans(8)), like) <= 2_155_872 + 4_096 + 512
