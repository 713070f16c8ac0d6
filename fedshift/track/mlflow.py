"""MLflow: the store of MLFLOW_TRACKING_URI, or MLflow's default local store in the current folder."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException

from fedshift.track.base import About, How, Rounds

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST = 1000  # metrics per request, a limit of MLflow


class MLflow:
    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        store = mlflow.get_tracking_uri()
        if "MLFLOW_TRACKING_URI" not in os.environ:  # resume in the store of the run, in whatever folder
            store = kept.get("store", store)
        self.client = MlflowClient(store)
        before = found(self.client, kept["run"]) if kept.get("store") == store else None
        # logged values cannot be removed; rounds that are trained again give the same values and are not logged again
        self.after = kept["round"] if before else 0
        self.run = before.info.run_id if before else self._begin(run)
        self.client.update_run(self.run, "RUNNING")
        self.kept: dict[str, Any] = {"run": self.run, "store": store}

    def _begin(self, run: About) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.group or "fedshift"
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        begun: str = self.client.create_run(experiment, run_name=run.name).info.run_id
        settings = [Param(key, str(value)) for key, value in run.settings.items()]
        tags = [RunTag("fedshift.folder", str(run.folder)), RunTag("fedshift.group", run.group)]
        self.client.log_batch(begun, params=settings, tags=tags)
        return begun

    def add(self, rounds: Rounds) -> None:
        metrics = list(_metrics(rounds))
        for first in range(0, len(metrics), MOST):
            self.client.log_batch(self.run, metrics[first : first + MOST])

    def end(self, how: How) -> None:
        self.client.set_terminated(self.run, STATUS[how])


def found(client: MlflowClient, run: str) -> Run | None:
    """Run of this id; None if it was deleted."""
    try:
        known = client.get_run(run)
    except MlflowException as problem:
        if problem.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return known if known.info.lifecycle_stage == "active" else None


def _metrics(rounds: Rounds) -> Iterator[Metric]:
    now = int(time.time() * 1000)
    for number, figures in rounds.items():
        yield from (Metric(name, figure, now, number) for name, figure in figures.items())


TRACKER = MLflow
