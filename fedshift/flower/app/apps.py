"""An experiment as a Flower app: the ServerApp controls the run, the ClientApp trains the clients.

    server = server_app()
    client = client_app()

Both build the same federation from the same settings, so only models and uploads are transferred. Settings are an
argument, or `experiment` in the run config: TOML, or the path of a TOML file.
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

from fedshift.algorithms import Algorithm
from fedshift.core.files import RunError
from fedshift.data.datasets import Dataset
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, differences, read
from fedshift.flower.addon.partitions import introduce
from fedshift.flower.app.channel import Channel
from fedshift.flower.app.client_runner import ClientRunner
from fedshift.flower.app.engine import TIMEOUT, WAIT, Flower
from fedshift.flower.app.protocol import digest
from fedshift.rounds.evaluate import Loss, Metric
from fedshift.rounds.optimizers import MakeOptimizer
from fedshift.rounds.policy import Policy
from fedshift.runs.events import Event
from fedshift.runs.record import begun, finished, settings_of
from fedshift.runs.run import Run, named_after

logger = logging.getLogger("flwr")  # appears in the log of the Flower run


class FinishedError(RunError):
    """The run is already finished."""


def client_app(
    experiment: Experiment | None = None,
    *,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    algorithm: Algorithm | None = None,
    optimizer: MakeOptimizer | None = None,
    policy: Policy | None = None,
    state_dir: Path | str | None = None,
) -> ClientApp:
    """Return a ClientApp that trains the clients of its node; pass the same arguments as to `server_app`.

    The memory of the clients is kept in files under `state_dir` (in the run config: `state-dir`). Without, the memories
    are in the state that Flower keeps for the node, which is lost when a SuperNode stops, as long as they fit in 32 MB
    together, and otherwise in files under `$FLWR_HOME/fedshift`.

    >>> from fedshift.flower.addon.partitions import ask
    >>> from fedshift.flower.testing import LocalGrid
    >>> grid = LocalGrid(client_app(Experiment()), nodes=2)
    >>> sorted(answer.partition for answer in ask(grid, grid.get_node_ids()).values())
    [0, 1]
    """
    app, runners = introduce(ClientApp()), dict[str, ClientRunner]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        given = experiment or experiment_of(context.run_config)
        settings = named_after(given, model, data, loss, metric, algorithm, optimizer=optimizer, policy=policy)
        if (text := settings.toml()) not in runners:  # once per process
            runners.clear()
            fed = build(settings, model, data, loss, metric, algorithm, optimizer=optimizer, policy=policy)
            runners[text] = ClientRunner(settings, fed)
        return runners[text].answer(message, context, state_dir or str(context.run_config.get("state-dir", "")) or None)

    return app


def server_app(
    experiment: Experiment | None = None,
    *,
    out: Path | str | None = None,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    algorithm: Algorithm | None = None,
    optimizer: MakeOptimizer | None = None,
    policy: Policy | None = None,
    timeout: float = TIMEOUT,
    wait: float = WAIT,
) -> ServerApp:
    """Return a ServerApp that runs an experiment on the connected nodes and evaluates the model.

    With `out` (or `out` in the run config), the run is recorded in this folder, and a stopped run in it is resumed.
    `timeout` is the time limit in seconds for the replies of a round, `wait` that for all nodes to connect.

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
        channel = Channel(str(config["desk"])) if config.get("desk") else None
        folder = out or str(config.get("out", "")) or None

        def tell(sentence: str) -> None:
            logger.warning(sentence)
            if channel:
                channel.send(Event("message", sentence))

        try:
            settings = experiment or experiment_of(config)
            objects: dict[str, Any] = {
                "model": model,
                "data": data,
                "loss": loss,
                "metric": metric,
                "algorithm": algorithm,
                "optimizer": optimizer,
                "policy": policy,
            }
            drive(begin(settings, folder, grid, objects, timeout, wait, tell), channel)
        except FinishedError as finish:  # nothing to do
            logger.info(str(finish))
        except Exception as problem:
            if channel:
                channel.send(Event("failed", f"{type(problem).__name__}: {problem}"))
            raise

    return app


def experiment_of(config: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a run config."""
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
    objects: dict[str, Any],
    timeout: float = TIMEOUT,
    wait: float = WAIT,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Run:
    """Start a run or resume the one in folder `out`; `objects` are the user's model, data, loss and so on."""
    experiment = named_after(experiment.changed(**{"engine.name": "flower"}), **objects)
    folder = None if out is None else Path(out)
    resumed = folder is not None and begun(folder)
    if folder is not None and resumed:
        if changed := differences(settings_of(folder).toml(), experiment.toml()):
            raise RunError(f"{folder}: contains a run with other settings; choose another folder ({changed})")
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

    run = Run(experiment, folder, again=resumed, tell=tell, on=engine, **objects)
    if resumed:
        logger.info(f"resuming after round {run.state.number}")
    return run


def drive(run: Run, channel: Channel | None) -> None:
    """Train until the run is finished or a stop is requested."""
    for outcome in run:
        score = "" if outcome.accuracy is None else f", {run.experiment.train.metric} {outcome.accuracy:.4g}"
        logger.info(f"round {outcome.number} of {run.experiment.train.rounds}{score}, {outcome.arrived} uploads")
        if channel:
            channel.send(Event.of(outcome))
            if channel.stop_requested and not run.finished:
                run.checkpoint()
                run.close()
                channel.send(Event("stopped"))
                return
    if channel:
        channel.send(Event("done"))
