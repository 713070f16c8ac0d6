"""KMeans: errors near the optimum of kmeans1d, exactness, and extreme numbers."""

import kmeans1d
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedshift import KMeans, Uniform
from fedshift.codecs.kmeans import rows as stacks
from fedshift.core import rng

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 60)), elements=FLOATS)
FEW = arrays(
    np.float32, st.tuples(st.just(1), st.integers(1, 60)), elements=st.sampled_from([-1e30, -1, 0, 1e-40, 0.1, 7])
)
BITS = st.integers(1, 8)


def squared(x: Tensor, y: Tensor) -> float:
    return float(((x.double() - y.double()) ** 2).sum())


def error(quantizer: KMeans | Uniform, x: Tensor) -> float:
    return squared(x, quantizer.decode(*quantizer.encode(x)))


def optimum(x: Tensor, k: int) -> float:
    found = kmeans1d.cluster(x[0].double().numpy(), k)
    return squared(x[0], torch.tensor(found.centroids)[torch.tensor(found.clusters)])


def samples(n: int) -> dict[str, Tensor]:
    g = np.random.default_rng(0)
    one_high, one_low = g.normal(size=n), g.normal(size=n)
    one_high[3], one_low[5] = 1e6, -1e6
    named = {
        "normal": g.normal(size=n),
        "laplace": g.laplace(size=n),
        "uniform": g.uniform(size=n),
        "far from zero": 1000 + g.uniform(size=n),
        "two heaps": np.where(g.random(n) < 0.5, g.normal(-5, 0.1, n), g.normal(5, 1, n)),
        "heavy tails": g.standard_t(2, size=n),
        "mostly zero": np.where(g.random(n) < 0.9, 0, g.normal(size=n)),
        "denormal": g.normal(size=n) * 1e-40,
        "huge": g.normal(size=n) * 5e37,
        "outlier above": one_high,
        "outlier below": one_low,
        "noisy grid": np.round(g.uniform(size=n) * 15) / 15 + 1e-5 * g.normal(size=n),
    }
    return {name: torch.tensor(values, dtype=torch.float32)[None] for name, values in named.items()}


def test_hand_worked_means() -> None:
    """{0, 1} and {10, 12}: means 0.5 and 11, squared error 0.25 + 0.25 + 1 + 1."""
    x = torch.tensor([[0.0, 12.0, 1.0, 10.0]])
    codes, side = KMeans(1).encode(x)
    assert codes.tolist() == [[0, 1, 0, 1]]
    assert side.tolist() == [[0.5, 11.0]]
    assert error(KMeans(1), x) == 2.5


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("n", [3_000, 20_000])  # sorted, counted
def test_error_is_near_the_optimum_for_every_distribution(n: int, bits: int) -> None:
    for name, x in samples(n).items():
        least, ours = optimum(x, 2**bits), error(KMeans(bits), x)
        assert ours <= 1.1 * least + 1e-12 * float((x.double() ** 2).sum()), name
        assert ours <= error(Uniform(bits), x) * (1 + 1e-6), name


@given(ROWS, BITS)
def test_error_is_never_above_uniform(row: np.ndarray, bits: int) -> None:
    for x in torch.from_numpy(row)[:, None]:
        spacing = 2.0**-46 * float((x.double() ** 2).sum())  # rounding of means to float32
        assert error(KMeans(bits), x) <= error(Uniform(bits), x) * (1 + 1e-6) + spacing


@given(FEW, st.integers(3, 8))
def test_few_distinct_values_are_exact(row: np.ndarray, bits: int) -> None:
    assert error(KMeans(bits), torch.from_numpy(row)) == 0


@pytest.mark.parametrize("n", [100, 3_000, 20_000])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_quantizing_twice_changes_nothing(n: int, bits: int) -> None:
    for name, x in samples(n).items():
        once = KMeans(bits).decode(*KMeans(bits).encode(x))
        assert torch.equal(KMeans(bits).decode(*KMeans(bits).encode(once)), once), name


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("n", [500, 20_000])
def test_exact_assigns_every_value_to_its_nearest_mean(n: int, bits: int) -> None:
    for name, x in samples(n).items():
        codes, side = KMeans(bits, exact=True).encode(x)
        distance = (x[0].double()[:, None] - side[0].double()[None]).abs()
        chosen = distance.gather(1, codes[0].long()[:, None])[:, 0]
        assert torch.equal(chosen, distance.amin(1)), name


