"""Operations on stacks of numpy rows against the same operation on one row at a time, and digests of codes."""

import hashlib

import numpy as np
import pytest
import torch

from fedshift import KMeans
from fedshift.codecs.kmeans import arrays

DIGESTS = {
    (75, 1): "b687308826d14ffa",
    (75, 2): "879786aa2818ff11",
    (75, 4): "0eed85c7fd36eea2",
    (75, 8): "af672d1523598d1d",
    (200, 1): "6fdb52671ffb4f57",
    (200, 2): "6edc51acf099743b",
    (200, 4): "5163148c42a0ff89",
    (200, 8): "9b7cd361472aae78",
    (768, 1): "484a10e901846cd2",
    (768, 2): "8056fc4ceb937938",
    (768, 4): "a439c8a5f39b81e5",
    (768, 8): "8f8c27c2fa28064f",
    (3072, 1): "3f48892e284d04f4",
    (3072, 2): "60c7c351ef1c4c19",
    (3072, 4): "40bd07f4fdd33cb5",
    (3072, 8): "73029507527056a3",
}


def stack(rows: int, n: int, seed: int = 0) -> np.ndarray:
    """Normal rows; every seventh one has equal values and every eleventh one only a few distinct values."""
    x = np.random.default_rng([seed, rows, n]).standard_normal((rows, n)).astype(np.float32)
    x[::7] = x[::7].astype(np.float16)
    x[::11] = x[::11].round()
    return x


@pytest.mark.parametrize(("n", "bits"), DIGESTS)
def test_codes_and_means_of_many_short_rows_keep_their_bits(n: int, bits: int) -> None:
    codes, side = KMeans(bits).encode(torch.from_numpy(stack(90, n)))
    assert hashlib.sha256(codes.numpy().tobytes() + side.numpy().tobytes()).hexdigest()[:16] == DIGESTS[n, bits]


@pytest.mark.parametrize("width", [1, 2, 3, 31, 32, 100])
@pytest.mark.parametrize("columns", [1, 40])
def test_search_counts_the_entries_below(width: int, columns: int) -> None:
    x = np.sort(stack(30, width), 1).astype(np.float64)
    values = stack(30, columns, 1).astype(np.float64)
    values[:, -1], values[::2, 0] = np.nan, x[::2, 0]
    found = arrays.search(x, values)
    for r in range(len(x)):
        assert found[r].tolist() == x[r].searchsorted(values[r]).tolist()


@pytest.mark.parametrize("rows", [1, 12, 22])  # all with equal values, or some
@pytest.mark.parametrize("n", [1, 2, 50])
def test_runs_are_the_distinct_values_and_their_numbers(rows: int, n: int) -> None:
    x = np.sort(stack(rows, n), 1) + np.float32(0)
    for part in (x, x[::11]):
        value, length, number = arrays.runs(part)
        assert value.shape == length.shape == (len(part), number.max() + 1)
        for r, (count,) in enumerate(number):
            distinct, counts = np.unique(part[r], return_counts=True)
            assert value[r, :count].tolist() == distinct.tolist()
            assert length[r, :count].tolist() == counts.tolist()
            assert (value[r, count:] == part[r, -1]).all()
            assert not length[r, count:].any()


def test_sums_of_rows_with_different_ends_equal_those_of_each_row_alone() -> None:
    x, w = stack(20, 301).astype(np.float64), np.arange(20.0 * 301).reshape(20, 301) % 5
    end = np.full((20, 1), 300)
    end[[3, 8, 9]] = [[5], [1], [299]]
    for r in range(20):
        x[r, end[r, 0] :], w[r, end[r, 0] :] = 0, 0
    middle = end // 2
    totals, sums = arrays.totals(x, end), arrays.prefix_sums(w, x, middle).reshape(2, 20, 301)
    for r in range(20):
        i = middle[r, 0]
        assert totals[r, 0] == x[r, : end[r, 0]].sum()
        assert sums[0, r].tolist() == [0, *w[r, :-1].cumsum()]
        assert sums[1, r].tolist() == [*(-x[r, :i][::-1].cumsum())[::-1], 0, *x[r, i:-1].cumsum()]


def test_best_takes_the_first_of_equal_scores() -> None:
    score = np.random.default_rng(0).integers(0, 4, (9, 6, 5)).astype(np.float64)
    choices = np.arange(9 * 6 * 5).reshape(9, 6, 5)
    wanted = np.take_along_axis(choices, score.argmax(0)[None], 0)[0]
    assert np.array_equal(arrays.best(score, choices), wanted)
    assert np.array_equal(arrays.best(torch.from_numpy(score), torch.from_numpy(choices)).numpy(), wanted)
