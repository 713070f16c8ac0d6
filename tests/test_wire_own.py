"""Users' own parts of codecs: their numbers, their parameters, and frames that are coded with them."""

import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import (
    BitPack,
    Codec,
    Identity,
    KMeans,
    Mean,
    Params,
    PerBlock,
    PerChannel,
    PerTensor,
    Range,
    Uniform,
    WireError,
    Zstd,
    pack,
    size,
    unpack,
)
from fedshift.codecs import QSGD, Step, Ternary, TopK
from fedshift.codecs.base import Coder, Groups, Lookup, Quantizer, Shape, Side, Transform
from fedshift.core import rng
from fedshift.rounds.uplink import Uplink
from fedshift.wire.frame import Header
from fedshift.wire.registry import codec_bytes
from fedshift.wire.writer import Writer
from tests.fuzz import mend
from tests.own_codecs import Ends, Mirror, Pairs, Plain, Whole

KEY = rng.key(0, "own")


@pytest.mark.parametrize("quantizer", [Ends(), Ends(300), Whole(16), Whole(1), Whole(11), Whole(256), Uniform(3)])
@pytest.mark.parametrize("coder", [BitPack(), Zstd(), Range(), Plain()])
@pytest.mark.parametrize("groups", [PerTensor(), PerBlock(4), Pairs()])
@pytest.mark.parametrize("transform", [None, Mirror()])
def test_frames_of_own_parts_are_decoded_as_by_the_codec(
    quantizer: Quantizer, coder: Coder, groups: Groups, transform: Transform | None
) -> None:
    g = torch.Generator().manual_seed(0)
    params = {"a": 9 * torch.rand(3, 5, generator=g), "b": 9 * torch.rand(4, 3, generator=g), "c": torch.zeros(0, 2)}
    codec = Codec(quantizer, coder, groups, transform)
    frame = pack(codec, params, key=KEY)
    mean = Mean(params)
    mean.add(frame)
    decoded, averaged = unpack(frame, params), mean.result()
    for name, x in params.items():
        key = rng.fold(KEY, zlib.crc32(name.encode()))[None]
        expected = codec.decode(codec.encode(x[None], key), 1, x.shape)[0]
        assert torch.equal(decoded[name], expected)
        assert torch.equal(averaged[name], expected)
    if type(coder) is BitPack:
        assert len(frame) == size(codec, params)


def test_a_seed_travels_before_the_side_data() -> None:
    params = {"x": torch.arange(6.0).view(2, 3)}
    plain, turned = (pack(Codec(Ends(), transform=t), params, key=KEY) for t in (None, Mirror()))
    assert len(turned) - len(plain) == 4 + 2  # a seed, and number and length of the transform
    flipped = bytearray(turned)
    flipped[-4 - 1 - 8 - 4] ^= 1  # before side data, codes and checksum
    assert torch.equal(unpack(mend(bytes(flipped)), params)["x"], -unpack(turned, params)["x"])


def test_a_codec_is_described_by_numbers_and_parameters_of_its_parts() -> None:
    codec = Codec(Ends(300), Plain(), Pairs(), Mirror())
    assert codec_bytes(codec).hex(" ") == "c8 02 2c 01 c8 00 03 c8 00 c8 00"
    assert codec_bytes(Codec(Ends(300), Plain(), PerTensor(), Mirror())).hex(" ") == "c8 02 2c 01 c8 00 02 c8 00"
    assert codec_bytes(Codec(Identity(), groups=PerChannel())) == codec_bytes(Codec(Identity()))


def test_a_subclass_without_a_number_cannot_be_packed() -> None:
    @dataclass(frozen=True)
    class Finer(Uniform):
        pass

    params = {"w": torch.zeros(2, 2)}
    with pytest.raises(
        ValueError,
        match=r"w: .*Finer\(bits=3\) has no number in the wire format: define it as class Finer\(..., number=N\)",
    ):
        pack(Codec(Finer(3)), params)
    assert torch.equal(unpack(pack(Codec(Uniform(3)), params), params)["w"], params["w"])


@pytest.mark.parametrize("number", [-1, 0, 1, 5, 127, 256, 1000])
@pytest.mark.parametrize("base", [Quantizer, Lookup, Uniform, Coder, Groups, Transform])
def test_only_numbers_from_128_to_255_are_for_users(base: type[Any], number: int) -> None:
    known = dict(base.known)
    with pytest.raises(ValueError, match=f"Mine: number {number} must be between 128 and 255"):
        type("Mine", (base,), {"__module__": __name__}, number=number)
    assert base.known == known


