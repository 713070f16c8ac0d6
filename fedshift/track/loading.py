"""Trackers by name; their libraries are imported when one is asked for."""

import os
from importlib import import_module
from typing import Any

from fedshift.core.extras import needs
from fedshift.core.names import printable, suggest
from fedshift.experiment.toml import SettingsError

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
