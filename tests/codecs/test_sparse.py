"""TopK: exactly k values, ties, side data of short inner rows, nesting, the size of frames."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedshift.codecs import QSGD, Cast, Codec, Identity, KMeans, Quantizer, Range, Sign, Step, Stochastic, TopK, Uniform
from fedshift.core import rng
from fedshift.wire.frame import WireError
from fedshift.wire.writer import pack, unpack
from tests.fuzz import mend

ROWS = arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=st.floats(-(2.0**60), 2.0**60, width=32)
)
INNER: list[Quantizer] = [KMeans(2), KMeans(7), Uniform(3), Stochastic(2), QSGD(3), QSGD(127), Sign(), Step(rate=1.0)]


@given(ROWS, st.floats(0.001, 1.0), st.sampled_from(INNER))
def test_the_inner_quantizer_codes_exactly_the_largest(row: np.ndarray, keep: float, inner: Quantizer) -> None:
    x, keys = torch.from_numpy(row), torch.arange(len(row))
    quantizer, k = TopK(inner, keep), max(1, round(keep * row.shape[1]))
    codes, side = quantizer.encode(x, keys)
    places = [sorted(sorted(range(len(r)), key=lambda i: (-abs(r[i]), i))[:k]) for r in row]  # of ties, the first
    assert [r.nonzero()[:, 0].tolist() for r in codes] == places
    values = x.gather(1, torch.tensor(places))
    expected = inner.decode(*inner.encode(values, keys))
    decoded = quantizer.decode(codes, side)
    assert torch.equal(decoded.gather(1, torch.tensor(places)), expected)
    assert not decoded[codes == 0].any()
    assert side.shape == (len(x), inner.width(row.shape[1]))


def test_of_equal_magnitudes_the_first_are_kept() -> None:
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.5, 2.0]])
    assert TopK(Sign(), 0.5).encode(x)[0].tolist() == [[1, 2, 0, 0, 0, 1]]
    assert TopK(Sign(), 0.5).encode(torch.zeros(1, 4))[0].tolist() == [[1, 1, 0, 0]]


def test_a_short_codebook_is_padded_with_its_last_entry() -> None:
    x = torch.tensor([[5.0, 0.1, 0.2, -3.0, 0.1, 0.1]])
    codes, side = TopK(KMeans(2), 0.3).encode(x)
    assert side.tolist() == [[-3.0, 5.0, 5.0, 5.0]]
    assert codes.tolist() == [[2, 0, 0, 1, 0, 0]]


def test_a_frame_takes_the_entropy_of_the_positions() -> None:
    """FedZip with 1 % of 100,000 values: H(0.01) = 0.0808 bits for positions, and 2 bits for each of 1,000 values."""
    x = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0))
    frame = pack(Codec(TopK(KMeans(2), 0.01), Range()), {"w": x})
    assert len(frame) < (100_000 * 0.0808 + 2 * 1000) / 8 * 1.02 + 100
    assert int((unpack(frame, like={"w": x})["w"] != 0).sum()) == 1000


def test_how_much_is_kept_is_not_sent() -> None:
    x = {"w": torch.randn(10, 100, generator=torch.Generator().manual_seed(0))}
    key = rng.key(0, "upload")
    frame = pack(Codec(TopK(QSGD(4), 0.3)), x, key=key)
    assert torch.equal(
        unpack(frame, like=x, codec=Codec(TopK(QSGD(4), 0.1)))["w"],
        unpack(frame, like=x, codec=Codec(TopK(QSGD(4, norm="max"), 0.3)))["w"],
    )
    with pytest.raises(WireError, match="w: coded by TopK"):
        unpack(frame, like=x, codec=Codec(TopK(QSGD(5), 0.3)))


def test_a_norm_over_all_tensors_is_that_of_the_kept_values() -> None:
    tensors = [torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, -4.0]])]
    assert TopK(QSGD(5, whole=True), 0.5).prepare(tensors).tolist() == [5.0]


@pytest.mark.parametrize(
    ("inner", "keep", "problem"),
    [
        (TopK(Sign()), 0.1, "inner must be a quantizer of 1 to 8 bits other than TopK"),
        (Identity(), 0.1, "inner must be a quantizer of 1 to 8 bits other than TopK"),
        (Cast("float16"), 0.1, "inner must be a quantizer of 1 to 8 bits other than TopK"),
        (KMeans(8), 0.1, "inner has 256 levels; at most 255 are allowed"),
        (Uniform(8), 0.1, "inner has 256 levels"),
        (Sign(), 0.0, r"TopK\(keep=0.0\): keep must be above 0 and at most 1"),
        (Sign(), 1.5, r"TopK\(keep=1.5\)"),
        (Sign(), math.nan, r"TopK\(keep=nan\)"),
    ],
)
def test_invalid_settings_are_refused(inner: Quantizer, keep: float, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TopK(inner, keep)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (b"", "do not have the length they state"),
        (b"\x09", "do not have the length they state"),
        (b"\x09\x01", "do not have the length they state"),
        (b"\x0c\x02\x09\x00", "quantizer 12 in TopK is TopK itself"),
        (b"\x00\x00", "inner must be a quantizer of 1 to 8 bits other than TopK"),
        (b"\x01\x01\x08", "inner has 256 levels"),
        (b"\x01\x01\x09", r"Uniform\(bits=9\)"),
        (b"\x05\x00", "quantizer 5 in TopK is not known here"),
    ],
)
def test_invalid_parameters_are_refused(parameters: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TopK.read(parameters)


def test_a_frame_with_nested_top_k_is_refused() -> None:
    x = {"w": torch.randn(10, 10, generator=torch.Generator().manual_seed(0))}
    frame = pack(Codec(TopK(Sign(), 0.3)), x)
    own = b"\x0c\x02\x09\x00"
    assert frame.count(own) == 1
    with pytest.raises(WireError, match="quantizer 12 in TopK is TopK itself"):
        unpack(mend(frame.replace(own, b"\x0c\x02\x0c\x00")), like=x)