def test_a_number_belongs_to_one_class_of_a_kind() -> None:
    with pytest.raises(
        ValueError, match=r"Other: quantizer 200 is already tests\.own_codecs\.Ends; take another number"
    ):
        type("Other", (Lookup,), {"__module__": __name__}, number=200)
    with pytest.raises(ValueError, match=r"Other: coder 200 is already tests\.own_codecs\.Plain"):
        type("Other", (Coder,), {"__module__": __name__}, number=200)
    assert Quantizer.known[200] is Ends
    assert Coder.known[200] is Plain


def test_a_class_that_is_defined_again_replaces_the_first() -> None:
    """As in a notebook, or when a module is loaded again."""
    one, two = (type("Again", (Lookup,), {"__module__": __name__}, number=255) for _ in range(2))
    assert Quantizer.known.pop(255) is two is not one


def test_a_script_can_be_imported_by_its_name(tmp_path: Path) -> None:
    """Its classes are then defined twice, in `__main__` and in its module."""
    (tmp_path / "mine.py").write_text(
        "from fedshift.codecs import Quantizer\n"
        "class Mine(Quantizer, number=140): pass\n"
        "if __name__ == '__main__':\n"
        "    import mine\n"
        "    assert Quantizer.known[140] is mine.Mine is not Mine\n"
    )
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def coding_of(parts: str) -> bytes:
    """A frame of one float32 tensor of 2 x 2 values whose codec is these bytes; side data and codes are zeros."""
    frame = pack(Codec(Uniform(8)), {"w": torch.zeros(2, 2)})
    usual, other = bytes.fromhex("0901 010108 0000 00 0101"), bytes.fromhex(parts)
    assert frame.count(usual) == 1
    return mend(frame.replace(usual, bytes([len(other) + 3, 1]) + other + b"\x01\x01"))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ("63 00 00 00 00", "quantizer 99 is not known here"),
        ("05 00 00 00 00", "quantizer 5 is not known here"),
        ("01 01 08 02 00 00", "coder 2 is not known here"),
        ("fb 00 00 00 00", "quantizer 251 is not known here; import the module that defines it"),
        ("01 01 08 fb 00 00", "coder 251 is not known here; import the module that defines it"),
        ("01 01 08 00 00 01 fb 00", "groups 251 is not known here; import the module that defines it"),
        ("01 01 08 00 00 02 fb 00", "transform 251 is not known here; import the module that defines it"),
        ("01 01 08 00 00 04", "a codec has the unknown flags 0x04"),
        ("01 01 09 00 00 00", r"Uniform\(bits=9\): bits must be between 1 and 8"),
        ("01 00 00 00 00", "Uniform has 0 bytes of parameters instead of 1"),
        ("01 02 08 08 00 00 00", "Uniform has 2 bytes of parameters instead of 1"),
        ("06 01 01 00 00 00", r"Step\(bits=1\): bits must be between 2 and 8"),
        ("07 01 03 00 00 00", r"Ternary\(bits=3\): bits must be 2"),
        ("04 01 02 00 00 00", "Cast has the parameters 02 instead of 00 or 01"),
        ("00 01 08 03 00 00", "Identity has no parameters, but 1 bytes of them were sent"),
        ("01 01 08 03 01 03 00", "Range has no parameters, but 1 bytes of them were sent"),
        ("01 01 08 00 00 01 02 04 00 00 00 00", r"PerBlock\(n=0\): n must be between 1 and 2\^32 - 1"),
        ("01 01 08 00 00 01 02 02 01 00", "PerBlock has 2 bytes of parameters instead of 4"),
        ("01 01 08 00 00 01 00 00", r"Uniform\(bits=8\) is sent with PerTensor\(\), which no encoder writes"),
        ("00 00 03 00 01 01 00", r"Identity\(\) is sent with PerChannel\(\), which no encoder writes"),
        ("01 01 08 00 00 03 01 00 c8 00", "a transform mixes the values of a tensor"),
        ("00 00 03 00 02 c8 00", "a transform mixes the values of a tensor"),
        ("c9 02 0f 00 00 00 00", r"Whole\(limit=16\) does not have the parameters 0f00"),
        ("c9 00 00 00 00", "Whole cannot read the parameters : IndexError"),
        ("c8 01 00 00 00 00", "Ends cannot read the parameters 00: error"),
        ("01 ff 08 00 00 00", "the codecs extends beyond the frame"),
    ],
)
def test_invalid_parts_are_refused_in_a_sentence(parts: str, why: str) -> None:
    with pytest.raises(WireError, match=rf"^[^\n]*{why}[^\n]*$"):
        unpack(coding_of(parts), {"w": torch.zeros(2, 2)})