@pytest.mark.parametrize("bits", [4, 8])
def test_default_differs_from_exact_by_one_code_for_under_one_percent(bits: int) -> None:
    for name, x in samples(200_000).items():
        codes, side = KMeans(bits).encode(x)
        best, same = KMeans(bits, exact=True).encode(x)
        off = (codes.int() - best.int()).abs()
        assert torch.equal(side, same), name
        assert off.max() <= 1, name
        assert (off > 0).float().mean() < 0.01, name


def test_rows_are_encoded_as_if_alone() -> None:
    for n in (100, 1_000, 9_000, 20_000):
        x = torch.randn(3, n, generator=torch.Generator().manual_seed(n)) * torch.tensor([[1.0], [100.0], [1e-3]])
        codes, side = KMeans(4).encode(x)
        for r in range(3):
            alone, its_side = KMeans(4).encode(x[r : r + 1])
            assert torch.equal(codes[r], alone[0])
            assert torch.equal(side[r], its_side[0])


def test_counted_and_sorted_rows_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    counted = error(KMeans(6), x)
    monkeypatch.setattr(stacks, "LONG", 1 << 62)
    assert counted == pytest.approx(error(KMeans(6), x), rel=0.02)


@pytest.mark.parametrize("n", [10, 20_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(n: int, bad: float) -> None:
    x = torch.zeros(1, n)
    x[0, n // 2] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        KMeans(4).encode(x)


def test_a_constant_row_is_exact() -> None:
    for n in (1, 2, 20_000):
        x = torch.full((2, n), 0.1)
        assert error(KMeans(4), x) == 0


def test_small_values_among_many_huge_ones() -> None:
    """Even in float64, 3e38 absorbs a denormal: the small values look equal, and still every code is used."""
    huge = 3e38 + 1e37 * torch.rand(60, generator=torch.Generator().manual_seed(0))
    x = torch.cat([torch.arange(1, 41) * 1e-44, huge])[None]
    assert error(KMeans(5), x) <= 1.1 * optimum(x, 32)


@given(ROWS, BITS)
def test_random_rounding_takes_one_of_the_two_neighbouring_codes(row: np.ndarray, bits: int) -> None:
    x = torch.from_numpy(row)
    quantizer = KMeans(bits, random=True)
    codes, side = quantizer.encode(x, torch.arange(len(x)))
    y = quantizer.decode(codes, side)
    assert torch.equal(side[:, 0], x.amin(1))
    assert torch.equal(side[:, -1], x.amax(1))
    for r in range(len(x)):
        between = (side[r][None] > torch.minimum(x[r], y[r])[:, None]) & (
            side[r][None] < torch.maximum(x[r], y[r])[:, None]
        )
        assert not between.any()  # no code lies between a value and its decoded value
    exact = (x[:, :, None] == side[:, None, :]).any(2)
    assert torch.equal(y[exact], x[exact])


def test_random_rounding_is_unbiased() -> None:
    """Over 400 draws, within 5 standard errors: the values of one row together, and each value far from its codes."""
    g = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(1, 500, generator=g), torch.randn(1, 500, generator=g).exp()])
    for bits in (1, 2, 4):
        quantizer = KMeans(bits, random=True)
        draws = [quantizer.decode(*quantizer.encode(x, rng.key(seed, "test", torch.arange(2)))) for seed in range(400)]
        bias = torch.stack(draws).double().mean(0) - x
        book = quantizer.encode(x, torch.arange(2))[1].double()
        above = torch.searchsorted(book, x.double()).clamp(1, book.shape[1] - 1)
        low, high = book.gather(1, above - 1), book.gather(1, above)
        variance = (x - low) * (high - x) / 400
        assert (bias.sum(1).abs() <= 5 * variance.sum(1).sqrt()).all()
        far = (variance * 400 / (high - low).square()) > 0.1
        assert (bias.abs() <= 5 * variance.clamp(min=0).sqrt())[far].all()


def test_random_rounding_depends_on_the_key_alone_in_a_stack_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(2)
    x, key = torch.randn(3, 5000, generator=g), torch.tensor([3, 4, 5])
    quantizer = KMeans(3, random=True)
    codes, side = quantizer.encode(x, key)
    row_codes, alone = quantizer.encode(x[1:2], key[1:2])
    assert torch.equal(row_codes[0], codes[1])
    assert torch.equal(alone[0], side[1])
    assert not torch.equal(codes, quantizer.encode(x, key + 1)[0])
    monkeypatch.setattr("fedshift.codecs.base.CHUNK", 1024)
    assert torch.equal(quantizer.encode(x, key)[0], codes)


def test_random_rounding_needs_a_key() -> None:
    with pytest.raises(ValueError, match="rounds at random and needs a key"):
        KMeans(4, random=True).encode(torch.zeros(1, 3))
