"""Means by dynamic programming: the best combination of places, exact sums, and codes by buckets."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from fedshift import KMeans
from fedshift.codecs.kmeans import joint
from fedshift.codecs.kmeans import rows as stacks
from tests.codecs.test_kmeans import error, optimum


def normal(rows: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rows, n]).standard_normal((rows, n)).astype(np.float32)


def gain(x: np.ndarray, e: tuple[int, ...]) -> float:
    """Decrease of the squared error by clusters between these edges."""
    v = x.astype(np.float64) - float(x[len(x) // 2])
    return float(sum(v[a:b].sum() ** 2 / (b - a) for a, b in pairwise(e)))


def test_a_move_takes_the_best_of_all_combinations() -> None:
    """Edges 0, 10, 14, 30, 40: moves of 2^-2 of a cluster plus one, less than half of it."""
    x = np.sort(normal(5, 40), 1)
    e = np.array([[0], [10], [14], [30], [40]]).repeat(5, 1)
    moved = joint.move(joint.measure(x), e, 2)
    places = [(10, 7, 11), (14, 13, 19), (30, 25, 33)]
    for r in range(5):
        best = max(product(*places), key=lambda inner: gain(x[r], (0, *inner, 40)))
        assert moved[:, r].tolist() == [0, *best, 40]


def test_rounded_sums_are_exact() -> None:
    """Powers of two over 30 binary orders of magnitude: prefix sums by integers."""
    x = np.sort((2.0 ** -np.arange(30) * np.where(np.arange(30) % 2, -1, 1)).astype(np.float32))[None]
    p = joint.measure(x)
    whole = [int(2.0**39 * (float(v) - float(p.middle[0]))) for v in x[0]]
    assert [int(2.0**39 * s) for s in p.sums[0]] == [sum(whole[:j]) for j in range(31)]


@pytest.mark.parametrize(("n", "bits"), [(768, 4), (1_024, 4), (3_072, 4), (3_072, 6), (8_192, 6)])
def test_good_means_are_near_the_optimum_and_better_than_a_grid(n: int, bits: int) -> None:
    x = normal(20, n)
    centres, good = joint.kmeans(np.sort(x, 1), 2**bits)
    assert good.mean() >= 0.5
    _, side = KMeans(bits).encode(torch.from_numpy(x))
    assert np.array_equal(side.numpy()[good[:, 0]], centres[good[:, 0]].astype(np.float32))
    ours = [error(KMeans(bits), torch.from_numpy(row)[None]) for row in x]
    least = [optimum(torch.from_numpy(row)[None], 2**bits) for row in x]
    assert sum(ours) <= 1.03 * sum(least)
    assert max(a / b for a, b in zip(ours, least, strict=True)) <= 1.15


def test_tensors_have_the_same_means_to_the_last_bit() -> None:
    """Rows of all magnitudes, with equal values and with gaps, in a stack and alone."""
    x = normal(12, 1_000)
    x[3] *= 10.0 ** np.arange(-40, 35).repeat(14)[:1_000]
    x[4], x[5], x[6, ::2], x[7, :5] = x[4].round(), 0.5, 0, 1e30
    x = np.sort(x, 1)
    centres, good = joint.kmeans(x, 16)
    tensors, same = joint.kmeans(torch.from_numpy(x), 16)
    assert np.array_equal(good, same.numpy())
    assert 6 <= good.sum() < 12
    assert np.array_equal(centres[good[:, 0]], tensors.numpy()[good[:, 0]])
    for r in np.flatnonzero(good):
        assert np.array_equal(joint.kmeans(x[r : r + 1], 16)[0][0], centres[r])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_nan_or_infinity_are_not_good(bad: float) -> None:
    x = normal(3, 1_000)
    x[1, 7] = bad
    assert joint.kmeans(np.sort(x, 1), 16)[1][:, 0].tolist() == [True, False, True]


@pytest.mark.parametrize("number", [8, 15, 255])
def test_buckets_count_the_borders_below_each_value(number: int) -> None:
    """Values on borders and next to them, far outside, and rows whose borders do not fit in buckets."""
    x, g = normal(6, 5_000), np.random.default_rng(number)
    border = np.sort(np.linspace(-2, 2, number) + g.uniform(0, 1 / number, (6, number)), 1).astype(np.float32)
    border[4, -1], border[5, 1] = np.inf, border[5, 0]
    x[:, :number] = border
    x[:, number : 2 * number] = np.nextafter(border, np.float32(9))
    x[:, -2:] = -3e38, 3e38
    codes = np.empty(x.shape, np.uint8)
    stacks._nearest(x, border, codes)
    assert np.array_equal(codes, (x[:, :, None] > border[:, None]).sum(2))
