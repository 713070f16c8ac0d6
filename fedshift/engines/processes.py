"""Engine with worker processes, which return uploads in the order of the cohort.

A worker trains a client exactly as the sequential engine does, on one torch thread, and the server adds
uploads in the same order, so the bytes of a run do not depend on the number of workers.
"""

import io
import multiprocessing
import pickle
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.core.types import CPU, Params
from fedshift.engines import workers
from fedshift.engines.client import Client
from fedshift.rounds import evaluate
from fedshift.rounds.engine import Job, Task, TrainingError, Upload, describe, evaluation
from fedshift.rounds.evaluate import ClientChunk, ClientScores, Held, Score


class Processes:
    """Train clients on `count` worker processes."""

    home = CPU

    def __init__(self, task: Task, count: int) -> None:
        if multiprocessing.current_process().daemon:
            raise ForkError(
                "a daemonic process, such as a worker of a pool, cannot start workers; use the sequential engine"
            )
        self.client = Client(task)
        self.connections = [workers.start(_work, task)[1] for _ in range(count)]
        for worker in self.connections:
            if self._receive(worker) != READY:
                self.close()
                raise ForkError(FORKED)

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return [self._cohort(job) for job in jobs]

    def _cohort(self, job: Job) -> Iterator[Upload]:
        # only a short message may be sent to a busy worker
        ahead = 1 if any(job.remembers(i) for i in range(len(job.clients))) else 2
        todo, done = iter(range(len(job.clients))), dict[int, Upload]()
        busy = dict.fromkeys(self.connections, 0)

        def hand_out(worker: "Connection[bytes, bytes]") -> None:
            while busy[worker] < ahead and (i := next(todo, None)) is not None:
                self._send(worker, dumps((i, job.recall(job.clients[i]))))
                busy[worker] += 1

        if not self.connections:
            raise RuntimeError("the engine is closed")
        try:
            message = dumps(job._replace(recall=_nothing))
        except (pickle.PicklingError, AttributeError, TypeError) as problem:
            raise TrainingError(
                f"engine processes: a codec or client rule cannot be sent to worker processes ({problem}); define its "
                "class at the top level of a module, or use the sequential engine"
            ) from problem
        try:
            for worker in self.connections:
                self._send(worker, message)
                hand_out(worker)
            for i in range(len(job.clients)):
                while i not in done:
                    for worker in self._ready([worker for worker, n in busy.items() if n]):
                        place, upload = self._receive(worker)
                        done[place] = upload
                        busy[worker] -= 1
                        hand_out(worker)
                yield done.pop(i)
        finally:
            if any(busy.values()):  # stopped half-way: remaining uploads would be taken for those of the next round
                self.close()

    def evaluate(self, params: Params) -> Score:
        task = self.client.task
        with evaluation():
            return evaluate.total(self._scored(params, evaluate.chunks(task.data)), task.metrics)

    def evaluate_clients(self, params: Params, held: Held) -> ClientScores:
        task = self.client.task
        with evaluation():
            rows = self._scored(params, evaluate.client_chunks(task.data, held))
            return evaluate.by_client(rows, held, task.metrics)

    def _scored(self, params: Params, chunks: Sequence[slice] | Sequence[ClientChunk]) -> list[Any]:
        """Results of the chunks, in order; a single chunk is scored in this process."""
        if len(chunks) == 1:
            return [_scored(self.client, params, chunks[0])]
        stride = len(self.connections)
        for first, worker in enumerate(self.connections):
            self._send(worker, dumps((params, chunks[first::stride])))
        scores: list[Any] = [None] * len(chunks)
        for first, worker in enumerate(self.connections):
            scores[first::stride] = self._receive(worker)
        return scores

    def close(self) -> None:
        for worker in self.connections:
            workers.close(worker)
        self.connections = []

    def _send(self, worker: "Connection[bytes, bytes]", message: bytes) -> None:
        try:
            worker.send_bytes(message)
        except OSError:
            raise TrainingError(DIED) from None

    def _receive(self, worker: "Connection[bytes, bytes]") -> Any:
        try:
            answer = pickle.loads(worker.recv_bytes())
        except (EOFError, OSError):
            raise TrainingError(DIED) from None
        if isinstance(answer, Failure):
            raise answer.problem from RuntimeError(f"in a worker process:\n{answer.trace}")
        return answer

    @staticmethod
    def _ready(busy: "list[Connection[bytes, bytes]]") -> "list[Connection[bytes, bytes]]":
        return wait(busy)  # type: ignore[return-value]


READY = "ready"
FORKED = "worker processes cannot train after this process has trained with a GPU present; use the sequential engine"
DIED = "engine processes: a worker process ended unexpectedly; if memory was short, set fewer engine.workers"


class ForkError(RuntimeError):
    """Worker processes cannot be started, or cannot train."""


class Failure:
    """An exception of a worker, as it is sent to the server."""

    def __init__(self, problem: Exception) -> None:
        self.problem, self.trace = problem, traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(problem))
        except Exception:  # an exception that cannot be pickled
            self.problem = RuntimeError(describe(problem))


def _work(server: "Connection[bytes, bytes]", task: Task) -> None:
    """Main loop of a worker: receive a job and indices of its clients, or a model and chunks to score it on."""
    client = Client(task)
    server.send_bytes(dumps(READY if _can_train() else FORKED))
    job: Job | None = None
    while True:
        message = server.recv_bytes()
        try:
            request = pickle.loads(message)
            if isinstance(request, Job):
                job = request
                continue
            first, second = request
            if isinstance(first, int) and job is not None:
                answer: Any = first, client.train(job, first, second)
            else:
                answer = [_scored(client, first, chunk) for chunk in second]
        except Exception as problem:
            answer = Failure(problem)
        server.send_bytes(dumps(answer))


def _scored(client: Client, params: Params, chunk: slice | ClientChunk) -> Any:
    """Sums over a chunk of the test set, or rows of a chunk of held-out examples."""
    return client.score(params, chunk) if isinstance(chunk, slice) else client.score_clients(params, chunk)


def _can_train() -> bool:
    """False in a fork of a process that used autograd with a GPU: the threads of autograd are missing."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _nothing(client: int) -> Params:
    return {}


class _Pickler(pickle.Pickler):
    """Pickle tensors as arrays: torch's own pickling takes ten times as long for small tensors."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return _tensor, (obj.contiguous().view(-1).view(torch.uint8).numpy(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def dumps(obj: object) -> bytes:
    """Pickle an object, with tensors as arrays.

    >>> pickle.loads(dumps({"w": torch.ones(2, dtype=torch.bfloat16)}))
    {'w': tensor([1., 1.], dtype=torch.bfloat16)}
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(obj)
    return file.getvalue()
