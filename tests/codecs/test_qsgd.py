"""QSGD and Sign: hand-worked levels, norms over rows and over whole models, sparse codes, refused settings."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedshift.codecs import QSGD, Codec, PerBlock, Range, Sign
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.wire.writer import pack, unpack

ROWS = arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=st.floats(-(2.0**100), 2.0**100, width=32)
)


def test_hand_worked_levels() -> None:
    """|(3, -4)| = 5 and s = 5: levels 3 and 4 exactly, codes 2 * 3 - 1 and 2 * 4."""
    codes, side = QSGD(5).encode(torch.tensor([[3.0, -4.0, 0.0]]), torch.tensor([1]))
    assert codes.tolist() == [[5, 8, 0]]
    assert side.tolist() == [[5.0]]
    assert QSGD(5).decode(codes, side).tolist() == [[3.0, -4.0, 0.0]]
    assert QSGD(5).reach(side, 6) == 3.0


@given(ROWS, st.integers(1, 127), st.sampled_from(["l2", "max"]))
def test_a_value_becomes_one_of_its_two_neighbouring_levels(row: np.ndarray, s: int, norm: str) -> None:
    x = torch.from_numpy(row)
    quantizer = QSGD(s, norm=norm)  # type: ignore[arg-type]
    codes, side = quantizer.encode(x, torch.arange(len(x)))
    y = quantizer.decode(codes, side)
    step = side.double() / s
    assert ((y.double() - x.double()).abs() <= step * (1 + 1e-5) + 1e-44).all()
    assert (y.double() * x.double() >= 0).all()
    expected = x.double().norm(dim=1) if norm == "l2" else x.double().abs().amax(1)
    assert torch.allclose(side[:, 0].double(), expected, rtol=1e-6, atol=1e-44)


def test_the_norm_over_all_tensors_is_sent_with_each() -> None:
    params = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[0.0, -4.0]])}
    codec = Codec(QSGD(5, whole=True))
    assert codec.prepare([x[None] for x in params.values()]).tolist() == [5.0]
    read = unpack(pack(codec, params, key=rng.key(0, "upload")), like=params)
    assert {name: x.tolist() for name, x in read.items()} == {name: x.tolist() for name, x in params.items()}
    most = Codec(QSGD(5, norm="max", whole=True))
    assert most.prepare([x[None] for x in params.values()]).tolist() == [4.0]


def signs(n: int, g: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(n, generator=g) < 0.5, -1.0, 1.0)


@pytest.mark.parametrize(("kind", "factor", "size"), [("signs", 1.0, 2400), ("normal", math.sqrt(2 / math.pi), 2010)])
def test_one_level_of_the_whole_vector_keeps_the_root_of_its_length(kind: str, factor: float, size: int) -> None:
    """|x|_1 / |x|_2 values on average: sqrt(d) = 1,468 if all magnitudes are equal, 0.798 sqrt(d) for normal values.

    A frame takes their entropy, log2(e d / k) + 1 bits for each, and about 70 bytes.
    """
    g = torch.Generator().manual_seed(0)
    d = 2_156_000
    x = signs(d, g) if kind == "signs" else torch.randn(d, generator=g)
    params: Params = {"conv": x[:1_600_000].view(1000, -1), "fc": x[1_600_000:].view(1000, -1)}
    frame = pack(Codec(QSGD(1, whole=True), Range()), params, key=rng.key(0, "upload"))
    read = unpack(frame, like=params)
    count = sum(int((x != 0).sum()) for x in read.values())
    assert count == pytest.approx(factor * math.sqrt(d), rel=0.1)
    assert len(frame) == pytest.approx(size, rel=0.1)
    assert len(frame) <= count * (math.log2(math.e * d / count) + 1) / 8 + 80


def test_buckets_have_norms_of_their_own() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, 8.0, 0.0]])
    codec = Codec(QSGD(1), groups=PerBlock(2))
    read = unpack(pack(codec, {"w": x}, key=rng.key(0, "upload")), like={"w": x})["w"]
    assert torch.equal(read, x)


def test_a_norm_that_float32_cannot_represent_is_refused() -> None:
    with pytest.raises(ValueError, match="has a norm beyond the range of float32"):
        QSGD(1).encode(torch.full((1, 9), 3e38), torch.tensor([1]))
    assert QSGD(1, norm="max").encode(torch.full((1, 9), 3e38), torch.tensor([1]))[1].item() == pytest.approx(3e38)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"s": 0}, r"QSGD\(s=0\): s, the levels per sign, must be between 1 and 127"),
        ({"s": 128}, r"QSGD\(s=128\)"),
        ({"s": 1, "norm": "l1"}, r"QSGD\(norm='l1'\): norm must be 'l2' or 'max'"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        QSGD(**given)  # type: ignore[arg-type]


@given(ROWS)
def test_signs_are_kept_and_magnitudes_become_their_mean(row: np.ndarray) -> None:
    x = torch.from_numpy(row)
    codes, side = Sign().encode(x)
    y = Sign().decode(codes, side)
    assert torch.allclose(side[:, 0].double(), x.double().abs().mean(1), rtol=1e-6, atol=1e-44)
    assert torch.equal(y, torch.where(x < 0, -side, side))


def test_a_sign_takes_one_bit() -> None:
    params = {"w": torch.randn(100, 80, generator=torch.Generator().manual_seed(0))}
    assert 1000 < len(pack(Codec(Sign()), params)) < 1050
