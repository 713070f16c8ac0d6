"""`solver.kmeans` and `joint.kmeans` on a GPU for recurring shapes: recorded once as a CUDA graph, then replayed.

They consist of hundreds of small operations, each of which takes longer to launch than to run. A replay launches all
of them at once.
"""

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fedshift.codecs.kmeans import joint, solver
from fedshift.codecs.kmeans.arrays import Array
from fedshift.codecs.kmeans.solver import Means

AFTER = 2  # calls with a shape before it is recorded: they load the kernels and constants that a recording needs
KEPT = 64  # number of shapes


class Recorded:
    """A function of tensors, without branches that depend on their values, for one shape and stream."""

    def __init__(self, function: Callable[..., tuple[Array, ...]]) -> None:
        self.function, self.calls, self.lock = function, 0, Lock()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Any) -> tuple[Array, ...]:
        """The last input is the number of means, which is the same in all calls."""
        *tensors, k = inputs
        with self.lock:
            self.calls += 1
            if self.calls <= AFTER:
                return self.function(*inputs)
            if self.graph is None:
                self.graph = self._record(tensors, k)
            for static, x in zip(self.inputs, tensors, strict=True):
                static.copy_(x)
            self.graph.replay()
            return tuple(x.clone() for x in self.outputs)

    def _record(self, tensors: list[Tensor], k: int) -> torch.cuda.CUDAGraph:
        graph, where = torch.cuda.CUDAGraph(), tensors[0].device
        stream = torch.cuda.current_stream(where)
        with torch.inference_mode(False), torch.cuda.device(where):  # inputs are overwritten before each replay
            self.inputs = [x.clone() for x in tensors]
            with torch.cuda.graph(graph, pool=_pool(stream), capture_error_mode="thread_local"):
                self.outputs = self.function(*self.inputs, k)
        return graph


def kmeans(v: Array, w: Array, number: Array, k: int) -> Means:
    return Means(*_run(solver.kmeans, v, w, number, k))


def joint_kmeans(x: Array, k: int) -> tuple[Array, Array]:
    centres, good = _run(joint.kmeans, x, k)
    return centres, good


def _run(function: Callable[..., tuple[Array, ...]], x: Array, *further: Any) -> tuple[Array, ...]:
    if not (isinstance(x, Tensor) and x.is_cuda):
        return function(x, *further)
    return _recorded(function, x.shape, further[-1], torch.cuda.current_stream(x.device))(x, *further)


@lru_cache(KEPT)
def _recorded(
    function: Callable[..., tuple[Array, ...]], shape: torch.Size, k: int, stream: torch.cuda.Stream
) -> Recorded:
    return Recorded(function)


@lru_cache
def _pool(stream: torch.cuda.Stream) -> Any:
    """Memory for temporaries, shared by all recordings of a stream, which are replayed one after another."""
    return torch.cuda.graph_pool_handle()
