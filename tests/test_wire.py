"""Frames: golden bytes, round trips, exact sizes."""

import hashlib
import re
import struct
import sys
import zlib
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

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
    Mean,
    Params,
    PerBlock,
    PerChannel,
    PerTensor,
    Range,
    Step,
    Stochastic,
    Ternary,
    Uniform,
    WireError,
    Zstd,
    header,
    pack,
    size,
    unpack,
)
from fedshift.codecs.base import varint
from fedshift.codecs.exact import EXACT
from fedshift.core import rng
from fedshift.models import PaperCNN
from fedshift.rounds.uplink import named
from fedshift.wire.frame import Cursor, parse

if TYPE_CHECKING:
    from _typeshed import TraceFunction

KEY = rng.key(0, "test")
RUN = 0x0123456789ABCDEF
GOLDEN = """
46 45 44 53  02  05  ef cd ab 89 67 45 23 01  07  04  e8 07
4b fc ac 96 e4 2e b3 c3
0b  01  01 01 02  00 00  00  01 01  01 00
00 00 80 bf  00 00 00 40
e4 02  00 00 80 3e  00 00 00 c0
"""
GOLDEN_LAYOUT = "0c  02  01 77  00  02  02 03  01 62  00  01  02"  # and its length
GOLDEN_SHARED = """
46 45 44 53  02  04  00 00 00 00 00 00 00 00  00  00  00
f8 72 64 00 34 13 f1 05
09  01  07 01 02  03 00  00  02 01
09
00 00 c0 3f  00 00 00 00  00 00 00 00  00 00 00 00
02  39 20 00  01  97 df 1f 2e
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


def with_crc(body: str) -> bytes:
    data = bytes.fromhex(body)
    return data + struct.pack("<I", zlib.crc32(data))


def golden() -> bytes:
    return with_crc(GOLDEN)


def golden_params() -> Params:
    return {"w": torch.tensor([[-1.0, 0.0, 1.0], [2.0, 1.0, -1.0]]), "b": torch.tensor([0.25, -2.0])}


def test_golden_bytes() -> None:
    """docs/wire.md walks through this frame. 2-bit codes of -1 .. 2: 0 1 2 3 2 0, so 11100100 = e4 and 0010 = 02."""
    frame = pack(Codec(Uniform(2)), golden_params(), update=True, base=7, examples=1000, run=RUN, client=3)
    assert frame.hex(" ") == golden().hex(" ")
    assert header(frame) == Header(update=True, base=7, examples=1000, reset=False, lossy=True, run=RUN, client=3)


def test_a_described_frame_contains_the_layout_instead_of_its_digest() -> None:
    start, end = GOLDEN.split("4b fc ac 96 e4 2e b3 c3")
    body = start.replace("02  05", "02  0d") + GOLDEN_LAYOUT + end
    frame = pack(
        Codec(Uniform(2)), golden_params(), update=True, base=7, examples=1000, run=RUN, client=3, described=True
    )
    assert frame.hex(" ") == with_crc(body).hex(" ")
    assert hashlib.sha256(bytes.fromhex(GOLDEN_LAYOUT)[1:]).hexdigest().startswith("4bfcac96e42eb3c3")


def test_golden_bytes_of_a_shared_buffer() -> None:
    """Forty ternary codes of two tensors, all zero but the sixth."""
    params = {"u": torch.zeros(4, 5), "v": torch.zeros(4, 5)}
    params["u"][1, 0] = 1.5
    frame = pack(Codec(Ternary(), Range()), params)
    assert frame.hex(" ") == with_crc(GOLDEN_SHARED).hex(" ")
    decoded = unpack(frame, params)
    assert all(torch.equal(decoded[name], params[name]) for name in params)


def test_golden_bytes_are_decoded() -> None:
    decoded = unpack(golden(), golden_params())
    assert torch.equal(decoded["w"], golden_params()["w"])
    assert torch.equal(decoded["b"], golden_params()["b"])


def test_the_specification_walks_through_the_golden_bytes() -> None:
    page = (Path(__file__).parent.parent / "docs" / "wire.md").read_text().split("byte by byte")[1]
    blocks = [re.findall(r"^((?:[0-9a-f]{2} +)+)", block, re.MULTILINE) for block in page.split("```text")[1:]]
    found = [bytes.fromhex("".join(lines)) for lines in blocks]
    assert found == [golden(), bytes.fromhex(GOLDEN_LAYOUT), with_crc(GOLDEN_SHARED)]


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


def test_a_header_is_that_of_the_task_or_the_difference_is_named() -> None:
    found = header(pack(Codec(Identity()), golden_params(), run=RUN, base=7, client=3))
    found.check(RUN, 7, 3)
    with pytest.raises(WireError, match=r"^the frame belongs to run 0123456789abcdef, not 000000000000002a$"):
        found.check(42, 7, 3)
    with pytest.raises(WireError, match=r"^the frame belongs to round 7, not 8$"):
        found.check(RUN, 8, 3)
    with pytest.raises(WireError, match=r"^the frame belongs to client 3, not client 4$"):
        found.check(RUN, 7, 4)
    with pytest.raises(WireError, match=r"^the frame belongs to client 3, not no client$"):
        found.check(RUN, 7, None)
    anonymous = header(pack(Codec(Identity()), golden_params()))
    anonymous.check(0, 0, None)
    with pytest.raises(WireError, match=r"^the frame belongs to no client, not client 0$"):
        anonymous.check(0, 0, 0)


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.none() | st.integers(0, 2**64 - 2),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_headers_of_all_numbers_are_read_as_written_and_counted_by_size(
    run: int, base: int, client: int | None, examples: int, flag: bool
) -> None:
    made = Header(flag, base, examples, not flag, run=run, client=client)
    frame = pack(
        EXACT, golden_params(), update=flag, base=base, examples=examples, reset=not flag, run=run, client=client
    )
    assert header(frame) == made
    assert len(frame) == size(EXACT, golden_params(), made)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 16_383, 16_384, 2**32, 2**63, 2**64 - 1])
def test_varints_have_one_form(number: int) -> None:
    data = varint(number)
    assert len(data) == max(1, -(-number.bit_length() // 7))
    assert Cursor(memoryview(data), 0).varint("test") == number
    longer = data[:-1] + bytes([data[-1] | 128, 0])
    for wrong in (longer, data[:-1] + bytes([data[-1] | 128]), b"\xff" * 9 + b"\x02", b"\x80" * 10 + b"\x01"):
        with pytest.raises(WireError, match="a number of the test is truncated, not in its shortest form or too large"):
            Cursor(memoryview(wrong), 0).varint("test")


def test_described_frames_may_have_another_order_of_tensors(params: Params) -> None:
    backwards = dict(reversed(params.items()))
    codec = Codec(Uniform(6), Range())
    decoded = unpack(pack(codec, params), params)
    described = pack(codec, backwards, described=True)
    assert all(torch.equal(x, decoded[name]) for name, x in unpack(described, params).items())
    with pytest.raises(WireError, match="names, shapes or dtypes of their tensors differ"):
        unpack(pack(codec, backwards), params)
    mean = Mean(params)
    mean.add(described)
    with pytest.raises(WireError, match="names, shapes or dtypes of their tensors differ"):  # whatever was read before
        mean.add(pack(codec, backwards))


def test_small_tensors_share_a_buffer_and_its_table() -> None:
    g = torch.Generator().manual_seed(0)
    params = {f"layer{i}": torch.randn(8, 8, generator=g) for i in range(40)}
    codec = Codec(Step(rate=0.8), Range())
    apart = sum(len(pack(codec, {name: x})) - len(pack(codec, {name: x[:0]})) for name, x in params.items())
    frame, none = pack(codec, params), pack(codec, {name: x[:0] for name, x in params.items()})
    assert len(frame) - len(none) < 0.75 * apart
    side = 40 * 3 * 4
    assert len(frame) - len(none) - side < 40 * 64 * 0.8 / 8 * 1.2  # codes: near their entropy
    for name, x in unpack(frame, params).items():
        assert torch.equal(x, unpack(pack(codec, {name: params[name]}), {name: x})[name])


def test_codecs_that_differ_only_for_the_encoder_share_a_buffer(params: Params) -> None:
    chosen = {
        "conv.weight": Codec(Step(rate=0.5), Range()),
        "fc.*": Codec(Step(rate=1.5), Range(), min_axes=1),
        "half.weight": Codec(Step(step=1.0), Range()),
    }
    frame = pack(chosen, params)
    decoded = unpack(frame, params)
    for name, codec in (("conv.weight", chosen["conv.weight"]), ("fc.bias", chosen["fc.*"])):
        assert torch.equal(decoded[name], unpack(pack({name: codec}, params), params)[name])
    levels = {"conv.weight": Codec(KMeans(3), Zstd(1)), "fc.weight": Codec(KMeans(3, exact=True), Zstd(19))}
    assert unpack(pack(levels, params), params).keys() == params.keys()


def test_a_shared_buffer_has_the_levels_of_its_largest_codebook() -> None:
    """Three means and sixteen: codes of the first stay below 3, which a reader checks."""
    params = {"a": torch.tensor([[5.0, 6.0, 7.0]]), "b": torch.arange(300.0).view(3, 100)}
    frame = pack(Codec(KMeans(4), Zstd()), params)
    decoded = unpack(frame, params)
    assert torch.equal(decoded["a"], params["a"])
    assert len(set(decoded["b"].flatten().tolist())) == 16


def test_tensors_without_values_have_codecs_and_nothing_else() -> None:
    empty = {"a": torch.zeros(0, 4), "b": torch.zeros(3, 0), "c": torch.zeros(0, dtype=torch.int64)}
    for codec in (
        EXACT,
        Codec(Uniform(3)),
        Codec(KMeans(2), Range(), PerChannel()),
        Codec(Step(), Zstd(), PerBlock(3)),
    ):
        for described in (False, True):
            frame = pack(codec, empty, described=described)
            assert all(torch.equal(x, empty[name]) for name, x in unpack(frame, empty).items())
            assert parse(frame).rest.nbytes == 0
            mean = Mean(empty)
            mean.add(frame)
            assert all(torch.equal(x, empty[name]) for name, x in mean.result().items())
    assert unpack(pack(EXACT, {}), {}) == {}


@pytest.mark.parametrize(
    ("shapes", "most"),
    [
        ([(128, 64), (128,), (10, 128), (10,)], 1080),  # the MLP of the digits: 961 bytes at 0.8 bits
        ([(10, 60), (10,)], 150),
    ],
)
def test_lean_frames_of_small_models_are_small(shapes: list[tuple[int, ...]], most: int) -> None:
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        update = {f"layer{i}": 1e-3 * torch.randn(shape, generator=g) for i, shape in enumerate(shapes)}
        key = rng.key(seed, "upload")
        frame = pack(named("lean").codec, update, update=True, base=100, examples=60, run=RUN, client=7, key=key)
        assert len(frame) <= most


def operations(tensors: int) -> int:
    """Lines of Python that pack and unpack execute for frames of this many tensors."""
    codecs = [Codec(Step(rate=0.8), Range(), min_axes=1), Codec(KMeans(2), min_axes=1), EXACT]
    params = {f"layer{i}": torch.arange(1.0 + i % 5) for i in range(tensors)}
    chosen = {name: codecs[i % 3] for i, name in enumerate(params)}
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> "TraceFunction":
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        decoded = unpack(pack(chosen, params, described=True), params)
    finally:
        sys.settrace(before)
    assert decoded.keys() == params.keys()
    return lines


def test_the_work_of_a_frame_is_proportional_to_its_number_of_tensors() -> None:
    some, more = operations(200), operations(800)
    assert more <= 4.2 * some


def test_frames_of_ten_thousand_tensors() -> None:
    params = {f"layer{i}": torch.full((3,), float(i)) for i in range(10_000)}
    for codec in (EXACT, Codec(Identity(), Range(), min_axes=1)):  # a buffer each, and one buffer for all
        decoded = unpack(pack(codec, params), params)
        assert torch.equal(torch.stack([*decoded.values()]), torch.stack([*params.values()]))
