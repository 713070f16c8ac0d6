"""Frames that are slow to decode are refused by their headers, or their work is bounded by the number of values."""

import numpy as np
import pytest
import torch
import zstandard
from torch.utils._python_dispatch import TorchDispatchMode

from fedshift import (
    Cast,
    Codec,
    Identity,
    KMeans,
    Mean,
    Params,
    PerBlock,
    PerChannel,
    Range,
    Step,
    Stochastic,
    Ternary,
    Uniform,
    WireError,
    Zstd,
    pack,
    unpack,
)
from fedshift.codecs.base import Coder, Lookup
from fedshift.codecs.bitpack import BitPack
from tests import slow_frames

LIKE = {"w": torch.zeros(300, 400), "b": torch.zeros(7)}


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and the sizes of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        self.numbers += out.numel() if isinstance(out, torch.Tensor) else 0
        return out


def given(data: bytes) -> slow_frames.Coded:
    return lambda n, levels: data


def work(frame: bytes, like: Params) -> Work:
    counted = Work()
    with counted:
        Mean(like).add(frame)
    return counted


@pytest.mark.parametrize("quantizer", [Uniform(8), Uniform(1), KMeans(8), KMeans(1), Stochastic(8), Step(), Ternary()])
def test_short_blocks_take_work_in_proportion_to_the_values(quantizer: Lookup) -> None:
    values = 300 * 400 + 7
    for n in 1, 2, 3, 7, 16, 64, 300:
        codec = Codec(quantizer, groups=PerBlock(n), min_axes=0)
        done = work(slow_frames.frame_of(LIKE, codec, slow_frames.packed), LIKE)
        assert done.numbers < 40 * values, n
        assert done.operations < 200, n


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 5, 255, 256, 300])
def test_rows_of_every_length_are_decoded_as_specified(bits: int, n: int) -> None:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(2**bits, (50, n), generator=g, dtype=torch.uint8)
    for size in 1.0, 1e-38, 3e38:
        side = (torch.rand(50, 2, generator=g) - 0.5).sort().values * size
        low, high = side.double().numpy().T[..., None]
        exact = (low + codes.numpy() / (2**bits - 1) * (high - low)).astype(np.float32)
        wanted = np.where(codes.numpy() == 2**bits - 1, side[:, 1:].numpy(), exact)
        assert np.array_equal(Uniform(bits).decode(codes, side).numpy(), wanted)


@pytest.mark.parametrize("codec", [Codec(Identity(), Zstd()), Codec(Uniform(4), Zstd(), min_axes=0)])
def test_padded_and_chopped_zstd_frames_are_refused(codec: Codec) -> None:
    for make in (
        slow_frames.empty_blocks,
        slow_frames.short_blocks,
        lambda n, levels: slow_frames.short_blocks(n, levels, 5),
    ):
        frame = slow_frames.frame_of({"w": LIKE["w"]}, codec, make)
        with pytest.raises(WireError, match=r"w: (a zstd frame of more than|\d+ bytes of codes instead of at most)"):
            Mean({"w": LIKE["w"]}).add(frame)


@pytest.mark.parametrize("extra", [b"\x50\x2a\x4d\x18\x08\0\0\0" + bytes(8), bytes(9)])  # a skippable frame, and none
def test_bytes_before_or_after_a_zstd_frame_are_refused(extra: bytes) -> None:
    codec = Codec(Uniform(4), Zstd())
    whole = Zstd().encode(torch.zeros(300 * 400, dtype=torch.uint8), 16)
    for data in (whole + extra, extra + whole):
        frame = slow_frames.frame_of({"w": LIKE["w"]}, codec, given(data))
        with pytest.raises(WireError, match="w: "):
            unpack(frame, {"w": LIKE["w"]})


