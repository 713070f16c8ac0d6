"""Frames: golden bytes, round trips, exact sizes, and what is refused."""

import re
import struct
import tracemalloc
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
    Stochastic,
    Uniform,
    WireError,
    Zstd,
    header,
    pack,
    rng,
    size,
    unpack,
)
from fedshift.models import PaperCNN
from tests import fuzz

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


def test_golden_bytes_are_read() -> None:
    read = unpack(golden(), golden_params())
    assert torch.equal(read["w"], golden_params()["w"])
    assert torch.equal(read["b"], golden_params()["b"])


def test_the_specification_walks_through_the_golden_bytes() -> None:
    page = (Path(__file__).parent.parent / "docs" / "wire.md").read_text().split("byte by byte")[1]
    lines = re.findall(r"^((?:[0-9a-f]{2} +)+)", page, re.MULTILINE)
    assert bytes.fromhex("".join(lines)) == golden()


@settings(max_examples=300)
@given(shapes, quantizers, groups, st.integers(0, 2))
def test_size_is_exact_and_the_round_trip_is_the_quantizers(
    shape: list[int],
    quantizer: Uniform | KMeans | Stochastic | Identity | Cast,
    groups: PerTensor | PerChannel | PerBlock,
    min_axes: int,
) -> None:
    codec = Codec(quantizer, groups=groups, min_axes=min_axes)
    params = {"x": torch.randn(shape, generator=torch.Generator().manual_seed(0))}
    frame = pack(codec, params, key=KEY)
    assert len(frame) == size(codec, params)
    read = unpack(frame, params)["x"]
    if codec.covers(params["x"]):
        key = rng.fold(KEY, zlib.crc32(b"x"))[None]
        assert torch.equal(read, codec.decode(codec.encode(params["x"][None], key), 1, shape)[0])
    else:
        assert torch.equal(read, params["x"])


@pytest.mark.parametrize("quantizer", [Uniform(5), KMeans(4), Identity(), Cast("bfloat16")])
@pytest.mark.parametrize("coder", [Zstd(), Range()])
@pytest.mark.parametrize("groups", [PerTensor(), PerChannel(), PerBlock(16)])
def test_entropy_coders_give_what_packing_gives(
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
            read = unpack(pack(codec, params), params)["w"]
            assert torch.equal(read, codec.decode(codec.encode(params["w"][None]), 1, (3, 100_003))[0])


def test_small_and_integer_tensors_travel_exactly(params: Params) -> None:
    read = unpack(pack(Codec(KMeans(1)), params), params)
    for name, x in params.items():
        assert read[name].dtype == x.dtype
        assert torch.equal(read[name], x) == (name not in ("conv.weight", "fc.weight", "half.weight")), name


def test_the_user_may_choose_otherwise(params: Params) -> None:
    codec = {"*.bias": Codec(Uniform(1), min_axes=1), "conv.*": Codec(KMeans(2))}
    read = unpack(pack(codec, params), params)
    assert len(set(read["fc.bias"].tolist())) == 2
    assert len(set(read["conv.weight"].flatten().tolist())) == 4
    assert torch.equal(read["fc.weight"], params["fc.weight"])
    assert len(pack(codec, params)) == size(codec, params)
    counts = {"n": torch.tensor([[0, 10, 19, 30]], dtype=torch.int16)}
    assert unpack(pack(Codec(Uniform(2), integers=True), counts), counts)["n"].tolist() == [[0, 10, 20, 30]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool])
def test_every_dtype_travels_exactly(dtype: torch.dtype) -> None:
    params = {"x": torch.tensor([0, 1, 1, 0]).to(dtype)}
    read = unpack(pack(Codec(Identity()), params), params)["x"]
    assert read.dtype == dtype
    assert torch.equal(read, params["x"])


def test_uploads_of_the_papers_cnn_have_the_promised_sizes() -> None:
    like = {name: torch.empty(x.shape) for name, x in PaperCNN().state_dict().items()}
    assert size(Codec(KMeans(4)), like) <= 1_077_936 + 256 + 512
    assert size(Codec(KMeans(8)), like) <= 2_155_872 + 4_096 + 512


@pytest.mark.parametrize("codec", [Codec(KMeans(4)), Codec(Uniform(3)), Codec(Identity()), Codec(Cast("float16"))])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_by_name(codec: Codec, bad: float) -> None:
    with pytest.raises(ValueError, match=r"fc\.weight: holds NaN"):
        pack(codec, {"fc.weight": torch.tensor([[0.0, bad]])})
    with pytest.raises(ValueError, match=r"fc\.bias: holds NaN"):
        pack(codec, {"fc.bias": torch.tensor([0.0, bad])})


