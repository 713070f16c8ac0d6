"""Ternary: the kept fraction, its means, ties and zeros."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedshift import Codec, Range, Ternary, pack, unpack

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
ROWS = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=FLOATS)


def test_hand_worked() -> None:
    """A third of six values is two: -4 and 5, each the only one of its sign."""
    x = torch.tensor([[0.1, -4.0, 3.0, 1.0, 5.0, -0.5]])
    codes, side = Ternary(keep=1 / 3).encode(x)
    assert codes.tolist() == [[0, 2, 0, 0, 1, 0]]
    assert side.tolist() == [[5.0, -4.0]]
    assert Ternary().decode(codes, side).tolist() == [[0.0, -4.0, 0.0, 0.0, 5.0, 0.0]]


@given(ROWS, st.floats(0.001, 1.0))
def test_the_largest_are_kept_as_the_mean_of_their_sign(row: np.ndarray, keep: float) -> None:
    x = torch.from_numpy(row)
    codes, side = Ternary(keep=keep).encode(x)
    for r in range(len(x)):
        kept, size = codes[r] != 0, x[r].abs()
        wanted = max(1, round(keep * x.shape[1]))
        assert int(kept.sum()) >= min(wanted, int((size > 0).sum()))
        if kept.any() and not kept.all():
            assert size[kept].min() >= size[~kept].max()
        for code, mean in ((1, side[r, 0]), (2, side[r, 1])):
            some = x[r][codes[r] == code].double()
            assert mean.item() == pytest.approx(some.mean().item() if len(some) else 0.0, rel=1e-6)


def test_ties_are_kept_together_and_zeros_never() -> None:
    codes, side = Ternary(keep=0.25).encode(torch.tensor([[1.0, -1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[1, 2, 1, 0], [0, 0, 0, 0]]
    assert side.tolist() == [[1.0, -1.0], [0.0, 0.0]]


def test_a_frame_has_few_bytes() -> None:
    """1 % of 100,000 values: 0.081 bits of entropy for the positions, and 0.01 for the signs."""
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(100, 1000, generator=g)}
    frame = pack(Codec(Ternary(keep=0.01), Range()), params)
    assert len(frame) < 100_000 * 0.091 / 8 * 1.02 + 200
    decoded = unpack(frame, like=params)["w"]
    assert int((decoded != 0).sum()) == 1000
    assert torch.equal(decoded.sign()[decoded != 0], params["w"].sign()[decoded != 0])


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Ternary\(bits=4\): bits must be 2"):
        Ternary(4)
    with pytest.raises(ValueError, match=r"Ternary\(keep=0\): keep must be above 0 and at most 1"):
        Ternary(keep=0)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            Ternary().encode(torch.tensor([[1.0, bad]]))


def test_a_common_threshold_keeps_the_largest_of_all_tensors() -> None:
    """A third of nine values is three: 9, 8 and -7, all of one tensor."""
    tensors = [torch.tensor([[9.0, 8.0, -7.0]]), torch.tensor([[6.0, -5.0, 4.0, 3.0, 2.0, 1.0]])]
    quantizer = Ternary(keep=1 / 3, common=True)
    least = quantizer.prepare(tensors)
    assert least.tolist() == [7.0]
    (codes, side), (none, zero) = (quantizer.encode(x, None, least) for x in tensors)
    assert (codes.tolist(), side.tolist()) == ([[1, 1, 2]], [[8.5, -7.0]])
    assert (none.tolist(), zero.tolist()) == ([[0] * 6], [[0.0, 0.0]])


def test_a_frame_with_a_common_threshold_keeps_the_fraction_of_all_values() -> None:
    g = torch.Generator().manual_seed(1)
    params = {"small": torch.randn(100, 100, generator=g), "large": 2 * torch.randn(100, 300, generator=g)}
    decoded = unpack(pack(Codec(Ternary(keep=0.01, common=True), Range()), params), like=params)
    assert sum(int((x != 0).sum()) for x in decoded.values()) == 400
    assert int((decoded["small"] != 0).sum()) < 20