@pytest.mark.parametrize(
    ("coding", "why"),
    [
        ("01 010108 0000 00 0201", "the codecs of 2 tensors after the first 0 of 1 are invalid"),
        ("01 010108 0000 00 0001", "the codecs of 0 tensors"),
        ("01 010108 0000 00 0102", "the codecs of 1 tensors"),
        ("01 010108 0000 00 0100", "codecs that no tensor uses, or further bytes after them"),
        ("01 010108 0000 00 0101 00", "codecs that no tensor uses, or further bytes after them"),
        ("02 010108 0000 00 010107 0000 00 0101", "the frame has 2 codecs for 1 tensors"),
        ("01 0000 0000 00 0101", "the frame lists a codec twice"),
        ("00", "a number of the codecs is truncated"),
        ("", "a number of the codecs is truncated"),
        ("81 00 010108 0000 00 0101", "not in its shortest form"),
    ],
)
def test_invalid_lists_of_codecs_are_refused_in_a_sentence(coding: str, why: str) -> None:
    params = {"w": torch.zeros(2, 2)}
    usual, other = bytes.fromhex("0901 010108 0000 00 0101"), bytes.fromhex(coding)
    frame = mend(pack(Codec(Uniform(8)), params).replace(usual, bytes([len(other)]) + other))
    with pytest.raises(WireError, match=rf"^[^\n]*({why})[^\n]*$"):
        unpack(frame, params)


@pytest.mark.parametrize("runs", ["0101 0102 0101 0100", "0102 0101 0201", "0101 0101 0202", "0101 0102 0202"])
def test_runs_and_the_order_of_codecs_are_canonical(runs: str) -> None:
    """Runs of the same codec that follow each other, and codecs that are not listed in the order of first use."""
    params = {name: torch.zeros(2, 2) for name in "abcd"}
    chosen = {"a": Codec(Uniform(8)), "b": Codec(Uniform(7)), "c": Codec(Uniform(8))}
    frame = pack(chosen, params)
    usual = bytes.fromhex("0101 0102 0101 0100")
    assert frame.count(usual) == 1
    if bytes.fromhex(runs) == usual:
        assert unpack(frame, params).keys() == params.keys()
        return
    other = bytes.fromhex(runs)
    at = frame.index(usual)
    begin = frame.index(bytes.fromhex("02 010108 0000 00 010107 0000 00")) - 1
    changed = bytearray(frame[:at] + other + frame[at + len(usual) :])
    changed[begin] += len(other) - len(usual)
    with pytest.raises(WireError, match=r"the codecs of . tensors after the first . of 4 are invalid"):
        unpack(mend(bytes(changed)), params)


def test_an_unknown_number_is_named_by_a_program_that_has_not_imported_its_module(tmp_path: Path) -> None:
    params: Params = {"w": torch.ones(2, 2)}
    path = tmp_path / "frame"
    path.write_bytes(pack(Codec(Ends()), params))
    program = (
        "import sys, torch; from fedshift import unpack\n"
        "unpack(open(sys.argv[1], 'rb').read(), {'w': torch.ones(2, 2)})"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        "fedshift.wire.frame.WireError: quantizer 200 is not known here; import the module that defines it"
    )
    assert torch.equal(unpack(path.read_bytes(), params)["w"], params["w"])


def test_a_transform_that_multiplies_the_values_is_refused() -> None:
    @dataclass(frozen=True)
    class Huge(Mirror, number=254):
        def length(self, n: int) -> int:
            return 3 * n + 1000

    params = {"w": torch.ones(2, 2)}
    with pytest.raises(ValueError, match=r"w: .*Huge\(\) turns 4 values into 1012; 4 to 72 are allowed"):
        pack(Codec(Ends(), transform=Huge()), params, key=KEY)
    frame = pack(Codec(Ends(), transform=Mirror()), params, key=KEY)
    other = frame.replace(bytes.fromhex("02 c8 00"), bytes.fromhex("02 fe 00"))
    try:
        with pytest.raises(WireError, match=r"w: .*Huge\(\) turns 4 values into 1012"):
            unpack(mend(other), params)
    finally:
        del Transform.known[254]


