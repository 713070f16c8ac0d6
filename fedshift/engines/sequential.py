"""The reference: one client after another."""

from collections.abc import Iterator, Sequence

from fedshift import evaluate
from fedshift.engines.base import Job, Task, Upload
from fedshift.engines.client import Client
from fedshift.evaluate import Score
from fedshift.types import Params


class Sequential:
    def __init__(self, task: Task) -> None:
        self.client = Client(task)

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return [self._cohort(job) for job in jobs]

    def _cohort(self, job: Job) -> Iterator[Upload]:
        for i, client in enumerate(job.clients):
            yield self.client.turn(job, i, job.recall(client))

    def evaluate(self, params: Params) -> Score:
        return evaluate.total(self.client.score(params, part) for part in evaluate.chunks(self.client.task.data))

    def close(self) -> None:
        pass
