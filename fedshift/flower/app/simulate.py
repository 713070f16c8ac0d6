"""A run on Flower's simulation: a private SuperLink, a virtual SuperNode for each client, and our app on them."""

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
from fedshift.flower.app.desk import Desk
from fedshift.flower.app.processes import ProcessError
from fedshift.flower.app.superlink import SuperLink
from fedshift.rounds.loop import DivergedError
from fedshift.runs.events import Event
from fedshift.runs.record import finished
from fedshift.runs.run import cores_here

NODES = "nodes"  # in the run's folder: what clients remember, until the run is finished
POLL, DOUBT = 0.05, 10.0  # seconds between looks at the events, and of silence before the run's status is asked for
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


def simulate(experiment: Experiment, out: Path, enough: Callable[[], bool]) -> Generator[Event, None, None]:
    """Rounds and sentences as they come, until it is done, has failed, or was stopped because of `enough`.

    It goes on with what is in the folder `out`. What ended it is raised here as it was there.
    """
    build(experiment)  # what is wrong with the settings shows at once
    with tempfile.TemporaryDirectory(prefix="fedshift-", ignore_cleanup_errors=True) as folder:
        here = Path(folder)
        (here / "settings.toml").write_text(experiment.toml(), encoding="utf-8")
        config = {
            "experiment": str(here / "settings.toml"),
            "out": str(out.absolute()),
            "state-dir": str(out.absolute() / NODES),
            "desk": folder,
        }
        try:
            cpus, gpus = resources(experiment, cores_here())
            with SuperLink(here, supernodes=experiment.data.clients, cpus=cpus, gpus=gpus) as link:
                yield from _follow(link, link.run(write_app(here / "app"), config), Desk(here), enough)
        except ProcessError as problem:
            raise RunError(f"Flower: {problem}") from problem
    if finished(out):
        tidy(out)


def tidy(out: Path) -> None:
    """Without what was only there to go on from."""
    shutil.rmtree(out / NODES, ignore_errors=True)


def resources(experiment: Experiment, cores: int) -> tuple[int, float]:
    """Cores, and the share of a GPU, of each client that is on: as many are on at a time as the settings have workers.

    >>> resources(Experiment(), 8), resources(Experiment(engine={"workers": 2, "device": "cuda"}), 8)
    ((1, 0.0), (4, 0.5))
    """
    workers = min(experiment.engine.workers or cores, cores)
    return max(1, cores // workers), 1 / workers if experiment.engine.device == "cuda" else 0.0


def write_app(folder: Path) -> Path:
    """The folder with a Flower app in it, which finds its experiment in the run config."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (folder / "fedshift_run.py").write_text(MODULE, encoding="utf-8")
    return folder


def _follow(link: SuperLink, run: str, desk: Desk, enough: Callable[[], bool]) -> Iterator[Event]:
    heard, doubt, over = time.monotonic(), DOUBT, False
    while True:
        if time.monotonic() - heard > doubt:  # seldom: asking takes a second of a core
            over, doubt = link.status(run).startswith("finished"), 2 * doubt
        for event in desk.heard():
            heard, doubt = time.monotonic(), DOUBT
            if event.kind == "failed":
                kind, _, sentence = event.text.partition(": ")
                raise ERRORS[kind](sentence) if kind in ERRORS else RunError(_ended(link, run, event.text))
            yield event
            if event.kind in ("done", "stopped"):
                return
        if over:
            raise RunError(_ended(link, run, "the run ended before its time"))
        if enough():
            desk.stop()
        time.sleep(POLL)


def _ended(link: SuperLink, run: str, why: str) -> str:
    """A sentence for what should not happen, and the end of the log that shows where it did."""
    return f"Flower: {why}; the end of its log:\n" + "\n".join(link.log(run).splitlines()[-15:])
