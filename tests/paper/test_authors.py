"""The K-means search of the authors' library, compared with that library."""

import pytest
import torch
from fast_pytorch_kmeans import KMeans as Library

from fedshift import KMeans, pack, unpack
from fedshift.core import rng
from fedshift.paper.authors import EarlyKMeans, kmeans, search
from fedshift.runs.run import Run
from tests.runs import digits, small

KEY = rng.key(0, "authors", torch.arange(2))


def weights(n: int, std: float) -> torch.Tensor:
    return std * torch.randn(2, n, generator=torch.Generator().manual_seed(0))


def error(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y - x).square().sum() / x.square().sum())


@pytest.mark.parametrize(("n", "std"), [(2400, 0.16), (51200, 0.05), (5120, 0.06)])
@pytest.mark.parametrize("bits", [4, 8])
def test_it_finds_what_the_library_finds_from_the_same_start(n: int, std: float, bits: int) -> None:
    """In float64, in which the library's distances tell close means apart."""
    x, quantizer = weights(n, std), EarlyKMeans(bits)
    codes, means = quantizer.encode(x, KEY)
    start = (rng.uniform(KEY, 2**bits).double() * n).long()
    for r, decoded in enumerate(quantizer.decode(codes, means)):
        library, values = Library(2**bits), x[r, :, None].double()
        labels = library.fit_predict(values, values[start[r]].clone())
        theirs = library.centroids[labels][:, 0]
        # a value next to a border may get the other code, which moves two means
        assert float((decoded - theirs).abs().gt(1e-6).float().mean()) < 0.02
        assert error(decoded, x[r]) == pytest.approx(error(theirs, x[r]), rel=1e-4)


def test_on_small_weights_it_stops_far_from_the_optimum() -> None:
    x = weights(51200, 0.05)
    early, ours = EarlyKMeans(8), KMeans(8)
    far, near = (error(q.decode(*q.encode(x, KEY)), x) for q in (early, ours))
    assert far > 10 * near
    long = EarlyKMeans(8, tolerance=0.0)
    assert error(long.decode(*long.encode(x, KEY)), x) < far


def test_means_without_values_become_zero() -> None:
    """Three equal first means: the first gets the values up to its border, and the others none."""
    borders, means = search(torch.tensor([[1.0, 2.0, 3.0, 10.0]]), torch.tensor([[2.0, 2.0, 2.0, 10.0]]), 100.0)
    assert borders.tolist() == [[6.0, torch.inf, torch.inf]]
    assert means.tolist() == [[2.0, 10.0, 0.0, 0.0]]


def test_rows_are_searched_alone_and_sent_in_frames() -> None:
    x = weights(300, 0.1)
    codes, means = EarlyKMeans(4).encode(x, KEY)
    for r in range(2):
        alone = EarlyKMeans(4).encode(x[r : r + 1], KEY[r : r + 1])
        assert torch.equal(alone[0][0], codes[r])
        assert torch.equal(alone[1][0], means[r])
    params = {"w": x}
    decoded = unpack(pack(kmeans(4), params, key=KEY[0]), params)["w"]
    assert len(set(decoded.flatten().tolist())) <= 16
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="contains NaN or infinity"):
            EarlyKMeans(4).encode(torch.tensor([[1.0, wrong]]), KEY[:1])
    with pytest.raises(ValueError, match="needs a key"):
        EarlyKMeans(4).encode(x)


def test_both_engines_train_with_it() -> None:
    codec = {"uplink": {"bits": "32+4", "codec": {"name": "fedshift.paper.authors:kmeans", "bits": 4}}}
    runs = [
        Run(small(codec, {"train": {"rounds": 1}, "engine": {"name": name}}), data=digits())
        for name in ("sequential", "batched")
    ]
    first, second = ([outcome.loss for outcome in run] for run in runs)
    assert first == pytest.approx(second, rel=1e-3)