def test_parameters_of_more_than_255_bytes_cannot_be_packed() -> None:
    class Long(Ends, number=253):
        def parameters(self) -> bytes:
            return bytes(256)

    del Quantizer.known[253]
    with pytest.raises(ValueError, match=r"^w: .* has 256 bytes of parameters; at most 255 are allowed$"):
        pack(Codec(Long()), {"w": torch.ones(2, 2)})


def test_the_expected_codec_can_have_own_parts(params: Params) -> None:
    codec = Codec(Ends(2), Plain(), Pairs())
    frame = pack(codec, params)
    assert unpack(frame, params, codec).keys() == params.keys()
    with pytest.raises(WireError, match=r"coded by Ends\(times=2\), Plain\(\), Pairs\(\) instead of KMeans"):
        unpack(frame, params, Codec(KMeans(4)))
    with pytest.raises(WireError, match=r"coded by Ends\(times=2\), .* instead of Ends\(times=3\)"):
        unpack(frame, params, Codec(Ends(3), Plain(), Pairs()))


class Short(Coder, number=210):
    """Loses the last code."""

    def encode(self, codes: Tensor, levels: int) -> bytes:
        return codes.numpy().tobytes()[:-1]

    def decode(self, data: bytes | memoryview, n: int, levels: int) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def size(self, n: int, levels: int) -> None:
        return None

    def most(self, n: int, levels: int) -> int:
        return n


class Broken(Short, number=211):
    def decode(self, data: bytes | memoryview, n: int, levels: int) -> Tensor:
        raise zlib.error("incorrect header")


class Few(Groups, number=210):
    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        return [(1, 5)]


@dataclass(frozen=True)
class Made(Ends, number=211):
    """Codes or side data that no decoder reads as they were meant."""

    wrong: str = ""

    def levels(self, n: int) -> int:
        return 300 if self.wrong == "levels" else 2

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        codes, side = super().encode(x)
        made = {
            "int64": (codes.long(), side),
            "too high": (codes + 1, side),
            "shape": (codes[:, 1:], side),
            "width": (codes, side[:, :1]),
            "nan": (codes, side / 0 * 0),
        }
        return made.get(self.wrong, (codes, side))


W = {"w": torch.arange(12.0).view(3, 4)}


@pytest.mark.parametrize(
    ("coder", "sentence"),
    [
        (Short(), r"w: .*Short.* decoded codes uint8 \(11,\) instead of uint8 \(12,\)"),
        (Broken(), "w: .*Broken.*: error: incorrect header"),
    ],
)
def test_a_coder_that_decodes_other_codes_is_refused(coder: Coder, sentence: str) -> None:
    frame = pack(Codec(Ends(), coder), W)
    with pytest.raises(WireError, match=sentence):
        unpack(frame, W)
    with pytest.raises(WireError, match=sentence):
        Mean(W).add(frame)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("int64", r"w: Made\(.*\) made codes int64 \(1, 12\) instead of uint8 \(1, 12\)"),
        ("too high", r"w: Made\(.*\) made code 2, but has 2 levels"),
        ("shape", r"w: Made\(.*\) made codes uint8 \(1, 11\) instead of uint8 \(1, 12\)"),
        ("width", r"w: Made\(.*\) made side data float32 \(1, 1\) instead of float32 \(1, 2\)"),
        ("nan", r"w: Made\(.*\) made side data with NaN or infinity"),
        ("levels", r"Made\(.*\) has 300 levels; 1 to 256 are allowed"),
    ],
)
def test_codes_that_a_decoder_would_read_differently_are_not_sent(wrong: str, sentence: str) -> None:
    assert unpack(pack(Codec(Made()), W), W).keys() == W.keys()
    with pytest.raises(ValueError, match=sentence):
        pack(Codec(Made(wrong=wrong)), W)


