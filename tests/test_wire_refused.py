"""Frames that pack and unpack refuse, with a reason and before memory is allocated for them."""

import struct
import tracemalloc

import pytest
import torch

from fedshift import (
    Cast,
    Codec,
    Identity,
    KMeans,
    Mean,
    Params,
    Range,
    Step,
    Stochastic,
    Uniform,
    WireError,
    Zstd,
    header,
    pack,
    unpack,
)
from fedshift.codecs.base import varint
from fedshift.wire.frame import describe, digest
from fedshift.wire.plan import layout
from tests import fuzz
from tests.test_wire import GOLDEN_LAYOUT, GOLDEN_SHARED, golden_params, with_crc


@pytest.mark.parametrize("codec", [Codec(KMeans(4)), Codec(Uniform(3)), Codec(Identity()), Codec(Cast("float16"))])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused_by_name(codec: Codec, bad: float) -> None:
    with pytest.raises(ValueError, match=r"fc\.weight: contains NaN"):
        pack(codec, {"fc.weight": torch.tensor([[0.0, bad]])})
    with pytest.raises(ValueError, match=r"fc\.bias: contains NaN"):
        pack(codec, {"fc.bias": torch.tensor([0.0, bad])})


def test_tensors_that_cannot_be_sent_are_refused_by_pack() -> None:
    with pytest.raises(ValueError, match=r"z: tensors of torch\.complex64 cannot be sent"):
        pack(Codec(Identity()), {"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"f: tensors of torch\.float8_e4m3fn cannot be sent"):
        pack(Codec(Identity()), {"f": torch.zeros(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="d: contains NaN or infinity"):
        pack(Codec(Uniform(3)), {"d": torch.full((2, 2), 1e300, dtype=torch.float64)})
    with pytest.raises(ValueError, match="n: contains an integer beyond 2"):
        pack(Codec(Uniform(4), integers=True), {"n": torch.tensor([[1 << 40]])})
    with pytest.raises(ValueError, match="base=-1"):
        pack(Codec(Identity()), {}, base=-1)
    with pytest.raises(ValueError, match="x: Stochastic rounds at random"):
        pack(Codec(Stochastic(4)), {"x": torch.zeros(2, 2)})


@pytest.mark.parametrize("codec", [Codec(KMeans(2)), Codec(Uniform(5), Zstd()), Codec(Identity())])
def test_every_truncation_and_every_flipped_byte_is_refused(params: Params, codec: Codec) -> None:
    frame = pack(codec, params)
    for end in range(len(frame)):
        with pytest.raises(WireError, match=r"^[^\n]*(too few|checksum does not match)[^\n]*$"):
            unpack(frame[:end], params)
    for at in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            with pytest.raises(WireError, match=r"^[^\n]+$"):
                unpack(frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :], params)


def test_errors_state_the_reason(params: Params) -> None:
    frame = pack(Codec(Uniform(4)), params, described=True)
    other = {**params, "fc.weight": torch.zeros(36, 10)}
    with pytest.raises(WireError, match=r"fc\.weight: shape \(10, 36\) instead of \(36, 10\)"):
        unpack(frame, other)
    with pytest.raises(WireError, match=r"fc\.bias: dtype torch\.float32 instead of torch\.float64"):
        unpack(frame, {**params, "fc.bias": params["fc.bias"].double()})
    with pytest.raises(WireError, match="the frame has 9 tensors, the model has 10"):
        unpack(frame, {**params, "extra": torch.zeros(1)})
    with pytest.raises(WireError, match=r"missing \['extra'\]"):
        unpack(frame, {"extra" if name == "mask" else name: x for name, x in params.items()})
    with pytest.raises(WireError, match="begins with b'PK"):
        unpack(b"PK\x03\x04" + frame[4:], params)
    with pytest.raises(WireError, match="version 1; this program reads version 2"):
        unpack(frame[:4] + b"\x01" + frame[5:], params)
    with pytest.raises(WireError, match="version 3; this program reads version 2"):
        unpack(frame[:4] + b"\x03" + frame[5:], params)
    with pytest.raises(WireError, match="checksum"):
        unpack(frame[:-1] + bytes([frame[-1] ^ 1]), params)
    with pytest.raises(WireError, match="unknown flags"):
        unpack(fuzz.mend(frame[:5] + b"\x8c" + frame[6:]), params)
    with pytest.raises(WireError, match="lossy flag contradicts its codecs"):
        unpack(fuzz.mend(frame[:5] + b"\x08" + frame[6:]), params)


def test_an_undescribed_frame_of_another_model_is_refused_by_its_digest(params: Params) -> None:
    """With the layout in the frame, the difference is named, without it both digests are."""
    others = {
        "shape": {**params, "fc.weight": torch.zeros(36, 10)},
        "dtype": {**params, "fc.bias": params["fc.bias"].double()},
        "name": {name.replace("mask", "task"): x for name, x in params.items()},
        "number": {**params, "extra": torch.zeros(1)},
        "order": dict(reversed(params.items())),
    }
    for other in others.values():
        frame = pack(Codec(Uniform(4)), params)
        digests = [digest(describe(layout(model))).hex() for model in (params, other)]
        with pytest.raises(WireError, match=f"the frame's layout {digests[0]} is not that of the model, {digests[1]}"):
            unpack(frame, other)


def test_a_frame_of_version_1_is_refused_by_its_version() -> None:
    """The golden bytes of version 1, whose version had two bytes."""
    old = bytes.fromhex(
        "46454453 0100 0500 6c00000000000000 e803000000000000 07000000 02000000"
        "0100 02 77 02000000 03000000 0001020000 00000000 0200000000000000"
        "0100 01 62 02000000 0000200000 00000000 0800000000000000"
        "000080bf 00000040 e402 0000803e 000000c0 a4d7a392"
    )
    for work in (header, lambda data: unpack(data, golden_params()), lambda data: Mean(golden_params()).add(data)):
        with pytest.raises(WireError, match=r"^the frame has version 1; this program reads version 2$"):
            work(old)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("02  01 77  00  02  02 04  01 62  00  01  02", r"w: shape \(2, 4\) instead of \(2, 3\)"),
        ("02  01 77  01  02  02 03  01 62  00  01  02", r"w: dtype torch\.float64 instead of torch\.float32"),
        ("02  01 77  63  02  02 03  01 62  00  01  02", r"w: dtype None instead of torch\.float32"),
        ("02  01 77  00  02  02 03  01 77  00  01  02", r"missing \['b'\]"),
        ("02  01 77  00  02  02 03  01 63  00  01  02", r"missing \['b'\]"),
        ("01  01 77  00  02  02 03", "the frame has 1 tensors, the model has 2"),
        ("02  01 77  00  02  02 03  01 62  00  01  02  00", "1 bytes follow the layout of the last tensor"),
        ("02  01 77  00  02  02 03  01 62  00  01", "a number of the layout of tensor 1 is truncated"),
        ("02  01 77  00  02  02 03  7f 62  00  01  02", "the layout of tensor 1 extends beyond"),
        ("02  01 77  00  11  02 03  01 62  00  01  02", "tensor 0 has 17 axes; at most 16 are allowed"),
        ("02  01 ff  00  02  02 03  01 62  00  01  02", "the name of tensor 0 is not UTF-8"),
        ("02  01 77  00  02  02 83 80 80 80 10  01 62  00  01  02", r"tensor 0 has an axis of 2\^32 or more"),
        ("02  01 77  00  02  82 00 03  01 62  00  01  02", "not in its shortest form"),
        ("7f  01 77  00  02  02 03", "a layout of 7 bytes cannot contain 127 tensors"),
        ("ff ff ff ff ff ff ff ff ff 01", "a layout of 10 bytes cannot contain 18446744073709551615 tensors"),
        ("", "a number of the layout is truncated"),
    ],
)
def test_invalid_layouts_are_refused_in_a_sentence(content: str, why: str) -> None:
    described = pack(Codec(Uniform(2)), golden_params(), described=True)
    usual, other = bytes.fromhex(GOLDEN_LAYOUT), bytes.fromhex(content)
    assert described.count(usual) == 1
    frame = fuzz.mend(described.replace(usual, varint(len(other)) + other))
    with pytest.raises(WireError, match=rf"^[^\n]*{why}[^\n]*$"):
        unpack(frame, golden_params())


def test_a_frame_that_declares_terabytes_is_refused_without_allocating() -> None:
    """A shape of 2^31 x 2^31 instead of 2 x 3, 2^62 bytes of layout, codecs or codes, and 2^32 - 1 or 2^62 tensors."""
    params = golden_params()
    frame = pack(Codec(Uniform(2), Range()), params, described=True)
    coding = bytes.fromhex("0b 01 010102 0300 00 0101 0100")  # and before it, its length
    length = frame.index(coding) + len(coding)
    for at, count, claim in (
        (frame.index(b"w\0\2\2\3") + 3, 2, varint(1 << 31) * 2),
        (frame.index(b"\x0c\2\1w"), 1, varint(1 << 62)),
        (frame.index(b"\2\1w"), 1, varint((1 << 32) - 1)),
        (frame.index(coding), 1, varint(1 << 62)),
        (frame.index(coding) + 1, 1, varint(1 << 62)),
        (length - 4, 1, varint(1 << 62)),  # tensors of a run
        (length, 1, varint(1 << 62)),  # bytes of codes
    ):
        tracemalloc.start()
        with pytest.raises(WireError, match=r"^[^\n]+$"):
            unpack(fuzz.mend(frame[:at] + claim + frame[at + count :]), params)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


def test_lengths_that_do_not_fill_the_frame_are_refused() -> None:
    """Nine bytes of codes in a shared buffer."""
    frame = with_crc(GOLDEN_SHARED)
    params = {"u": torch.zeros(4, 5), "v": torch.zeros(4, 5)}
    at = len(frame) - 4 - 9 - 16 - 1
    assert frame[at] == 9
    for length, why in (
        (8, "take 25 bytes instead of 24"),
        (10, "take 25 bytes instead of 26"),
        (12, "u: 12 bytes of codes"),
    ):
        with pytest.raises(WireError, match=why):
            unpack(fuzz.mend(frame[:at] + bytes([length]) + frame[at + 1 :]), params)
    for extra in (b"\0", bytes(4)):
        with pytest.raises(WireError, match=r"take \d+ bytes instead of 25"):
            unpack(fuzz.mend(frame[:-4] + extra + frame[-4:]), params)


def test_codes_of_a_shared_buffer_are_checked_against_the_levels_of_their_own_tensor() -> None:
    """Three means and sixteen: code 3 is allowed in the shared buffer, but not in the first tensor."""
    params = {"a": torch.tensor([[5.0, 6.0, 7.0]]), "b": torch.arange(32.0).view(4, 8)}
    codec = Codec(KMeans(4), Zstd())
    frame = pack(codec, params)
    codes = torch.cat([part.flatten() for x in params.values() for part, _ in codec.encode(x[None]).parts])
    honest = Zstd().encode(codes, 16)
    assert frame[:-4].endswith(honest)
    codes[1] = 3
    hostile = Zstd().encode(codes, 16)
    assert len(hostile) == len(honest)
    with pytest.raises(WireError, match="a: code 3 is outside a codebook of 3"):
        unpack(fuzz.mend(frame[: -4 - len(honest)] + hostile + frame[-4:]), params)


def test_a_code_outside_its_codebook_is_refused() -> None:
    """Three values, so three means, and 2-bit codes: code 3 has no mean."""
    params = {"x": torch.tensor([[5.0, 6.0, 7.0]])}
    frame = pack(Codec(KMeans(2)), params)
    codes = len(frame) - 5
    assert frame[codes] == 0b10_01_00
    with pytest.raises(WireError, match="x: code 3 is outside a codebook of 3"):
        unpack(fuzz.mend(frame[:codes] + bytes([0b11_01_00]) + frame[codes + 1 :]), params)
    with pytest.raises(WireError, match="x: the bits after the last code are not zero"):
        unpack(fuzz.mend(frame[:codes] + bytes([0b01_10_01_00]) + frame[codes + 1 :]), params)


def test_a_cast_integer_that_is_not_finite_is_refused() -> None:
    params = {"n": torch.tensor([[1, 2]])}
    frame = pack(Codec(Cast("float16"), integers=True), params)
    assert torch.equal(unpack(frame, params)["n"], params["n"])
    with pytest.raises(WireError, match="n: contains NaN"):
        unpack(fuzz.mend(frame[:-8] + b"\x00\x7e\x00\x7c" + frame[-4:]), params)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800000])  # NaN, infinity
