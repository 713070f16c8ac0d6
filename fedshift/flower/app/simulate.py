"""Runs on Flower's simulation: a private SuperLink with one virtual SuperNode per client."""

import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from fedshift.core.files import RunError
from fedshift.data import DataError
from fedshift.engines import TrainingError
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError
from fedshift.flower.app.channel import Channel
from fedshift.flower.app.processes import ProcessError
from fedshift.flower.app.superlink import SuperLink
from fedshift.rounds.loop import DivergedError
from fedshift.runs.events import Event
from fedshift.runs.record import finished
from fedshift.runs.run import cores_here

NODES = "nodes"  # in the run's folder: memories of clients, until the run is finished
POLL, SILENCE = 0.05, 10.0  # seconds between reads of the events, and without events before the run's status is queried
KINDS = (SettingsError, RunError, DivergedError, TrainingError, DataError, ConnectionError)
ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in KINDS}
PYPROJECT = """\
[project]
name = "fedshift-run"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedshift"

[tool.flwr.app.components]
serverapp = "fedshift_run:server"
clientapp = "fedshift_run:client"

[tool.flwr.app.config]
experiment = ""
out = ""
state-dir = ""
desk = ""
"""
MODULE = """\
from fedshift.flower import client_app, server_app

server = server_app()
client = client_app()
"""


def simulate(experiment: Experiment, out: Path, should_stop: Callable[[], bool]) -> Generator[Event, None, None]:
    """Yield events until the run is finished, has failed, or was stopped because of `should_stop`.

    A run in folder `out` is resumed. An exception that ended the run is raised again in this process.
    """
    clients = build(experiment).partition.clients  # fails early on invalid settings
    with tempfile.TemporaryDirectory(prefix="fedshift-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "settings.toml").write_text(experiment.toml(), encoding="utf-8")
        config = {
            "experiment": str(folder / "settings.toml"),
            "out": str(out.absolute()),
            "state-dir": str(out.absolute() / NODES),
            "desk": name,
        }
        try:
            cpus, gpus = resources(experiment, cores_here())
            with SuperLink(folder, supernodes=clients, cpus=cpus, gpus=gpus) as link:
                yield from _follow(link, link.run(write_app(folder / "app"), config), Channel(folder), should_stop)
        except ProcessError as problem:
            raise RunError(f"Flower: {problem}") from problem
    if finished(out):
        tidy(out)


def tidy(out: Path) -> None:
    """Remove the files that are needed only to resume the run."""
    shutil.rmtree(out / NODES, ignore_errors=True)


def resources(experiment: Experiment, cores: int) -> tuple[int, float]:
    """Return the cores and the share of a GPU per active client; at most `engine.workers` clients are active at a time.

    >>> resources(Experiment(), 8), resources(Experiment(engine={"workers": 2, "device": "cuda"}), 8)
    ((1, 0.0), (4, 0.5))
    """
    workers = min(experiment.engine.workers or cores, cores)
    return max(1, cores // workers), 1 / workers if experiment.engine.device == "cuda" else 0.0


def write_app(folder: Path) -> Path:
    """Write a Flower app that reads its experiment from the run config; return the folder."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (folder / "fedshift_run.py").write_text(MODULE, encoding="utf-8")
    return folder


def _follow(link: SuperLink, run: str, channel: Channel, should_stop: Callable[[], bool]) -> Iterator[Event]:
    last, silence, over = time.monotonic(), SILENCE, False
    while True:
        if time.monotonic() - last > silence:  # rarely: a query takes one second of CPU time
            over, silence = link.status(run).startswith("finished"), 2 * silence
        for event in channel.receive():
            last, silence = time.monotonic(), SILENCE
            if event.kind == "failed":
                kind, _, sentence = event.text.partition(": ")
                raise ERRORS[kind](sentence) if kind in ERRORS else RunError(_ended(link, run, event.text))
            yield event
            if event.kind in ("done", "stopped"):
                return
        if over:
            raise RunError(_ended(link, run, "the run ended unexpectedly"))
        if should_stop():
            channel.request_stop()
        time.sleep(POLL)


def _ended(link: SuperLink, run: str, why: str) -> str:
    """Error message for an unexpected end, with the last lines of the log."""
    return f"Flower: {why}; the end of its log:\n" + "\n".join(link.log(run).splitlines()[-15:])
