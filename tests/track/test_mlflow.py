"""MLflow has the values of the record, in a local store."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.runs import SELDOM, small
from tests.track.tracking import column, train

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: creating its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(store: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MlflowClient:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    return MlflowClient(store)


def runs(client: MlflowClient, name: str) -> list[Any]:
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def history(client: MlflowClient, run: str, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run, name))


def test_mlflow_has_the_values_of_the_record(
    client: MlflowClient, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "one"
    assert train(small(), out, "mlflow", 8) == []
    (run,) = runs(client, request.node.name)
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert (run.data.params["train.batch"], run.data.tags["fedshift.folder"]) == ("32", str(out))
    for name, known in {"test/accuracy": "accuracy", "layers/drift/fc2.weight": "drift.fc2.weight"}.items():
        assert history(client, run.info.run_id, name) == list(enumerate(column(out, known), 1))


def test_rounds_that_are_trained_again_are_logged_once(
    client: MlflowClient, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "one"
    assert train(small(SELDOM), out, "mlflow", 5) == []
    (run,) = runs(client, request.node.name)
    assert run.info.status == "KILLED"
    assert train(small(SELDOM), out, "mlflow", 8) == []  # from round 3 on
    (again,) = runs(client, request.node.name)
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")
    assert history(client, run.info.run_id, "test/loss") == list(enumerate(column(out, "loss"), 1))


def test_a_run_that_was_deleted_is_logged_again(
    client: MlflowClient, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "one"
    assert train(small(), out, "mlflow", 3) == []
    client.delete_run(json.loads((out / "tracked.mlflow.json").read_text())["run"])
    assert train(small(), out, "mlflow", 8) == []
    (run,) = runs(client, request.node.name)
    assert history(client, run.info.run_id, "test/loss") == list(enumerate(column(out, "loss"), 1))


def test_a_run_is_resumed_in_its_store(
    client: MlflowClient, store: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "one"
    assert train(small(), out, "mlflow", 3) == []
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.chdir(tmp_path)
    assert train(small(), out, "mlflow", 8) == []
    (run,) = runs(client, request.node.name)
    assert len(history(client, run.info.run_id, "test/loss")) == 8
    assert not (tmp_path / "mlflow.db").exists()


def test_an_unreachable_server_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (warning,) = train(small(), tmp_path / "one", "mlflow", 8)
    assert warning.startswith("--track mlflow: MlflowException: ")
    assert len(column(tmp_path / "one", "loss")) == 8