class Undescribed(Ends):
    """A quantizer without a number, whose description of itself is `wrong`."""

    def __init__(self, **wrong: object) -> None:
        self.wrong = wrong

    def levels(self, n: int) -> Any:
        if self.wrong.get("levels") == "raise":
            raise KeyError("levels")
        return self.wrong.get("levels", 2)

    def width(self, n: int) -> Any:
        return self.wrong.get("width", 2)

    def parameters(self) -> Any:
        return self.wrong.get("parameters", b"")

    def __repr__(self) -> str:
        return "Undescribed()"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"levels": 0}, "Undescribed() has 0 levels; 1 to 256 are allowed"),
        ({"levels": "two"}, "Undescribed() has 'two' levels; 1 to 256 are allowed"),
        ({"levels": "raise"}, "Undescribed(): KeyError: 'levels'"),
        ({"width": -1}, "Undescribed() has -1 side data per row; a number from 0 on is needed"),
        ({"parameters": "no bytes"}, "Undescribed() has parameters 'no bytes', which are not bytes"),
    ],
)
def test_a_quantizer_that_describes_itself_wrongly_makes_no_codec(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Codec(Undescribed(**wrong))


def test_groups_must_cover_the_tensor() -> None:
    with pytest.raises(ValueError, match=r"w: .*Few.* divides 12 values into segments of 5"):
        pack(Codec(Ends(), groups=Few()), W)


@dataclass(frozen=True)
class Misread(Ends, number=212):
    """Codes as those of `Ends`, which are decoded to something else."""

    wrong: str = ""

    def parameters(self) -> bytes:
        return self.wrong.encode()

    @classmethod
    def read(cls, parameters: bytes) -> "Misread":
        return cls(wrong=parameters.decode())

    def table(self, side: Side) -> Tensor:
        table = super().table(side)
        if self.wrong == "table of zero":
            return table / table.new_zeros(len(table), 1)
        return {"double": table.double(), "short": table[:, :1], "none": None}.get(self.wrong, table)  # type: ignore[return-value]

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        if self.wrong == "decode":
            raise KeyError("levels")
        values = super().decode(codes, side)
        return {"long": values.double(), "fewer": values[:, 1:]}.get(self.wrong, values)

    def reach(self, side: Side, highest: int) -> float:
        return 1 // 0 if self.wrong == "reach" else super().reach(side, highest)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("double", r"has a table float64 \(1, 2\) instead of float32 \(1, 2\)"),
        ("short", r"has a table float32 \(1, 1\) instead of float32 \(1, 2\)"),
        ("none", "has a table None, which is not a tensor"),
        ("table of zero", "contains NaN, infinity or a number too large"),
        ("long", r"decoded values float64 \(1, 12\) instead of float32 \(1, 12\)"),
        ("fewer", r"decoded values float32 \(1, 11\) instead of float32 \(1, 12\)"),
        ("decode", "Misread.*: KeyError: 'levels'"),
        ("reach", "Misread.*: ZeroDivisionError: "),
    ],
)
def test_a_frame_whose_quantizer_decodes_wrongly_is_refused_as_a_whole(wrong: str, sentence: str) -> None:
    params = {"a": torch.arange(12.0).view(3, 4) - 5, "b": torch.arange(12.0).view(3, 4)}
    frame = pack({"a": Codec(Ends()), "b": Codec(Misread(wrong=wrong))}, params)
    with pytest.raises(WireError, match=f"^b: .*{sentence}"):
        unpack(frame, params)
    mean = Mean(params)
    with pytest.raises(WireError, match=f"^b: .*{sentence}"):
        mean.add(frame)
    mean.add(pack(Codec(Ends()), params))
    alone = Mean(params)
    alone.add(pack(Codec(Ends()), params))
    assert all(torch.equal(x, y) for x, y in zip(mean.result().values(), alone.result().values(), strict=True))


@dataclass(frozen=True)
class Constant(Lookup, number=213):
    """-1, 0 or 1, without side data."""

    def width(self, n: int) -> int:
        return 0

    def levels(self, n: int) -> int:
        return 3

    def table(self, side: Side) -> Tensor:
        return torch.tensor([-1.0, 0.0, 1.0]).expand(len(side), 3)

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        return (x.round().clamp(-1, 1) + 1).to(torch.uint8), x.new_zeros(len(x), 0)


def test_a_table_without_side_data_needs_no_reach_of_its_own() -> None:
    params = {"w": torch.tensor([[-3.0, 0.2, 0.8]])}
    for codec in Codec(Constant()), Codec(Constant(), Range()), Codec(Constant(), groups=PerBlock(2)):
        assert unpack(pack(codec, params), params)["w"].tolist() == [[-1.0, 0.0, 1.0]]


