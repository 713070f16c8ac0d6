"""Trackers: TensorBoard, MLflow and Weights & Biases hear of the same rounds as the record.

What they are told is read from the record, so they cannot disagree with it. They work in threads of their own, and
one that fails is left out: training neither waits for a tracker nor ends because of one.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedshift.extras import needs
from fedshift.names import printable, suggest
from fedshift.toml import SettingsError

if TYPE_CHECKING:
    from fedshift.federation import Outcome
    from fedshift.running import Run

NAMES = ("tensorboard", "mlflow", "wandb")
# nothing is sent that nobody asked for, only what matters is said, and a server that does not answer is told of after
# half a minute, not after five; whoever sets one of these is heeded
VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "WANDB_ERROR_REPORTING": "false",
}


def load(name: str) -> Any:
    """The tracker of this name, whose library is only looked at now; SettingsError where there is none."""
    if name not in NAMES:
        raise SettingsError(f"--track {name}: no such tracker; {suggest(name, NAMES)}")
    for key, value in VARIABLES.items():
        os.environ.setdefault(key, value)
    try:
        return import_module(f"fedshift.track.{name}").TRACKER
    except ImportError as missing:
        why = "" if missing.name == name else f" ({missing})"
        raise SettingsError(f"--track {name}: {needs(name, why)}") from None
    except Exception as problem:  # such as one that is too old for another library that is installed
        raise SettingsError(f"--track {name}: cannot be loaded: {sentence(problem)}") from None


def sentence(problem: Exception) -> str:
    """
    >>> sentence(OSError("no\\n  space left"))
    'OSError: no space left'
    """
    return printable(" ".join(f"{type(problem).__name__}: {problem}".split())[:300])


def tracked(run: "Run", *names: str, tell: Callable[[str], None] = warnings.warn) -> Iterator["Outcome"]:
    """The rounds of a recorded run, which trackers hear of as well; `tell` is called with what goes wrong there.

    >>> import tempfile
    >>> from fedshift import Experiment, run
    >>> folder = tempfile.TemporaryDirectory()
    >>> training = run(Experiment(train={"rounds": 2}, engine={"name": "sequential"}), folder.name)
    >>> [outcome.number for outcome in tracked(training, "tensorboard")]
    [1, 2]
    >>> any(name.startswith("events.out") for name in os.listdir(f"{folder.name}/tensorboard"))
    True
    >>> folder.cleanup()
    """
    from fedshift.track.threads import Trackers

    if run.journal is None:
        raise SettingsError("tracked(run): the run is not recorded; give it a folder: run(experiment, 'runs/mine')")
    return _listened(run, run.journal.folder.path, Trackers({name: load(name) for name in names}, tell))


def _listened(run: "Run", folder: Any, trackers: Any) -> Iterator["Outcome"]:
    how = "failed"
    try:
        for outcome in run:
            trackers.round(folder, outcome.number)
            yield outcome
        how = "stopped"
    except GeneratorExit:  # whoever iterates has had enough
        how = "stopped"
        raise
    finally:
        trackers.close(how)