def test_what_cannot_travel_is_refused_at_pack() -> None:
    with pytest.raises(ValueError, match=r"z: tensors of torch\.complex64 cannot travel"):
        pack(Codec(Identity()), {"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"f: tensors of torch\.float8_e4m3fn cannot travel"):
        pack(Codec(Identity()), {"f": torch.zeros(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="d: holds NaN or infinity"):
        pack(Codec(Uniform(3)), {"d": torch.full((2, 2), 1e300, dtype=torch.float64)})
    with pytest.raises(ValueError, match="n: holds an integer beyond 2"):
        pack(Codec(Uniform(4), integers=True), {"n": torch.tensor([[1 << 40]])})
    with pytest.raises(ValueError, match="base=-1"):
        pack(Codec(Identity()), {}, base=-1)
    with pytest.raises(ValueError, match="x: Stochastic rounds at random"):
        pack(Codec(Stochastic(4)), {"x": torch.zeros(2, 2)})


@pytest.mark.parametrize("codec", [Codec(KMeans(2)), Codec(Uniform(5), Zstd()), Codec(Identity())])
def test_every_truncation_and_every_flipped_byte_is_refused(params: Params, codec: Codec) -> None:
    frame = pack(codec, params)
    for end in range(len(frame)):
        with pytest.raises(WireError, match=r"too few|bytes, but"):
            unpack(frame[:end], params)
    for at in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            with pytest.raises(WireError):
                unpack(frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :], params)


def test_errors_say_what_was_wrong(params: Params) -> None:
    frame = pack(Codec(Uniform(4)), params)
    other = {**params, "fc.weight": torch.zeros(36, 10)}
    with pytest.raises(WireError, match=r"fc\.weight: shape \(10, 36\) where \(36, 10\) is expected"):
        unpack(frame, other)
    with pytest.raises(WireError, match=r"fc\.bias: dtype torch\.float32 where torch\.float64"):
        unpack(frame, {**params, "fc.bias": params["fc.bias"].double()})
    with pytest.raises(WireError, match="the frame has 9 tensors, the model 10"):
        unpack(frame, {**params, "extra": torch.zeros(1)})
    with pytest.raises(WireError, match=r"missing \['extra'\]"):
        unpack(frame, {"extra" if name == "mask" else name: x for name, x in params.items()})
    with pytest.raises(WireError, match="begins with b'PK"):
        unpack(b"PK\x03\x04" + frame[4:], params)
    with pytest.raises(WireError, match="version 2; this program reads version 1"):
        unpack(frame[:4] + b"\x02\x00" + frame[6:], params)
    with pytest.raises(WireError, match="checksum"):
        unpack(frame[:-1] + bytes([frame[-1] ^ 1]), params)
    with pytest.raises(WireError, match="unknown flags"):
        unpack(fuzz.mend(frame[:6] + b"\x00\x80" + frame[8:]), params)


def test_a_frame_that_claims_terabytes_is_refused_without_allocating() -> None:
    """The frame's shape is made 2^31 x 2^31, and its codes 2^62 bytes; the model's is 2 x 3."""
    frame = golden()
    for claim in (
        frame.replace(struct.pack("<II", 2, 3), struct.pack("<II", 1 << 31, 1 << 31)),
        frame.replace(struct.pack("<Q", 2), struct.pack("<Q", 1 << 62)),
        frame[:28] + struct.pack("<I", (1 << 32) - 1) + frame[32:],
    ):
        assert claim != frame
        tracemalloc.start()
        with pytest.raises(WireError):
            unpack(fuzz.mend(claim), golden_params())
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


def test_an_index_beyond_its_codebook_is_refused() -> None:
    """Three values, so three means, and 2-bit codes: code 3 is beyond them."""
    params = {"x": torch.tensor([[5.0, 6.0, 7.0]])}
    frame = pack(Codec(KMeans(2)), params)
    codes = len(frame) - 5
    assert frame[codes] == 0b10_01_00
    with pytest.raises(WireError, match="x: code 3 is beyond a codebook of 3"):
        unpack(fuzz.mend(frame[:codes] + bytes([0b11_01_00]) + frame[codes + 1 :]), params)
    with pytest.raises(WireError, match="x: the bits after the last code are not zero"):
        unpack(fuzz.mend(frame[:codes] + bytes([0b01_10_01_00]) + frame[codes + 1 :]), params)


def test_a_cast_integer_that_is_not_finite_is_refused() -> None:
    params = {"n": torch.tensor([[1, 2]])}
    frame = pack(Codec(Cast("float16"), integers=True), params)
    assert torch.equal(unpack(frame, params)["n"], params["n"])
    with pytest.raises(WireError, match="n: holds NaN"):
        unpack(fuzz.mend(frame[:-8] + b"\x00\x7e\x00\x7c" + frame[-4:]), params)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800000])  # NaN, infinity
def test_numbers_that_are_not_finite_are_refused(bits: int) -> None:
    for codec in Codec(KMeans(1)), Codec(Identity()):
        params = {"x": torch.tensor([[0.5, 1.5]])}
        frame = pack(codec, params).replace(struct.pack("<f", 1.5), struct.pack("<I", bits))
        with pytest.raises(WireError, match="x: holds NaN, infinity"):
            unpack(fuzz.mend(frame), params)


def test_mutated_frames_are_refused_or_harmless() -> None:
    seen = fuzz.run(seed=0, mutations=40_000)
    assert seen["refused"] > 20_000
    assert seen["read"] > 1_000