@dataclass(frozen=True)
class Placed(Whole, number=214):
    """Whole numbers to which the decoder adds their position in the row, divided by its length."""

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        return codes.float() + torch.arange(codes.shape[1]) / codes.shape[1]


@pytest.mark.parametrize("coder", [BitPack(), Range()])
def test_users_quantizers_decode_whole_rows(coder: Coder) -> None:
    params = {"w": (torch.arange(300_000.0) % 7).view(2, -1)}
    for codec in Codec(Placed(), coder), Codec(Placed(), coder, PerChannel()):
        decoded = codec.decode(codec.encode(params["w"][None]), 1, params["w"].shape)[0]
        assert torch.equal(unpack(pack(codec, params), params)["w"], decoded)


def test_a_class_in_a_function_takes_its_number_once() -> None:
    def made(scale: float) -> Quantizer:
        @dataclass(frozen=True)
        class Scaled(Ends, number=252):
            def table(self, side: Side) -> Tensor:
                return side * scale

        return Scaled()

    made(1.0)
    try:
        with pytest.raises(
            ValueError,
            match=r"Scaled: quantizer 252 was already defined by an earlier call .*; define it at the top level",
        ):
            made(10.0)
    finally:
        del Quantizer.known[252]


@pytest.mark.parametrize("wrong", ["int64", "too high", "shape", "width", "nan"])
def test_a_quantizer_within_top_k_is_checked_like_one_alone(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"w: Made\(.*\) made "):
        pack(Codec(TopK(Made(wrong=wrong), 0.5)), W)


def test_a_quantizer_within_top_k_that_decodes_wrongly_is_refused() -> None:
    frame = pack(Codec(TopK(Misread(wrong="double"), 0.5)), W)
    with pytest.raises(WireError, match="has a table float64"):
        unpack(frame, W)


class Unhashable(Ends, number=216):
    __hash__ = None  # type: ignore[assignment]  # as that of a dataclass that is not frozen


made: Callable[..., Codec] = Codec  # with arguments of any type


class Prepared(Ends, number=217):
    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: made("kmeans"), "Codec(quantizer='kmeans'): quantizer must be a Quantizer of fedshift.codecs"),
        (lambda: made(Ends(), "range"), "Codec(coder='range'): coder must be a Coder of fedshift.codecs"),
        (lambda: made(Ends(), groups=None), "Codec(groups=None): groups must be a Groups of fedshift.codecs"),
        (lambda: made(Ends(), transform=3), "Codec(transform=3): transform must be a Transform of fedshift.codecs"),
        (lambda: made(Ends(), min_axes="2"), "Codec(min_axes='2'): min_axes must be an integer"),
        (lambda: Codec(Unhashable()), "unhashable type: 'Unhashable'; make its class a dataclass with frozen=True"),
        (lambda: Codec(TopK(Undescribed(parameters=3))), "has parameters 3, which are not bytes"),
        (lambda: pack(Codec(Prepared()), W), "prepared None, which is not a tensor"),
    ],
)
def test_what_is_not_a_codec_is_named(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize("number", [130.0, 130.5, "150", True])
def test_a_number_is_an_integer(number: Any) -> None:
    with pytest.raises(ValueError, match=f"Mine: number {number!r} must be an integer"):
        type("Mine", (Lookup,), {"__module__": __name__}, number=number)


class InPlace(Ends, number=220):
    """Works in its arguments instead of in copies."""

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        made = super().encode(x)
        x.zero_()
        return made

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        values = super().decode(codes, side)
        codes.zero_()
        side.zero_()
        return values

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        for x in tensors:
            x.zero_()
        return torch.zeros(len(tensors[0]), dtype=torch.float64)


class MirrorInPlace(Mirror, number=220):
    def encode(self, x: Tensor, seeds: Tensor) -> Tensor:
        made = super().encode(x, seeds)
        x.zero_()
        return made


@pytest.mark.parametrize("transform", [None, MirrorInPlace()])
def test_a_part_may_change_its_arguments(transform: Transform | None) -> None:
    own = Codec(InPlace(), Plain(), transform=transform)
    usual = Codec(Ends(), Plain(), transform=transform and Mirror())
    sent = {name: x.clone() for name, x in W.items()}
    decoded: Params = {}
    writer = Writer(own, sent)
    frame = writer.pack(sent, Header(), KEY, lambda name, x, q: decoded.update({name: q}))
    assert torch.equal(sent["w"], W["w"])
    expected = unpack(pack(usual, W, key=KEY), W)
    assert torch.equal(unpack(frame, W)["w"], expected["w"])
    assert torch.equal(decoded["w"], expected["w"])


@dataclass(frozen=True)
class Sized(Plain, number=220):
    """States wrong sizes, or makes another number of bytes."""

    bytes_made: Any = None
    stated: Any = None
    at_most: Any = 12

    def encode(self, codes: Tensor, levels: int) -> Any:
        made = super().encode(codes, levels)
        return made if self.bytes_made is None else self.bytes_made

    def size(self, n: int, levels: int) -> Any:
        return self.stated

    def most(self, n: int, levels: int) -> Any:
        return self.at_most


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"stated": -1}, "size(1, 1) is -1, which is not a number of bytes"),
        ({"stated": 1.5}, "size(1, 1) is 1.5, which is not a number of bytes"),
        ({"at_most": "x"}, "most(1, 1) is 'x', which is not a number of bytes"),
        ({"at_most": None}, "most(1, 1) is None, which is not a number of bytes"),
        ({"stated": 13}, "size(1, 1) is 13, more than most(1, 1), which is 12"),
    ],
)
def test_a_coder_that_states_wrong_sizes_makes_no_codec(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Codec(Ends(), Sized(**wrong))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"bytes_made": bytes(13)}, "made 13 bytes instead of at most 12, as its sizes say"),
        ({"bytes_made": bytes(3), "stated": 4}, "made 3 bytes instead of 4, as its sizes say"),
        ({"bytes_made": "text"}, "made a str, which must be bytes"),
    ],
)
def test_a_coder_whose_bytes_a_reader_would_refuse_sends_nothing(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"w: Sized\(.*\) {sentence}"):
        pack(Codec(Ends(), Sized(**wrong)), W)


