"""Stacks of rows, as numpy arrays and as tensors: the codes and codebooks of each row alone, to the last bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedshift import KMeans
from fedshift.bench.timing import in_process
from fedshift.codecs.kmeans import graphs, solver
from fedshift.codecs.kmeans import rows as stacks
from fedshift.core.memory import CLEAR, fresh_memory, resident
from tests.codecs.test_kmeans import BITS, FLOATS, samples

GREATEST = float(np.finfo(np.float32).max)


def rows(n: int, seed: int = 0) -> dict[str, Tensor]:
    """One row of n values of each kind."""
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
    """Encode one row after another."""
    codes, sides = zip(*(quantizer.encode(row[None]) for row in x), strict=True)
    return torch.cat(codes), torch.cat(sides)


def together(quantizer: KMeans, x: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Encode all rows at once as tensors, as on a GPU, and return the rows left out too."""
    codes, side = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), quantizer.width(x.shape[1]))
    return codes, side, stacks.encode(x, codes, side, quantizer.exact)


def compare(quantizer: KMeans, named: dict[str, Tensor]) -> set[str]:
    """Check that stacks equal single rows, bit by bit; return the rows left out of the tensors."""
    x = torch.stack(list(named.values()))
    best, book = alone(quantizer, x)
    codes, side = quantizer.encode(x)
    assert torch.equal(codes, best)
    assert torch.equal(side.view(torch.int32), book.view(torch.int32))
    codes, side, left = together(quantizer, x)
    for r, name in enumerate(named):
        assert r in left or torch.equal(codes[r], best[r]), name
        assert r in left or torch.equal(side[r].view(torch.int32), book[r].view(torch.int32)), name
    return {list(named)[r] for r in left}


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many passes of fill as needed."""
    monkeypatch.setattr(solver, "FILLS", (80,) * len(solver.FILLS))


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("n", [1, 2, 3, 40, 300, 2_400])
@pytest.mark.parametrize("bits", range(1, 9))
def test_sorted_rows(n: int, bits: int) -> None:
    assert compare(KMeans(bits), rows(n)) <= {"few", "noisy grid", "tenths", "whole numbers"}  # a grid is best


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("n", [16_384, 30_000])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("exact", [False, True])
def test_counted_rows(n: int, bits: int, exact: bool) -> None:
    assert compare(KMeans(bits, exact), rows(n)) <= {"greatest", "all scales"}  # bins without a middle; too many bins


@settings(max_examples=50)
@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 80)), elements=FLOATS), BITS)
def test_any_rows(x: np.ndarray, bits: int) -> None:
    compare(KMeans(bits), {str(r): torch.from_numpy(row) for r, row in enumerate(x)})


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix sums by pairwise addition."""

    def scan(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if not x.is_floating_point():
            return cumsum(x, dim, dtype=dtype)
        step = 1
        while step < x.shape[dim]:
            x = torch.cat([x[:, :step], x[:, step:] + x[:, :-step]], dim=1)
            step *= 2
        return x

    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", scan)


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize(("n", "bits"), [(40, 4), (2_400, 4), (2_400, 8), (5_120, 6), (30_000, 4), (30_000, 8)])
def test_rows_with_the_order_of_summation_of_a_gpu(n: int, bits: int) -> None:
    """All rows that are sure have equal bits, and weights are sure; sums of `all scales` are not exact."""
    left = compare(KMeans(bits), {name: x for name, x in rows(n).items() if name != "all scales"})
    assert not left & {"normal", "laplace", "uniform", "weights", "two heaps", "mostly zero", "denormal", "huge"}


@pytest.mark.usefixtures("like_a_gpu")
def test_weights_of_fifty_clients_are_sure() -> None:
    x = torch.stack([rows(2_400, seed)["weights"] for seed in range(50)])
    assert len(together(KMeans(8), x)[2]) <= 1


@pytest.mark.parametrize("n", [10, 20_000])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_left_out_and_other_rows_are_unaffected(n: int, bad: float) -> None:
    x = torch.randn(20, n, generator=torch.Generator().manual_seed(n))
    x[7, n // 2] = bad
    codes, side, left = together(KMeans(2), x)
    assert left == [7]
    best, book = alone(KMeans(2), x[8:9])
    assert torch.equal(codes[8:9], best)
    assert torch.equal(side[8:9], book)
    with pytest.raises(ValueError, match="NaN or infinity"):
        KMeans(2).encode(x)


def test_many_short_rows_are_encoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    best, book = alone(KMeans(4), x)
    for memory in (stacks.CACHED, 100_000, 1):
        monkeypatch.setattr(stacks, "CACHED", memory)
        codes, side = KMeans(4).encode(x)
        assert torch.equal(codes, best)
        assert torch.equal(side, book)


def peaks(n: int) -> tuple[float, ...]:
    """Peak bytes of memory per value while a normal row and narrow ones are encoded; for a separate process."""
    torch.set_num_threads(1)
    fresh_memory()
    g = torch.Generator().manual_seed(0)
    steps = torch.randint(0, 40, (1, n), generator=g, dtype=torch.int32)
    cases = [torch.randn(1, n, generator=g), torch.full((1, n), 0.1), 1 + steps * 2.0**-23, 1 + steps * 2.0**-15]
    found = []
    for x in cases:
        KMeans(4).encode(x[:, :20_000])  # loads libraries
        CLEAR.write_text("5")
        before = resident("VmHWM")
        KMeans(4).encode(x)
        found.append((resident("VmHWM") - before) / n)
    return tuple(found)


@pytest.mark.skipif(not CLEAR.exists(), reason="needs the peak memory of a process (Linux)")
def test_narrow_rows_need_no_more_memory_than_others() -> None:
    """Constant, 40 adjacent float32 numbers, or 40 values within a few bins."""
    normal, *narrow = in_process(__name__, "peaks", 1 << 22)
    assert max(narrow) <= 1.1 * normal, (normal, narrow)


def test_rows_that_are_not_contiguous() -> None:
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)).t()
    assert all(torch.equal(*pair) for pair in zip(KMeans(2).encode(x), KMeans(2).encode(x.contiguous()), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [2_400, 30_000])
def test_a_replay_equals_the_first_run(n: int) -> None:
    """After the calls that are not recorded; every call has other rows."""
    for seed in range(graphs.AFTER + 3):
        x = torch.stack([rows(n, seed)["weights"], rows(n, seed)["lognormal"]])
        codes, side = KMeans(6).encode(x.cuda())
        best, book = alone(KMeans(6), x)
        assert torch.equal(codes.cpu(), best)
        assert torch.equal(side.cpu(), book)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [40, 2_400, 30_000])
def test_codes_on_a_gpu_equal_those_on_a_cpu(n: int) -> None:
    x = torch.stack([row for name, row in rows(n).items() if name != "all scales"])  # its sums do not fit in 53 bits
    for quantizer in (KMeans(1), KMeans(4), KMeans(8), KMeans(4, exact=True)):
        codes, side = quantizer.encode(x.cuda())
        best, book = alone(quantizer, x)
        assert torch.equal(codes.cpu(), best)
        assert torch.equal(side.cpu(), book)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_setting_of_deterministic_algorithms_is_restored() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        KMeans(2).encode(torch.zeros(2, 10, device="cuda"))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
