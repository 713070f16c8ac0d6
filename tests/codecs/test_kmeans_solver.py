"""The solver on points whose sums are not exact in floating point."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedshift import Codec, KMeans, pack, unpack
from fedshift.codecs.kmeans import solver

MAGNITUDES = st.builds(
    lambda sign, m, e: sign * m * 10.0**e, st.sampled_from([-1, 1]), st.floats(1, 9), st.integers(-44, 37)
)
POINTS = st.lists(st.one_of(MAGNITUDES, st.floats(-1, 1), st.integers(-50, 50).map(float)), min_size=1, max_size=300)


def kmeans(v: np.ndarray, w: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """Centres of a single row, and their squared error."""
    stack = np.append(v, v[-1])[None], np.append(w, 0)[None], np.array([[len(v)]])
    found = solver.kmeans(*stack, k)
    assert found.sure.all()
    return found.centres[0, : found.number[0, 0]], float(found.error[0, 0])


def error(v: np.ndarray, w: np.ndarray, centres: np.ndarray) -> float:
    nearest = np.abs(v[:, None] - centres).min(1)
    return float((w * nearest * nearest).sum())


@settings(max_examples=500)
@given(POINTS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_centres_are_finite_and_ascending_and_no_worse_than_a_grid(
    points: list[float], bits: int, draw: random.Random
) -> None:
    v = np.unique(np.array(points, np.float32)).astype(np.float64)
    w = np.array([draw.choice([1, 1, 2, 1_000_000]) for _ in v])
    centres, found = kmeans(v, w, 2**bits)
    assert len(centres) <= 2**bits
    assert np.isfinite(centres).all()
    assert (np.diff(centres) >= 0).all()
    assert v[0] <= centres[0] <= centres[-1] <= v[-1]
    even = np.linspace(v[0], v[-1], 2**bits)
    rounding = 1e-13 * float((w * v * v).sum())
    assert error(v, w, centres) <= error(v, w, even) * (1 + 1e-9) + rounding
    assert found == pytest.approx(error(v, w, centres), rel=1e-6, abs=rounding)


@given(arrays(np.float32, st.integers(2, 60), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_a_single_cluster_has_the_mean(values: np.ndarray) -> None:
    v = np.unique(values).astype(np.float64)
    centres, _ = kmeans(v, np.ones(len(v), int), 1)
    if len(v) > 1:
        assert centres[0] == pytest.approx(v.mean(), rel=1e-6, abs=1e-9 * float(np.abs(v).max()))


@pytest.mark.parametrize("far", [1e8, 1e12, 1e16, 1e17, 1e30])
@pytest.mark.parametrize("sides", [[-1.0], [1.0], [-1.0, 1.0]])
def test_far_points_do_not_blur_the_near_ones(far: float, sides: list[float]) -> None:
    """Beside points so far away that a sum with them would lose the rest, the rest keeps its error."""
    near = 10 * torch.rand(1, 9000, generator=torch.Generator().manual_seed(0))
    x = near.clone()
    x[0, : len(sides)] = far * torch.tensor(sides)
    read = unpack(pack(Codec(KMeans(8)), {"w": x}), {"w": x})["w"]
    alone = KMeans(8).decode(*KMeans(8).encode(near))
    rest = slice(len(sides), None)
    assert float(((read - x)[0, rest] ** 2).sum()) <= 1.2 * float(((alone - near)[0, rest] ** 2).sum())
