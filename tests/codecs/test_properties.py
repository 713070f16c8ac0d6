"""Properties of every codec. A codec joins them by being listed in CODECS."""

import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedshift.codecs import (
    QSGD,
    BitPack,
    Cast,
    Codec,
    FixedCode,
    Hadamard,
    Identity,
    KMeans,
    Lookup,
    Normal,
    PerBlock,
    PerChannel,
    RandomStep,
    Range,
    Sign,
    Step,
    Stochastic,
    Ternary,
    TopK,
    Uniform,
    Zstd,
)
from fedshift.codecs.base import CHUNK, MOST_LEVELS, Quantizer, Side, kept
from fedshift.codecs.codec import Coded
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.paper.authors import EarlyKMeans
from fedshift.wire.writer import pack, prepared, tensor_key, unpack
from tests import fuzz

FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Halves(Lookup, number=210):
    """A user's own quantizer: 0 up to half of the largest magnitude of the row, +-0.75 of it above."""

    def width(self, n: int) -> int:
        return 1

    def levels(self, n: int) -> int:
        return 3

    def table(self, side: Side) -> Tensor:
        return side * torch.tensor([0.0, 0.75, -0.75], device=side.device)

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        if not x.isfinite().all():
            raise ValueError("contains NaN or infinity, which cannot be quantized")
        side = x.abs().amax(1, keepdim=True)
        return ((x > side / 2) + 2 * (x < -side / 2)).to(torch.uint8), side


CODECS = {
    "exact": Codec(Identity()),
    "float16": Codec(Cast("float16")),
    "bfloat16": Codec(Cast("bfloat16"), Zstd()),
    "uniform 1": Codec(Uniform(1)),
    "uniform 4": Codec(Uniform(4), Zstd()),
    "uniform 8 per block": Codec(Uniform(8), groups=PerBlock(100)),
    "kmeans 2": Codec(KMeans(2), Range()),
    "kmeans 4 exact": Codec(KMeans(4, exact=True), groups=PerChannel()),
    "kmeans 3 random": Codec(KMeans(3, random=True)),
    "kmeans 4 of the authors": Codec(EarlyKMeans(4)),
    "stochastic 2": Codec(Stochastic(2)),
    "stochastic 8": Codec(Stochastic(8), Range(), PerBlock(64)),
    "step": Codec(Step(), Range()),
    "step at a rate": Codec(Step(rate=0.7), Range()),
    "common step": Codec(Step(step=1.5, common=True), Range()),
    "common step at a rate": Codec(Step(rate=0.7, common=True), Range(), PerChannel()),
    "random step": Codec(RandomStep(rate=0.7), Range()),
    "random step per block": Codec(RandomStep(5, rate=2.0), Zstd(), PerBlock(100)),
    "top-k of a random step": Codec(TopK(RandomStep(rate=1.0), 0.4), Range()),
    "ternary": Codec(Ternary(keep=0.1), Range()),
    "common ternary": Codec(Ternary(keep=0.1, common=True), Range()),
    "qsgd 1": Codec(QSGD(1), Range()),
    "qsgd 7 max": Codec(QSGD(7, norm="max"), groups=PerBlock(128)),
    "qsgd 127 whole": Codec(QSGD(127, whole=True), Range()),
    "rotated qsgd whole max": Codec(QSGD(3, norm="max", whole=True), transform=Hadamard()),
    "sign": Codec(Sign()),
    "sign per channel": Codec(Sign(), Range(), PerChannel()),
    "drive": Codec(Normal(1), transform=Hadamard()),
    "eden 4 per block": Codec(Normal(4), Range(), PerBlock(256), Hadamard()),
    "normal 8": Codec(Normal(8)),
    "rotated uniform": Codec(Uniform(3), transform=Hadamard()),
    "fixed code 1": Codec(FixedCode(1)),
    "fixed code 2": Codec(FixedCode(2), Range(), PerChannel()),
    "fixed code 8": Codec(FixedCode(8)),
    "fedzip": Codec(TopK(KMeans(2), 0.1), Range()),
    "top-k of kmeans 7": Codec(TopK(KMeans(7), 0.3)),
    "top-k of uniform": Codec(TopK(Uniform(4), 0.2), Range(), PerChannel()),
    "top-k of stochastic": Codec(TopK(Stochastic(3), 0.2)),
    "qsparse": Codec(TopK(QSGD(4), 0.2), Range()),
    "top-k of qsgd 127 whole": Codec(TopK(QSGD(127, whole=True), 0.5)),
    "top-k of sign": Codec(TopK(Sign(), 0.05), Range(), PerBlock(90)),
    "top-k of a step at a rate": Codec(TopK(Step(rate=1.0), 0.4), Range()),
    "a user's": Codec(Halves(), Zstd()),
    "top-k of a user's": Codec(TopK(Halves(), 0.2), Range()),
}
IDEMPOTENT = [
    "exact",
    "float16",
    "bfloat16",
    "uniform 1",
    "uniform 4",
    "uniform 8 per block",
    "kmeans 2",
    "kmeans 4 exact",
    "ternary",
    "sign",
    "sign per channel",
    "fixed code 1",
    "fixed code 2",
    "fixed code 8",
    "fedzip",
    "top-k of kmeans 7",
    "top-k of uniform",
    "top-k of sign",
]
UNBIASED = [
    "random step",
    "random step per block",
    "kmeans 3 random",
    "stochastic 2",
    "stochastic 8",
    "qsgd 1",
    "qsgd 7 max",
    "qsgd 127 whole",
    "rotated qsgd whole max",
    "drive",
    "eden 4 per block",
]
CONTRACTIONS = ["ternary", "common ternary", "sign", "sign per channel", "fedzip", "top-k of kmeans 7", "top-k of sign"]
all_codecs = pytest.mark.parametrize("name", CODECS)


