"""Many rows at once: the codes and codebooks of each row alone, to the last bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedshift import KMeans
from fedshift.codecs import kmeans as module
from fedshift.codecs import lines, many, replay
from tests.codecs.test_kmeans import BITS, FLOATS, samples

GREATEST = float(np.finfo(np.float32).max)


def rows(n: int, seed: int = 0) -> dict[str, Tensor]:
    """One row of n values for each kind that there is."""
    g = np.random.default_rng([n, seed])
    more = {
        "lognormal": g.lognormal(size=n),
        "weights": 0.05 * np.where(g.random(n) < 0.9, g.normal(size=n), 3 * g.laplace(size=n)),
        "whole numbers": g.integers(-200, 200, n),
        "tenths": g.integers(-200, 200, n) * np.float32(0.1),
        "an even grid": np.linspace(-1, 1, n),
        "few": g.integers(0, 6, n) * 0.1,
        "constant": np.full(n, 0.1),
        "zero": np.zeros(n),
        "two zeros": np.where(g.random(n) < 0.5, -0.0, 0.0),
        "zeros and more": np.where(g.random(n) < 0.5, g.choice([-0.0, 0.0], n), g.normal(size=n)),
        "greatest": g.choice([-GREATEST, GREATEST, 1.0, 2.0, 1e38], n),
        "all scales": g.normal(size=n) * 10.0 ** g.integers(-40, 35, n),
    }
    short = {name: x[0, :n] for name, x in samples(max(n, 6)).items()}
    return short | {name: torch.tensor(x, dtype=torch.float32) for name, x in more.items()}


def alone(quantizer: KMeans, x: Tensor) -> tuple[Tensor, Tensor]:
    """Row after row."""
    codes, sides = zip(*(quantizer.encode(row[None]) for row in x), strict=True)
    return torch.cat(codes), torch.cat(sides)


def together(quantizer: KMeans, x: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """All rows, and those that were left out."""
    n = x.shape[1]
    codes, side = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), quantizer.width(n))
    return codes, side, many.encode(x, codes, side, n < module.SHORT, quantizer.exact)


def compare(quantizer: KMeans, named: dict[str, Tensor]) -> set[str]:
    """All rows but those left out, which it returns, are as if alone; bits, so that zero has its sign."""
    x = torch.stack(list(named.values()))
    codes, side, left = together(quantizer, x)
    best, book = alone(quantizer, x)
    for r, name in enumerate(named):
        assert r in left or torch.equal(codes[r], best[r]), name
        assert r in left or torch.equal(side[r].view(torch.int32), book[r].view(torch.int32)), name
    return {list(named)[r] for r in left}


@pytest.mark.parametrize("n", [1, 2, 3, 40, 300, 2_400])
@pytest.mark.parametrize("bits", range(1, 9))
def test_sorted_rows(n: int, bits: int) -> None:
    assert compare(KMeans(bits), rows(n)) <= {"few", "noisy grid", "tenths", "whole numbers"}  # where a grid is best


@pytest.mark.parametrize("n", [8_192, 30_000])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("exact", [False, True])
def test_counted_rows(n: int, bits: int, exact: bool) -> None:
    assert compare(KMeans(bits, exact), rows(n)) <= {"greatest", "all scales"}  # bins that have no end; too many bins


@settings(max_examples=50)
@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 80)), elements=FLOATS), BITS)
def test_any_rows(x: np.ndarray, bits: int) -> None:
    compare(KMeans(bits), {str(r): torch.from_numpy(row) for r, row in enumerate(x)})


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set number of fills, sums of pairs of sums, and a cube root of its own."""

    def scan(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if not x.is_floating_point():
            return cumsum(x, dim, dtype=dtype)
        step = 1
        while step < x.shape[dim]:
            x = torch.cat([x[:, :step], x[:, step:] + x[:, :-step]], dim=1)
            step *= 2
        return x

    def cube_root(x: Tensor) -> Tensor:
        root = x.pow(1 / 3)
        return torch.where(x > 0, root - (root - x / (root * root)) / 3, 0.0)

    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", scan)
    monkeypatch.setattr(lines, "cube_root", cube_root)
    monkeypatch.setattr(lines, "ASKED", ())


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(("n", "bits"), [(40, 4), (2_400, 4), (2_400, 8), (5_120, 6), (30_000, 4), (30_000, 8)])
def test_rows_as_a_gpu_adds_them(n: int, bits: int) -> None:
    """The same bits for all that is sure, and that is all of what models are made of; `all scales` has longer sums."""
    left = compare(KMeans(bits), {name: x for name, x in rows(n).items() if name != "all scales"})
    assert not left & {"normal", "laplace", "uniform", "weights", "two heaps", "mostly zero", "denormal", "huge"}


@pytest.mark.usefixtures("like_a_gpu")
def test_weights_of_fifty_clients_are_sure() -> None:
    x = torch.stack([rows(2_400, seed)["weights"] for seed in range(50)])
    assert len(together(KMeans(8), x)[2]) <= 1


@pytest.mark.parametrize("n", [10, 20_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_left_out_and_harm_no_other_row(n: int, bad: float) -> None:
    x = torch.randn(20, n, generator=torch.Generator().manual_seed(n))
    x[7, n // 2] = bad
    codes, side, left = together(KMeans(2), x)
    assert left == [7]
    best, book = alone(KMeans(2), x[8:9])
    assert torch.equal(codes[8:9], best)
    assert torch.equal(side[8:9], book)
    with pytest.raises(ValueError, match="NaN or infinity"):
        KMeans(2).encode(x)


def test_many_short_rows_are_encoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a few at a time, where memory is short."""
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    best, book = alone(KMeans(4), x)
    monkeypatch.setattr(KMeans, "_sorted", None)
    for memory in (many.CACHED, 100_000):
        monkeypatch.setattr(many, "CACHED", memory)
        codes, side = KMeans(4).encode(x)
        assert torch.equal(codes, best)
        assert torch.equal(side, book)


def test_rows_that_are_not_next_to_each_other() -> None:
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)).t()
    assert all(torch.equal(*pair) for pair in zip(KMeans(2).encode(x), KMeans(2).encode(x.contiguous()), strict=True))


def test_the_demand_for_determinism_stands_after_it() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        together(KMeans(2), torch.zeros(2, 10))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [2_400, 30_000])
def test_a_replay_is_the_first_run(n: int) -> None:
    """Beyond the calls that are not recorded, each with rows of its own."""
    for seed in range(replay.AFTER + 3):
        x = torch.stack([rows(n, seed)["weights"], rows(n, seed)["lognormal"]])
        codes, side = KMeans(6).encode(x.cuda())
        best, book = alone(KMeans(6), x)
        assert torch.equal(codes.cpu(), best)
        assert torch.equal(side.cpu(), book)
