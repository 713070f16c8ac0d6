"""An experiment as a Flower app: the ServerApp drives the run, the ClientApp plays the clients.

    server = server_app()
    client = client_app()

Both build the same federation from the same settings, so nothing but models and uploads has to travel.
Settings come from here or from the run config: `experiment` is TOML, or the path of a TOML file.
"""

import logging
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedshift.core.files import RunError
from fedshift.data.datasets import Dataset
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, differences, read
from fedshift.flower.addon.seeded import introduce
from fedshift.flower.app.desk import Desk
from fedshift.flower.app.engine import TIMEOUT, WAIT, Flower
from fedshift.flower.app.node import ClientNode
from fedshift.flower.app.turns import digest
from fedshift.rounds.evaluate import Loss, Metric
from fedshift.runs.events import Event
from fedshift.runs.record import begun, finished, settings_of
from fedshift.runs.run import Run, named_after

logger = logging.getLogger("flwr")  # what is said here is in the log of the Flower run


class FinishedError(RunError):
    """A run is asked for whose model is there already."""


def client_app(
    experiment: Experiment | None = None,
    *,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    state_dir: Path | str | None = None,
) -> ClientApp:
    """Plays the clients of its node; give it what `server_app` is given.

    What they remember is kept in the state that Flower holds for the node, which is lost when a SuperNode
    stops, or in files under `state_dir` (in the run config: `state-dir`).

    >>> from fedshift.flower.addon.seeded import partitions
    >>> from fedshift.flower.testing import LocalGrid
    >>> grid = LocalGrid(client_app(Experiment()), nodes=2)
    >>> sorted(partitions(grid, grid.get_node_ids()).values())  # each knows which clients it plays
    [0, 1]
    """
    app, built = introduce(ClientApp()), dict[str, ClientNode]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        settings = named_after(experiment or experiment_of(context.run_config), model, data, loss, metric)
        if (text := settings.toml()) not in built:  # once a process
            built.clear()
            built[text] = ClientNode(settings, build(settings, model, data, loss, metric))
        return built[text].answer(message, context, state_dir or str(context.run_config.get("state-dir", "")) or None)

    return app


def server_app(
    experiment: Experiment | None = None,
    *,
    out: Path | str | None = None,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    timeout: float = TIMEOUT,
    wait: float = WAIT,
) -> ServerApp:
    """Drives a run on the nodes that are connected, and scores its model.

    With `out` (or `out` in the run config) everything is recorded there, and a run that was stopped there goes on.
    `timeout` are the seconds a round's replies may take, `wait` those in which all nodes have to connect.

    >>> from tempfile import TemporaryDirectory
    >>> from flwr.app import RecordDict
    >>> from fedshift.flower.testing import LocalGrid
    >>> experiment = Experiment(data={"clients": 4}, train={"rounds": 1, "cohort": 4})
    >>> with TemporaryDirectory() as out:
    ...     server, grid = server_app(experiment, out=out), LocalGrid(client_app(experiment), nodes=2)
    ...     server(grid, Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={}))
    ...     finished(Path(out))
    True
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = context.run_config
        desk = Desk(str(config["desk"])) if config.get("desk") else None
        where = out or str(config.get("out", "")) or None

        def tell(sentence: str) -> None:
            logger.warning(sentence)
            if desk:
                desk.say(Event("told", sentence))

        try:
            said = experiment or experiment_of(config)
            own: dict[str, Any] = {"model": model, "data": data, "loss": loss, "metric": metric}
            drive(begin(said, where, grid, own, timeout, wait, tell), desk)
        except FinishedError as done:  # there is nothing left to do
            logger.info(str(done))
        except Exception as problem:
            if desk:
                desk.say(Event("failed", f"{type(problem).__name__}: {problem}"))
            raise

    return app


def experiment_of(config: Mapping[str, Any]) -> Experiment:
    """What a run config says."""
    text = str(config.get("experiment", ""))
    if not text.strip():
        raise SettingsError("run config: 'experiment' is missing; it must be TOML, or the path of a TOML file")
    if "\n" not in text and "=" not in text:
        return Experiment(**read(Path(text)))
    try:
        return Experiment(**tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise SettingsError(f"run config: experiment: not TOML: {problem}") from None


def begin(
    experiment: Experiment,
    out: Path | str | None,
    grid: Grid,
    own: dict[str, Any],
    timeout: float = TIMEOUT,
    wait: float = WAIT,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Run:
    """The run, from its start or from where it was stopped; its settings say that it is of Flower."""
    experiment = named_after(experiment.changed(**{"engine.name": "flower"}), **own)
    folder = None if out is None else Path(out)
    again = folder is not None and begun(folder)
    if folder is not None and again:
        if changed := differences(settings_of(folder).toml(), experiment.toml()):
            raise RunError(f"{folder}: was run with other settings; choose another folder ({changed})")
        if finished(folder):
            raise FinishedError(f"{folder}: this run is finished")

    def engine(run: Run) -> Flower:
        journal = run.journal
        return Flower(
            grid,
            run.fed.task,
            experiment=digest(experiment),
            session=journal.session if journal else "",
            saved=(lambda: journal.oldest) if journal else None,
            timeout=timeout,
            wait=wait,
            tell=tell,
        )

    run = Run(experiment, folder, again=again, tell=tell, on=engine, **own)
    if again:
        logger.info(f"going on after round {run.state.number}")
    return run


def drive(run: Run, desk: Desk | None) -> None:
    """To the end, or until whoever watches has had enough."""
    for outcome in run:
        score = "" if outcome.accuracy is None else f", {run.experiment.train.metric} {outcome.accuracy:.4g}"
        logger.info(f"round {outcome.number} of {run.experiment.train.rounds}{score}, {outcome.arrived} uploads")
        if desk:
            desk.say(Event.of(outcome))
            if desk.enough and not run.finished:
                run.checkpoint()
                run.close()
                desk.say(Event("stopped"))
                return
    if desk:
        desk.say(Event("done"))
