"""The reference engine: one client after another."""

from collections.abc import Iterator, Sequence

from fedshift.core.types import CPU, Params
from fedshift.engines.client import Client
from fedshift.rounds import evaluate
from fedshift.rounds.engine import Job, Task, Upload, arithmetic, evaluation
from fedshift.rounds.evaluate import ClientScores, Held, Score


class Sequential:
    """Train clients one after another; `precision` is that of a GPU's arithmetic."""

    home = CPU

    def __init__(self, task: Task, precision: str = "tf32") -> None:
        self.client, self.precision = Client(task), precision

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return [self._cohort(job) for job in jobs]

    def _cohort(self, job: Job) -> Iterator[Upload]:
        for i, client in enumerate(job.clients):
            with arithmetic(self.precision):
                upload = self.client.train(job, i, job.recall(client))
            yield upload

    def evaluate(self, params: Params) -> Score:
        task = self.client.task
        with arithmetic(self.precision), evaluation():
            return evaluate.total(
                (self.client.score(params, part) for part in evaluate.chunks(task.data)), task.metrics
            )

    def evaluate_clients(self, params: Params, held: Held) -> ClientScores:
        task = self.client.task
        with arithmetic(self.precision), evaluation():
            chunks = evaluate.client_chunks(task.data, held)
            rows = [self.client.score_clients(params, chunk) for chunk in chunks]
            return evaluate.by_client(rows, held, task.metrics)

    def close(self) -> None:
        pass