def test_numbers_that_are_not_finite_are_refused(bits: int) -> None:
    for codec in Codec(KMeans(1)), Codec(Identity()):
        params = {"x": torch.tensor([[0.5, 1.5]])}
        frame = pack(codec, params).replace(struct.pack("<f", 1.5), struct.pack("<I", bits))
        with pytest.raises(WireError, match="x: contains NaN, infinity"):
            unpack(fuzz.mend(frame), params)


@pytest.mark.parametrize(
    "side",
    [
        [3.0, -3.4e38, 0.0],
        [3.4e38, 0.0, 0.0],
        [float("inf"), 0.0, 0.0],
        [8.881926780281993e37, 0.0, -0.8311771154403687],  # finite, but infinite if k - offset is rounded to float32
    ],
)
def test_quantized_values_beyond_float32_are_refused_in_float64_as_well(side: list[float]) -> None:
    """(k - offset) step is computed in float32: here it is infinite, although float64 could represent it."""
    params = {"x": torch.tensor([[1.0, -1.0, 2.0, 0.2]], dtype=torch.float64)}
    codec = Codec(Step(step=0.5))
    frame, honest = pack(codec, params), codec.encode(params["x"][None]).parts[0][1]
    hostile = frame.replace(honest.numpy().tobytes(), struct.pack("<3f", *side))
    assert hostile != frame
    with pytest.raises(WireError, match="x: contains NaN, infinity or a number too large"):
        unpack(fuzz.mend(hostile), params)


def test_pack_refuses_numbers_that_a_header_cannot_contain() -> None:
    for given in (
        {"base": 1 << 32},
        {"base": -1},
        {"examples": 1 << 64},
        {"examples": -1},
        {"run": 1 << 64},
        {"run": -1},
    ):
        with pytest.raises(ValueError, match="must be integers of 0 or more, run and examples below"):
            pack(Codec(Identity()), {}, **given)  # type: ignore[arg-type]
    for client in (-1, -2, (1 << 64) - 1):
        with pytest.raises(ValueError, match=f"client={client}: must be None or an integer from 0 to"):
            pack(Codec(Identity()), {}, client=client)


def test_a_base_round_of_2_32_or_more_is_refused() -> None:
    frame = pack(Codec(Identity()), {}, base=1)
    with pytest.raises(WireError, match="the base round 4294967296 must be below"):
        header(fuzz.mend(frame[:14] + varint(1 << 32) + frame[15:]))


def test_mutated_frames_are_refused_or_harmless() -> None:
    seen = fuzz.run(seed=0, mutations=20_000)
    assert seen["refused"] > 10_000
    assert seen["read"] > 1_000