class UnevenCoder(Plain, number=221):
    """States a size that is not a number of bytes, but only for the number of codes of one tensor."""

    def size(self, n: int, levels: int) -> Any:
        return -n if n == 12 else None


@dataclass(frozen=True)
class Torn(Groups, number=220):
    made: Any = None

    def segments(self, shape: Shape) -> Any:
        return self.made


def test_parts_that_do_not_fit_a_model_are_named_before_its_first_frame() -> None:
    with pytest.raises(ValueError, match=r"w: .*UnevenCoder.*: size\(12, 2\) is -12, which is not a number of bytes"):
        Writer(Codec(Ends(), UnevenCoder()), W)
    with pytest.raises(ValueError, match=r"w: .*Torn.*: TypeError: 'NoneType' object is not iterable"):
        Writer(Codec(Ends(), groups=Torn()), W)
    for made in ((1, 12, 1),), ((1, 12), (1, 0)), ((1, 12.0),), ((12,),):
        with pytest.raises(ValueError, match=r"w: .*Torn.*: its segments .* are not pairs \(rows, n\)"):
            Writer(Codec(Ends(), groups=Torn(made)), W)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: KMeans(2.5), "KMeans(bits=2.5): bits must be an integer"),  # type: ignore[arg-type]
        (lambda: Uniform("4"), "Uniform(bits='4'): bits must be an integer"),  # type: ignore[arg-type]
        (lambda: QSGD(True), "QSGD(s=True): s must be an integer"),
        (lambda: PerBlock(2.0), "PerBlock(n=2.0): n must be an integer"),  # type: ignore[arg-type]
        (lambda: Zstd(level=2.5), "Zstd(level=2.5): level must be an integer"),  # type: ignore[arg-type]
        (lambda: Step(rate="a"), "Step(rate='a'): rate must be a number"),  # type: ignore[arg-type]
        (lambda: Step(step="a"), "Step(step='a'): step must be a number"),  # type: ignore[arg-type]
        (lambda: Ternary(keep="a"), "Ternary(keep='a'): keep must be a number"),  # type: ignore[arg-type]
        (lambda: TopK(KMeans(2), keep="a"), "TopK(keep='a'): keep must be a number"),  # type: ignore[arg-type]
        (lambda: pack(KMeans(4), W), "codec=KMeans(bits=4"),  # type: ignore[arg-type]
        (lambda: Uplink(KMeans(4)), "Uplink(codec=KMeans(bits=4"),  # type: ignore[arg-type]
        (lambda: Uplink("lean"), "Uplink(codec='lean'): codec must be a Codec"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_wrong_types_are_refused_in_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make()
