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
    Params,
    Range,
    Stochastic,
    Uniform,
    WireError,
    Zstd,
    pack,
    unpack,
)
from tests import fuzz
from tests.test_wire import golden, golden_params


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
        with pytest.raises(WireError, match=r"too few|bytes instead of"):
            unpack(frame[:end], params)
    for at in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            with pytest.raises(WireError):
                unpack(frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :], params)


def test_errors_state_the_reason(params: Params) -> None:
    frame = pack(Codec(Uniform(4)), params)
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
    with pytest.raises(WireError, match="version 2; this program reads version 1"):
        unpack(frame[:4] + b"\x02\x00" + frame[6:], params)
    with pytest.raises(WireError, match="checksum"):
        unpack(frame[:-1] + bytes([frame[-1] ^ 1]), params)
    with pytest.raises(WireError, match="unknown flags"):
        unpack(fuzz.mend(frame[:6] + b"\x00\x80" + frame[8:]), params)


def test_a_frame_that_declares_terabytes_is_refused_without_allocating() -> None:
    """The frame declares a shape of 2^31 x 2^31 and 2^62 bytes of codes; the model's shape is 2 x 3."""
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


def test_the_retired_number_of_the_range_coder_is_refused() -> None:
    params = {"x": torch.zeros(2, 30)}
    frame = bytearray(pack(Codec(Uniform(2), Range()), params))
    coder = frame.index(bytes([0, 1, 2, 3, 0]) + bytes(4)) + 3  # float32, uniform, 2 bits, range coder, per tensor
    frame[coder] = 2
    with pytest.raises(WireError, match="x: unknown coder 2"):
        unpack(fuzz.mend(bytes(frame)), params)


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


def test_mutated_frames_are_refused_or_harmless() -> None:
    seen = fuzz.run(seed=0, mutations=40_000)
    assert seen["refused"] > 20_000
    assert seen["read"] > 1_000
