"""Error and speed of K-means compared with an exact solver and with other libraries."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedshift.bench.codecs import Target, encode
from fedshift.bench.timing import installed
from fedshift.codecs import KMeans, Uniform
from fedshift.core.types import Params
from fedshift.wire.measure import Tick, medians, squared

SAMPLE = 100_000  # values per tensor for the exact solver


def optimum(params: Params, tick: Tick) -> Iterator[Target]:
    """Squared error divided by the optimum (kmeans1d), on a random sample of each tensor."""
    if not installed("kmeans1d"):
        return
    import kmeans1d

    g = torch.Generator().manual_seed(1)
    worst_all, worst_tensor, worst_uniform = 0.0, 0.0, 0.0
    for bits in range(1, 9):
        ours = best = 0.0
        for name, x in params.items():
            tick(f"optimum {bits} bit {name}")
            sample = x.flatten()[torch.randperm(x.numel(), generator=g)[:SAMPLE]].view(1, -1)
            found = squared(sample, KMeans(bits).decode(*KMeans(bits).encode(sample)))
            uniform = squared(sample, Uniform(bits).decode(*Uniform(bits).encode(sample)))
            solved = kmeans1d.cluster(sample[0].double().numpy(), 2**bits)
            least = squared(sample[0], torch.tensor(solved.centroids)[torch.tensor(solved.clusters)])
            worst_tensor, worst_uniform = max(worst_tensor, found / least), max(worst_uniform, found / uniform)
            ours, best = ours + found, best + least
        worst_all = max(worst_all, ours / best)
    yield Target("K-means error / optimum, all tensors, worst of 1..8 bit", "<= 1.03x", worst_all, worst_all <= 1.03)
    yield Target(
        "K-means error / optimum, any tensor, worst of 1..8 bit", "<= 1.15x", worst_tensor, worst_tensor <= 1.15
    )
    yield Target("K-means error / uniform error, largest", "<= 1x", worst_uniform, worst_uniform <= 1)


def rivals(params: Params, tick: Tick) -> Iterator[Target]:
    """Time of fast-pytorch-kmeans (300 iterations) and scikit-learn divided by that of KMeans, on the same tensors."""
    asked = {("fast_pytorch_kmeans", 4): 40, ("fast_pytorch_kmeans", 8): 400}
    for bits in (4, 8):
        ours = medians({"ours": partial(encode, KMeans(bits), params)}, 9)["ours"]
        for package, fit in RIVALS.items():
            if not installed(package):
                continue
            tick(f"{package} {bits} bit")
            start = time.process_time()
            for x in params.values():
                fit(x.reshape(-1, 1), 2**bits)
            ratio, limit = (time.process_time() - start) / ours, asked.get((package, bits), 0)
            yield Target(f"{package} / KMeans, {bits} bit", f">= {limit}x" if limit else "-", ratio, ratio >= limit)


def _fast_pytorch_kmeans(x: Tensor, k: int) -> None:
    from fast_pytorch_kmeans import KMeans as Rival

    torch.manual_seed(0)
    Rival(n_clusters=k, max_iter=300).fit_predict(x)


def _sklearn(x: Tensor, k: int) -> None:
    from sklearn.cluster import KMeans as Rival

    Rival(n_clusters=k, n_init=1, random_state=0).fit(x.numpy())


RIVALS: dict[str, Callable[[Tensor, int], Any]] = {"fast_pytorch_kmeans": _fast_pytorch_kmeans, "sklearn": _sklearn}