def model(seed: int = 0, scale: float = 1.0) -> Params:
    """Tensors of which some values are far larger than others."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"conv": (8, 3, 5, 5), "fc": (10, 97), "small": (3, 5), "single": (1, 1), "bias": (7,)}
    return {name: scale * torch.randn(shape, generator=g) ** 3 for name, shape in shapes.items()}


def unusual() -> Iterator[tuple[str, Tensor]]:
    one = torch.zeros(6, 50)
    one[2, 3] = -2.5
    yield "zero", torch.zeros(6, 50)
    yield "negative zero", torch.full((6, 50), -0.0)
    yield "constant", torch.full((6, 50), 0.3)
    yield "negative constant", torch.full((6, 50), -0.3)
    yield "tiny", torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 1e-38
    yield "denormal", torch.full((6, 50), 1e-45)
    yield "huge", torch.randn(6, 50, generator=torch.Generator().manual_seed(2)) * 1e30
    yield "one non-zero value", one
    yield "rows of length one", torch.tensor([[1.5], [-2.0], [0.0]])
    yield "one value", torch.tensor([[-0.7]])


def encoded(codec: Codec, params: Params, key: Tensor) -> dict[str, Coded]:
    """Codes of each tensor that the codec covers, as in a frame."""
    covered = {name: x for name, x in params.items() if codec.covers(x)}
    scales = prepared(dict.fromkeys(covered, codec), {name: x[None] for name, x in covered.items()})
    keys = {name: tensor_key(codec, name, key) for name in covered}
    return {
        name: codec.encode(x[None], None if keys[name] is None else keys[name][None], scales.get(codec))  # type: ignore[index]
        for name, x in covered.items()
    }


def decoded(codec: Codec, x: Tensor, key: Tensor) -> Tensor:
    return codec.decode(encoded(codec, {"w": x}, key)["w"], 1, x.shape)[0]


KEY = rng.key(0, "upload")


@all_codecs
def test_a_frame_contains_what_the_codec_decodes(name: str) -> None:
    codec, params = CODECS[name], model()
    read = unpack(pack(codec, params, key=KEY), like=params, codec=codec)
    for tensor, coded in encoded(codec, params, KEY).items():
        assert torch.equal(read[tensor], codec.decode(coded, 1, params[tensor].shape)[0])
    assert torch.equal(read["bias"], params["bias"])


@all_codecs
def test_codes_are_below_levels_and_side_data_have_their_width(name: str) -> None:
    codec = CODECS[name]
    quantizer = codec.quantizer
    if quantizer.plain:
        return
    for params in (model(), *({"w": x} for _, x in unusual())):
        for tensor, coded in encoded(codec, params, KEY).items():
            for (rows, n), (codes, side) in zip(codec.segments(params[tensor].shape), coded.parts, strict=True):
                assert codes.dtype == torch.uint8
                assert codes.shape == (rows, n)
                assert int(codes.max()) < quantizer.levels(n) <= MOST_LEVELS
                assert side.dtype == torch.float32
                assert side.shape == (rows, quantizer.width(n))
                table = quantizer.table(side)
                if table is not None:
                    assert table.shape == (rows, quantizer.levels(n))
                    assert torch.equal(table.gather(1, codes.long()), quantizer.decode(codes, side))


@all_codecs
def test_decoded_magnitudes_are_within_reach(name: str) -> None:
    codec = CODECS[name]
    if codec.quantizer.plain:
        return
    for params in (model(), *({"w": x} for _, x in unusual())):
        for tensor, coded in encoded(codec, params, KEY).items():
            reach = max(codec.quantizer.reach(side, int(codes.max())) for codes, side in coded.parts)
            if codec.transform is not None:
                reach = codec.transform.reach(reach, params[tensor].numel())
            assert codec.decode(coded, 1, params[tensor].shape).abs().max() <= reach <= FLOAT32


@all_codecs
def test_the_reach_of_nan_is_not_a_number_and_of_infinity_infinite(name: str) -> None:
    quantizer = CODECS[name].quantizer
    width = 0 if quantizer.plain else quantizer.width(1000)
    for column in range(width):
        for bad in (math.nan, math.inf):
            side = torch.full((2, width), 0.5)
            side[1, column] = bad
            assert not math.isfinite(quantizer.reach(side, quantizer.levels(1000) - 1))


@all_codecs
def test_bytes_are_determined_by_values_and_key(name: str) -> None:
    codec, params = CODECS[name], model()
    frame = pack(codec, params, key=KEY)
    assert pack(codec, params, key=KEY) == frame
    other = pack(codec, params, key=rng.key(1, "upload"))
    assert (other != frame) == codec.random
    if not codec.random:
        assert pack(codec, params) == frame


@all_codecs
def test_random_codecs_ask_for_a_key(name: str) -> None:
    codec = CODECS[name]
    if codec.random:
        with pytest.raises(ValueError, match=r"^conv: .* random and needs a key, for example"):
            pack(codec, model())


@all_codecs
def test_coded_sizes_are_as_stated(name: str) -> None:
    codec = CODECS[name]
    for tensor, coded in encoded(codec, model(), KEY).items():
        shape = model()[tensor].shape
        levels = 256 if codec.quantizer.plain else max(codec.quantizer.levels(n) for _, n in codec.segments(shape))
        codes = torch.cat([codes.flatten() for codes, _ in coded.parts])
        data, size = codec.coder.encode(codes, levels), codec.coder.size(len(codes), levels)
        assert len(data) <= codec.coder.most(len(codes), levels)
        assert size in (None, len(data))
        assert torch.equal(codec.coder.decode(data, len(codes), levels), codes)


@all_codecs
def test_a_stack_of_clients_is_coded_like_each_alone(name: str) -> None:
    codec, clients = CODECS[name], [model(seed, 10.0**-seed) for seed in range(3)]
    names = [name for name, x in clients[0].items() if codec.covers(x)]
    keys = torch.stack([rng.key(0, "upload", k) for k in range(3)])
    stacks = {name: torch.stack([params[name] for params in clients]) for name in names}
    scale = prepared(dict.fromkeys(names, codec), stacks).get(codec)
    for tensor, x in stacks.items():
        together = codec.encode(x, rng.fold(keys, zlib.crc32(tensor.encode())), scale)
        for k, params in enumerate(clients):
            alone = encoded(codec, params, keys[k])[tensor]
            for parts, single in zip(together.parts, alone.parts, strict=True):
                for all_rows, rows in zip(parts, single, strict=True):
                    assert torch.equal(all_rows.view(3, *rows.shape)[k], rows)
            if together.seeds is not None and alone.seeds is not None:
                assert together.seeds[k] == alone.seeds[0]


@pytest.mark.parametrize(
    "quantizers",
    [
        [Step(rate=0.2), Step(rate=1.0, step=9.0), Step(rate=2.5)],
        [Step(rate=0.2, common=True), Step(step=3.0, common=True), Step(rate=1.0, common=True)],
        [Ternary(keep=0.01, common=True), Ternary(keep=0.2, common=True), Ternary(keep=1.0, common=True)],
        [TopK(Step(rate=0.5), 0.3), TopK(Step(rate=1.5), 0.3), TopK(Step(rate=1.0), 0.3)],
    ],
    ids=str,
)
def test_quantizers_with_an_equal_stack_are_coded_together(quantizers: list[Quantizer]) -> None:
    assert len({quantizer.stack for quantizer in quantizers}) == 1
    clients = [{name: x.reshape(1, -1) for name, x in model(seed).items()} for seed in range(3)]
    scales = [q.prepare(list(params.values())) for q, params in zip(quantizers, clients, strict=True)]
    for tensor in clients[0]:
        x = torch.cat([params[tensor] for params in clients])
        codes, side = quantizers[0].encode(x, None, torch.cat(scales))
        for k, quantizer in enumerate(quantizers):
            alone = quantizer.encode(x[k : k + 1], None, scales[k])
            assert torch.equal(codes[k], alone[0][0])
            assert torch.equal(side[k], alone[1][0])


def test_stacks_separate_quantizers_that_encode_differently() -> None:
    different: list[Quantizer] = [
        Step(),
        Step(step=1.0),
        Step(rate=1.0),
        Step(bits=4, rate=1.0),
        Step(common=True),
        Ternary(),
        Ternary(keep=0.1),
        Ternary(common=True),
        QSGD(1),
        QSGD(2),
        QSGD(1, norm="max"),
        QSGD(1, whole=True),
        Normal(1),
        FixedCode(1),
        TopK(Sign(), 0.1),
        TopK(Sign(), 0.2),
        TopK(Step(rate=1.0), 0.2),
    ]
    assert len({quantizer.stack for quantizer in different}) == len(different)


@pytest.mark.parametrize("name", IDEMPOTENT)
def test_decoded_values_are_encoded_as_themselves(name: str) -> None:
    codec = CODECS[name]
    rows = model()["conv"], model()["fc"], *(x for _, x in unusual())
    for x in (x for x in rows if x.abs().max() <= codec.quantizer.most):
        once = decoded(codec, x, KEY)
        assert torch.equal(decoded(codec, once, KEY), once)


@all_codecs
def test_unusual_rows_are_sent(name: str) -> None:
    codec = CODECS[name]
    for kind, x in unusual():
        if x.abs().max() > codec.quantizer.most:
            continue
        read = unpack(pack(codec, {"w": x}, key=KEY), like={"w": x}, codec=codec)["w"]
        assert read.isfinite().all(), kind
        if isinstance(codec.quantizer, FixedCode):
            continue  # values are expected to be standardised
        if not x.any():
            assert not read.any(), kind
        most = 1 if codec.transform is None else math.sqrt(x.numel())
        assert read.abs().max() <= 16 * most * x.double().norm() + 1e-44, kind


@all_codecs
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(name: str, bad: float) -> None:
    params = model()
    params["fc"][3, 5] = bad
    with pytest.raises(ValueError, match=r"^fc: contains NaN(,| or) infinity"):
        pack(CODECS[name], params, key=KEY)


@all_codecs
def test_a_decoder_needs_only_the_parameters(name: str) -> None:
    codec = CODECS[name]
    quantizer = codec.quantizer
    read = type(quantizer).read(quantizer.parameters())
    assert read.parameters() == quantizer.parameters()
    assert len(read.parameters()) <= 255
    for coded in encoded(codec, model(), KEY).values():
        for codes, side in coded.parts:
            assert torch.equal(read.decode(codes, side), quantizer.decode(codes, side))
    with pytest.raises(ValueError, match="parameters"):
        type(quantizer).read(quantizer.parameters() + b"\0")


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_of_many_decoded_rows_is_the_row(name: str) -> None:
    """Within 5 standard errors, for every value; for the sum over values, which would show a common bias, within 4.

    A level that is 15 times expected may never be drawn, and its standard error is then 0.
    """
    codec, draws, n = CODECS[name], 2000, 512
    x = torch.randn(n, generator=torch.Generator().manual_seed(3)) + 0.3
    stack = x.expand(draws, 1, n)
    scale = codec.prepare([stack]) if codec.quantizer.prepares else None
    y = codec.decode(codec.encode(stack, rng.key(3, "draws", torch.arange(draws)), scale), draws, (n,)).double()
    error, rare = y.std(0) / math.sqrt(draws), 15 * (y - x).abs().amax() / draws
    assert ((y.mean(0) - x).abs() <= 5 * error + rare).all()
    total = y.sum(1)
    assert abs(total.mean() - x.double().sum()) <= 4 * total.std() / math.sqrt(draws) + 1e-4


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if not codec.quantizer.expands])
def test_what_error_feedback_keeps_does_not_grow(name: str) -> None:
    """u_t = x_t + e_t, e_(t+1) = u_t - Q(u_t): after 100 rounds at most 1.2 times the largest after 50.

    What top-k with k = n / 20 keeps grows for some 20 rounds, until each value has been sent.
    """
    codec, n, rounds = CODECS[name], 512, 100
    draws = torch.Generator().manual_seed(4)
    error, sizes = torch.zeros(1, 1, n), list[float]()
    for number in range(rounds):
        u = torch.randn(1, 1, n, generator=draws) + error
        scale = codec.prepare([u]) if codec.quantizer.prepares else None
        error = u - codec.decode(codec.encode(u, rng.key(4, "draws", torch.tensor([number])), scale), 1, (n,))[None]
        sizes.append(float(error.norm()))
    assert max(sizes[rounds // 2 :]) <= 1.2 * max(sizes[: rounds // 2])


@pytest.mark.parametrize(
    "quantizer",
    [
        *(Uniform(1), Stochastic(1), KMeans(1, random=True), RandomStep(), QSGD(1), QSGD(1, norm="max")),
        *(TopK(QSGD(1), 0.5), TopK(Stochastic(1), 0.5), TopK(RandomStep(), 0.5)),
    ],
    ids=str,
)
def test_quantizers_with_which_error_feedback_diverges_say_so(quantizer: Quantizer) -> None:
    assert quantizer.expands
    error, draws = torch.zeros(1, 4096), torch.Generator().manual_seed(4)
    sizes = list[float]()
    for number in range(60):
        u = torch.randn(1, 4096, generator=draws) + error
        error = u - quantizer.decode(*quantizer.encode(u, rng.key(4, "draws", torch.tensor([number]))))
        sizes.append(float(error.norm()))
    assert sizes[-1] > 3 * sizes[0]


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_what_is_lost_is_less_than_the_row(name: str) -> None:
    """|x - Q(x)|^2 <= (1 - delta) |x|^2 for each row.

    delta is at least k / (2 n) if k of n values are kept, and mean|x|^2 / mean(x^2) for signs.
    """
    codec = CODECS[name]
    quantizer = codec.quantizer
    for scale in (1e-20, 1.0, 1e20):
        for tensor in ("conv", "fc"):
            x = model(5, scale)[tensor]
            rows = [row for rows, n in codec.segments(x.shape) for row in [n] * rows]
            parts = zip(*(torch.split(t.flatten().double(), rows) for t in (x, decoded(codec, x, KEY))), strict=True)
            for row, sent in parts:
                delta = float(row.abs().mean() ** 2 / row.square().mean())
                if isinstance(quantizer, TopK | Ternary):
                    delta = kept(quantizer.keep, len(row)) / (2 * len(row))
                assert (row - sent).square().sum() <= (1 - delta) * row.square().sum() * (1 + 1e-6)


@all_codecs
def test_a_long_row_is_decoded_as_the_codec_decodes_it(name: str) -> None:
    codec, x = CODECS[name], torch.randn(1, CHUNK + 3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(unpack(pack(codec, {"w": x}, key=KEY), {"w": x})["w"], decoded(codec, x, KEY))


@all_codecs
def test_changed_frames_are_refused_or_decode_to_finite_values(name: str) -> None:
    """Bytes and fields are changed at random, also behind a right checksum."""
    params = {name: x[:3] for name, x in model().items()}
    frames = [pack(CODECS[name], params, key=KEY, described=described) for described in (False, True)]
    seen = Counter(
        fuzz.check(data, params) for data in itertools.islice(fuzz.mutations_of(frames, params, random.Random(0)), 1000)
    )
    assert seen["refused"] > 300


def test_the_coders_are_covered() -> None:
    assert {type(codec.coder) for codec in CODECS.values()} == {BitPack, Zstd, Range}
    ours = {quantizer for number, quantizer in Quantizer.known.items() if number < 128}
    assert ours <= {type(codec.quantizer) for codec in CODECS.values()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@all_codecs
def test_codes_and_side_data_are_the_same_on_a_gpu(name: str) -> None:
    codec = CODECS[name]
    for params in (model(), *({"w": x} for _, x in unusual())):
        if max(x.abs().max() for x in params.values()) > codec.quantizer.most:
            continue
        there = encoded(codec, {name: x.cuda() for name, x in params.items()}, KEY)
        for tensor, coded in encoded(codec, params, KEY).items():
            shape = params[tensor].shape
            for (codes, side), (codes_there, side_there) in zip(coded.parts, there[tensor].parts, strict=True):
                assert torch.equal(codes, codes_there.cpu())
                assert torch.equal(side, side_there.cpu())
            on_gpu = codec.decode(there[tensor], 1, shape)
            assert torch.equal(codec.decode(coded, 1, shape), on_gpu.cpu())
