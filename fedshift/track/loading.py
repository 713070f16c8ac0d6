"""Load trackers by name; their libraries are imported on demand."""

import os
from importlib import import_module
from typing import Any

from fedshift.core.extras import needs
from fedshift.core.names import printable, suggest
from fedshift.experiment.toml import SettingsError

NAMES = ("tensorboard", "mlflow", "wandb")
# defaults of environment variables: no telemetry, warnings only, and an unreachable server is reported after half a
# minute instead of five
VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",
    "WANDB_ERROR_REPORTING": "false",
}


def load(name: str) -> Any:
    """Import and return the tracker of this name; SettingsError if it is unknown or its library cannot be loaded."""
    if name not in NAMES:
        raise SettingsError(f"--track {name}: no such tracker; {suggest(name, NAMES)}")
    for key, value in VARIABLES.items():
        os.environ.setdefault(key, value)
    try:
        return import_module(f"fedshift.track.{name}").TRACKER
    except ImportError as missing:
        why = "" if missing.name == name else f" ({missing})"
        raise SettingsError(f"--track {name}: {needs(name, why)}") from None
    except Exception as problem:  # for example a version that is too old for another installed library
        raise SettingsError(f"--track {name}: cannot be loaded: {sentence(problem)}") from None


def sentence(problem: Exception) -> str:
    """
    >>> sentence(OSError("no\\n  space left"))
    'OSError: no space left'
    """
    return printable(" ".join(f"{type(problem).__name__}: {problem}".split())[:300])
