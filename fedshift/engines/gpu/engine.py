"""The batched engine: the jobs of many runs are trained as one stack of models.

Draws are the same as in the sequential engine, so local weights differ only by rounding; the codecs
are the same, so equal weights have equal codes.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from fedshift.algorithms.base import defines, uses_travel
from fedshift.codecs.base import reason
from fedshift.core.tree import take
from fedshift.core.types import Params
from fedshift.data.cohorts import travel
from fedshift.engines.gpu.coding import TrainedJob, trained_job, uploads
from fedshift.engines.gpu.stacked import StackError, each_loss, stacked
from fedshift.engines.gpu.steps import Steps
from fedshift.rounds import evaluate
from fedshift.rounds.engine import RAISED, Job, Task, TrainingError, Upload, arithmetic, describe, evaluation
from fedshift.rounds.evaluate import ClientChunk, ClientScores, Held, Part, Score
from fedshift.rounds.optimizers import Adam
from fedshift.rounds.policy import sent_loss
from fedshift.rounds.uplink import split_memory

EXAMPLES = 10_000  # examples scored at a time


class Batched:
    """Train all clients of all jobs as one stack; on a GPU, one step of all clients is a CUDA graph."""

    def __init__(self, task: Task, precision: str = "tf32", deterministic: bool = False) -> None:
        if task.optimizer is not None and not isinstance(task.optimizer, Adam):
            raise StackError(
                "train.optimizer: of the optimizers, only sgd, adam and adamw step many clients at once; "
                "use engine.name = 'sequential' or 'processes'"
            )
        self.task, self.precision, self.deterministic = task, precision, deterministic
        self.home = task.data.x.device
        task.model.eval()
        for module in task.learners:
            module.training = True
        with arithmetic(precision, deterministic):
            self.net = stacked(task, precision)

    @cached_property
    def steps(self) -> Steps:
        return Steps(self.task, self.net)

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        """Train immediately; uploads are computed when the first is requested, which must be before the next call."""
        begin = time.perf_counter()
        with arithmetic(self.precision, self.deterministic), torch.no_grad():
            trained = self._train(jobs)
        made: list[list[Upload]] = []

        def uploads_of(place: int) -> Iterator[Upload]:
            if not made:
                with arithmetic(self.precision, self.deterministic), torch.no_grad():
                    made.extend(self._uploads(trained, begin))
            yield from made[place]

        return [uploads_of(place) for place in range(len(jobs))]

    def _train(self, jobs: Sequence[Job]) -> list[TrainedJob]:
        """Train all jobs as one stack."""
        memories = [[job.recall(client) for client in job.clients] for job in jobs]
        rule_memories = [
            self._rule_memories(job, job_memories) for job, job_memories in zip(jobs, memories, strict=True)
        ]
        distances = [self._travel(job) for job in jobs]
        try:
            with torch.enable_grad():
                weights = self.steps.train(jobs, rule_memories)
        except RAISED as problem:
            raise TrainingError(f"round {jobs[0].number}: {describe(problem)}") from problem
        return [trained_job(*job) for job in zip(jobs, weights, memories, rule_memories, distances, strict=True)]

    def _uploads(self, trained: Sequence[TrainedJob], begin: float) -> list[list[Upload]]:
        self._wait()
        middle, clients = time.perf_counter(), sum(len(stack.job.clients) for stack in trained)
        try:
            made = uploads(self.task, trained)
        except RAISED as problem:  # of a user's codec
            codecs = {uplink.codec for stack in trained for uplink in stack.job.uplinks if uplink.codec.by_user}
            why = reason(problem) if isinstance(problem, ValueError) else describe(problem)
            where = ": ".join([f"round {trained[0].job.number}", *sorted(map(str, codecs))])
            raise TrainingError(f"{where}: {why}") from problem
        self._wait()
        seconds = ((middle - begin) / clients, (time.perf_counter() - middle) / clients)
        losses = [self._local_losses(stack.job) for stack in trained]
        return [
            [upload._replace(seconds=seconds, loss=loss) for upload, loss in zip(job, job_losses, strict=True)]
            for job, job_losses in zip(made, losses, strict=True)
        ]

    def _local_losses(self, job: Job) -> list[float | None]:
        """Loss of the broadcast on the examples of each client, as it is sent; None if the job does not ask for it."""
        if not job.owned:
            return [None] * len(job.clients)
        data = self.task.data
        with self._evaluating(job.sent.params) as stack:
            each = [
                each_loss(
                    self.task.loss,
                    self.net(stack, self.net.inputs(data.x, index[None], None)),
                    data.targets(data.y[index])[None],
                )[0]
                for index in torch.split(torch.cat(list(job.owned)).to(self.home), EXAMPLES)
            ]
        by_client = torch.split(torch.cat(each).double(), [len(examples) for examples in job.owned])
        return [sent_loss(loss) for loss in torch.stack([losses.mean() for losses in by_client]).tolist()]

    def _wait(self) -> None:
        if self.home.type == "cuda":
            torch.cuda.synchronize()

    def _travel(self, job: Job) -> Tensor:
        """`travel` of each client (K,), or () without use; before training, because it waits for the device."""
        return travel(job.plan, self.task.momentum).to(self.home) if uses_travel(job.rule) else torch.zeros(())

    def _rule_memories(self, job: Job, memories: Sequence[Params]) -> Params:
        """The rule's part of the clients' memory, at first its initial memory, after the broadcast arrived: (K, ...)"""
        rule, start = job.rule, take(job.sent.params, self.task.trained)
        found = [split_memory(memory)[0] or rule.init(start) for memory in memories]
        found = [{name: x.to(self.home) for name, x in memory.items()} for memory in found]
        if defines(rule, "receive"):
            found = [rule.receive(job.sent, memory) for memory in found]
        return {name: torch.stack([memory[name] for memory in found]) for name in found[0]}

    def evaluate(self, params: Params) -> Score:
        task = self.task
        with self._evaluating(params) as stack:
            firsts = range(0, len(task.data.test_x), EXAMPLES)
            return evaluate.total((self._score(stack, first) for first in firsts), task.metrics)

    def evaluate_clients(self, params: Params, held: Held) -> ClientScores:
        task = self.task
        with self._evaluating(params) as stack:
            chunks = evaluate.client_chunks(task.data, held, EXAMPLES)
            return evaluate.by_client([self._rows(stack, chunk) for chunk in chunks], held, task.metrics)

    @contextmanager
    def _evaluating(self, params: Params) -> Iterator[Params]:
        """Put the model into evaluation mode; yields its tensors as a stack of one."""
        stack = {name: x.to(self.home)[None] for name, x in params.items()}
        if self.net.short:
            stack = {name: x.to(torch.bfloat16) for name, x in stack.items()}
        for module in self.task.learners:
            module.training = False
        try:
            with arithmetic(self.precision, self.deterministic), torch.no_grad(), evaluation():
                yield stack
        finally:
            for module in self.task.learners:
                module.training = True

    def _score(self, stack: Params, first: int) -> Part:
        data = self.task.data
        index = torch.arange(first, min(first + EXAMPLES, len(data.test_x)), device=self.home)
        outputs = self.net(stack, self.net.inputs(data.test_x, index[None], None))[0]
        targets = data.targets(data.test_y[index])
        return evaluate.judge(outputs, targets, data.classes, self.task.loss, self.task.metrics)

    def _rows(self, stack: Params, chunk: ClientChunk) -> list[Tensor]:
        data, (x, y), index = self.task.data, chunk.of(self.task.data), chunk.places.to(self.home)
        outputs = self.net(stack, self.net.inputs(x, index[None], None))[0]
        return evaluate.judge_clients(outputs, data.targets(y[index]), chunk.sizes, self.task.loss, self.task.metrics)

    def close(self) -> None:
        self.steps.close()