def test_a_zstd_frame_that_needs_a_dictionary_is_refused() -> None:
    book = zstandard.ZstdCompressionDict(bytes(range(256)) * 8, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    trained = zstandard.train_dictionary(1024, [bytes(np.random.default_rng(i).integers(0, 9, 400)) for i in range(64)])
    for made in (book, trained):
        whole = zstandard.ZstdCompressor(dict_data=made).compress((bytes(range(256)) * 240)[: 150 * 400])
        frame = slow_frames.frame_of({"w": LIKE["w"]}, Codec(Uniform(4), Zstd()), given(whole))
        with pytest.raises(WireError, match="w: "):
            unpack(frame, {"w": LIKE["w"]})


def test_codes_longer_than_their_coder_writes_are_refused() -> None:
    for codec in (Codec(Uniform(8), Range(), min_axes=0), Codec(Uniform(1), Range(), min_axes=0)):
        frame = slow_frames.frame_of(LIKE, codec, slow_frames.rarest)
        with pytest.raises(WireError, match=r"w: \d+ bytes of codes instead of at most \d+"):
            unpack(frame, LIKE)


@pytest.mark.parametrize("coder", [BitPack(), Zstd(1), Zstd(3), Zstd(22), Range()])
@pytest.mark.parametrize("bits", [1, 3, 4, 5, 8])
def test_honest_coders_stay_within_their_bounds(coder: Coder, bits: int) -> None:
    draw = np.random.default_rng(0)
    top = 2**bits - 1
    for n in 1, 2, 9, 300, 5_000, 200_000:
        flat = draw.integers(0, top + 1, n)
        skewed = np.minimum(draw.geometric(0.7, n) - 1, top)
        alone = np.zeros(n, np.int64)
        alone[: min(n, top + 1)] = np.arange(min(n, top + 1))  # each code once, the first in every other place
        mixed = np.concatenate([flat[: n // 2], np.tile(flat[:3], n)[: n - n // 2]])
        sparse = np.where(draw.random(n) < 0.02, flat, top)
        sorted_ = np.sort(np.where(draw.random(n) < 0.3, flat, 0))  # all gaps at one end
        third = np.where(np.arange(n) % 3 == 2, flat, 0)  # as many gaps as are coded
        for symbols in (flat, skewed, alone, mixed, sparse, sorted_, sorted_[::-1], third):
            codes = torch.from_numpy(symbols.astype(np.uint8))
            data = coder.encode(codes, 2**bits)
            assert len(data) <= coder.most(n, 2**bits)
            assert torch.equal(coder.decode(data, n, 2**bits), codes)


def test_honest_zstd_frames_have_fewer_blocks_than_allowed_at_every_level() -> None:
    """Content with different parts, for which the encoder splits blocks most often."""
    draw = np.random.default_rng(0)
    kinds = (lambda n: draw.integers(0, 3, n), lambda n: draw.integers(200, 256, n), lambda n: np.zeros(n))
    for length in 512, 1_000, 8_192:
        parts = [kinds[i % 3](length) for i in range((1 << 18) // length)]
        codes = torch.from_numpy(np.concatenate(parts).astype(np.uint8))
        for level in 1, 3, 9, 16, 19:
            assert torch.equal(Zstd(level).decode(Zstd(level).encode(codes, 256), len(codes), 256), codes)


def test_a_server_that_knows_the_codec_refuses_others_and_accepts_exact_frames() -> None:
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(8, 9, generator=g), "b": torch.randn(8, generator=g)}
    expected = {"w": Codec(KMeans(4, exact=True), Zstd(19))}
    for taken in (Codec(KMeans(4), Zstd()), Codec(Identity())):
        frame = pack({"w": taken}, params)
        assert torch.equal(unpack(frame, params, expected)["w"], unpack(frame, params)["w"])
        Mean(params).add(frame, codec=expected)
    slower = (
        Codec(KMeans(4), Range()),
        Codec(Identity(), Range()),
        Codec(KMeans(4), Zstd(), PerChannel()),
        Codec(KMeans(3), Zstd()),
        Codec(Cast("float16")),
    )
    for other in slower:
        frame = pack({"w": other}, params)
        mean = Mean(params)
        with pytest.raises(WireError, match=r"w: coded by .* instead of KMeans\(bits=4, .*Zstd"):
            unpack(frame, params, expected)
        with pytest.raises(WireError, match="w: coded by"):
            mean.add(frame, codec=expected)
        assert mean.count == 0
    with pytest.raises(WireError, match="b: coded by Identity"):
        unpack(pack({"b": Codec(Identity(), Range(), min_axes=0)}, params), params, Codec(Identity()))


def test_many_tensors_without_values_take_few_operations() -> None:
    """A frame of a few bytes: a run of 2,000 tensors without values, with a codec each."""
    like = {f"layer{i}": torch.zeros(0, 3) for i in range(2000)}
    frame = slow_frames.frame_of(like, Codec(KMeans(8), Range(), PerChannel()), given(b""))
    assert len(frame) < 50
    done = work(frame, like)
    assert done.operations < 20 * len(like)
    assert done.numbers == 0


def test_a_shared_buffer_is_decoded_once() -> None:
    g = torch.Generator().manual_seed(0)
    like = {f"layer{i}": torch.randn(3, 5, generator=g) for i in range(300)}
    frame = slow_frames.frame_of(like, Codec(Uniform(8), Range()), slow_frames.gaps)
    done = work(frame, like)
    assert done.numbers < 40 * 300 * 256  # a table of 256 values per tensor at most
    assert done.operations < 60 * len(like)
