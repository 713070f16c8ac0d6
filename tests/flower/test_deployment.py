"""Real processes of Flower: a simulation, and a deployment with TLS and authenticated SuperNodes."""

import os
from pathlib import Path

import pytest

from fedshift.flower.app.processes import ProcessError, descendants
from fedshift.flower.app.superlink import Config, SuperLink, Tls, environment
from fedshift.flower.testing import Deployment
from fedshift.flower.testing.certificates import server_certificate, supernode_key
from tests.flower.left import alive
from tests.flower.tiny import write_app

TWO: list[Config] = [{"partition-id": 0, "name": 'a "quoted" name'}, {"partition-id": 1, "name": "b"}]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return write_app(tmp_path / "app")


EARLIER: set[int] = set()  # processes of tests before


@pytest.fixture(autouse=True)
def _earlier() -> None:
    EARLIER.update(descendants(os.getpid()))


def running() -> list[int]:
    return [pid for pid in descendants(os.getpid()) if pid not in EARLIER]


def test_a_deployment_runs_an_app_refuses_unregistered_nodes_and_leaves_nothing(app: Path, tmp_path: Path) -> None:
    with Deployment(tmp_path / "test", TWO) as deployment:
        stranger = deployment.add({}, key=supernode_key(tmp_path, "stranger"))
        distrusting = deployment.add({}, ca=server_certificate(tmp_path / "foreign").ca)
        plain = deployment.add({}, insecure=True)
        status, log = deployment.wait(deployment.run(app), timeout=600)
        assert status == "finished:completed", log
        assert "learnt [1.5, 1.5, 1.5] of 2" in log  # the mean of 1 and 2
        assert "Failed to activate SuperNode" in stranger.refused(300)
        assert "CERTIFICATE_VERIFY_FAILED" in distrusting.refused(300)
        assert "Server disconnected" in plain.refused(300)
        assert sorted(deployment.superlink.nodes().values()) == ["online", "online", "registered"]
        with pytest.raises(ProcessError, match="node-0 was not refused within 0 s"):
            deployment.node(0).refused(0)
        before = running()
        assert len(before) >= 3 * 3  # of SuperLink and SuperNodes each the keeper, itself and its SuperExec
    assert alive(before) == running() == []


@pytest.mark.slow
def test_a_simulation_runs_an_app_and_leaves_nothing(app: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with SuperLink(tmp_path / "test", supernodes=4) as link:
        run = link.run(app, {"num-server-rounds": 2, "nodes": 4})
        status, log = link.wait(run, timeout=600)
        assert status == "finished:completed", log
        assert "learnt [5.0, 5.0, 5.0] of 4" in log  # the mean of 1 to 4, twice
        before = running()
    assert alive(before) == running() == []
    assert not Path(link.environment["RAY_TMPDIR"]).exists()


@pytest.mark.slow
def test_killed_processes_can_be_restarted(app: Path, tmp_path: Path) -> None:
    with Deployment(tmp_path / "test", TWO) as deployment:
        deployment.node(1).kill()  # first, so that its lease lapses meanwhile
        deployment.node(0).stop()
        deployment.node(0).start()
        deployment.superlink.kill()
        with pytest.raises(ProcessError, match="flwr supernode list"):
            deployment.superlink.nodes()
        deployment.superlink.restart()
        deployment.node(1).start()
        status, log = deployment.wait(deployment.run(app), timeout=600)
        assert status == "finished:completed", log
        run = deployment.run(app, {"num-server-rounds": 1000})
        with pytest.raises(ProcessError, match="has not finished in time"):
            deployment.wait(run, timeout=10)
        deployment.superlink.stop(run)
        assert deployment.superlink.status(run) == "finished:stopped"


def test_a_superlink_that_cannot_start_raises_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    tls = server_certificate(tmp_path)
    with pytest.raises(ProcessError, match=r"flower-superlink ended while starting(.|\n)*key"):
        SuperLink(tmp_path / "test", tls=Tls(tls.ca, tls.certificate, server_certificate(tmp_path / "other").key))
    assert running() == []


def test_a_folder_without_an_app_raises_an_error(tmp_path: Path) -> None:
    with SuperLink(tmp_path / "test") as link, pytest.raises(ProcessError, match=r"flwr run .*(pyproject|not found)"):
        link.run(tmp_path)


def test_invalid_settings_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one SuperNode"):
        SuperLink(tmp_path, supernodes=0)
    with pytest.raises(ValueError, match="over TLS only"):
        SuperLink(tmp_path, auth=True)


def test_the_path_of_a_socket_of_ray_is_short(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 50)
    socket = f"{environment(deep)['RAY_TMPDIR']}/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
    assert len(socket) < 104
    assert environment(deep)["RAY_TMPDIR"] != environment(tmp_path)["RAY_TMPDIR"]
