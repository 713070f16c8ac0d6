"""`solver.kmeans` on a GPU for recurring shapes: recorded once as a CUDA graph, then replayed.

The solver consists of about eight hundred small operations, each of which takes longer to launch than to run.
A replay launches all of them at once.
"""

from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fedshift.codecs.kmeans import solver
from fedshift.codecs.kmeans.arrays import Array
from fedshift.codecs.kmeans.solver import Means

AFTER = 2  # calls with a shape before it is recorded: they load the kernels and constants that a recording needs
KEPT = 32  # number of shapes


class Solver:
    """`solver.kmeans` for one shape, number of codes and stream."""

    def __init__(self, k: int) -> None:
        self.k, self.calls, self.lock = k, 0, Lock()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, v: Tensor, w: Tensor, number: Tensor) -> Means:
        with self.lock:
            self.calls += 1
            if self.calls <= AFTER:
                return solver.kmeans(v, w, number, self.k)
            if self.graph is None:
                self.graph = self._record(v, w, number)
            for static, x in zip(self.inputs, (v, w, number), strict=True):
                static.copy_(x)
            self.graph.replay()
            return Means(*(x.clone() for x in self.means))

    def _record(self, v: Tensor, w: Tensor, number: Tensor) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(v.device)
        with torch.inference_mode(False), torch.cuda.device(v.device):  # inputs are overwritten before each replay
            self.inputs = v.clone(), w.clone(), number.clone()
            with torch.cuda.graph(graph, pool=_pool(stream), capture_error_mode="thread_local"):
                self.means = solver.kmeans(*self.inputs, self.k)
        return graph


def kmeans(v: Array, w: Array, number: Array, k: int) -> Means:
    if not (isinstance(v, Tensor) and v.is_cuda):
        return solver.kmeans(v, w, number, k)
    return _solver(v.shape, k, torch.cuda.current_stream(v.device))(v, w, number)


@lru_cache(KEPT)
def _solver(shape: torch.Size, k: int, stream: torch.cuda.Stream) -> Solver:
    return Solver(k)


@lru_cache
def _pool(stream: torch.cuda.Stream) -> Any:
    """Memory for temporaries, shared by all recordings of a stream, which are replayed one after another."""
    return torch.cuda.graph_pool_handle()
