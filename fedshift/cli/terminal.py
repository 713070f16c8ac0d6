"""Shared by all commands: options, examples, completion, progress display, error messages."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedshift.rounds.uplinks import UPLINKS
from fedshift.track.loading import NAMES

FORMATS = ("svg", "png", "pdf")


def examples(*lines: str) -> str:
    """Examples at the end of a command's help; typer prints each paragraph as a line."""
    return "\n\n".join(["For example:", *lines])


def among(*names: str) -> Callable[[str], list[str]]:
    """Shell completion of a value from these names.

    >>> among("demo", "smoke", "paper")("s")
    ['smoke']
    """

    def matches(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return matches


def path(text: str) -> Path:
    """Path of an option; an empty one would mean the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty.")
    return Path(text)


def _finite(minutes: float | None) -> float | None:
    if minutes is not None and not math.isfinite(minutes):
        raise typer.BadParameter(f"{minutes} is not a number of minutes.")
    return minutes


Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; repeatable.")]
Uplink = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", autocompletion=among(*UPLINKS), help="Uplink of the clients: exact, paper, lean or extreme."
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="N", callback=_finite, help="Stop after N minutes, at the end of a round; resume later."
    ),
]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        metavar="svg|png|pdf",
        autocompletion=among(*FORMATS),
        help="Format of figures (default: svg); repeatable.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        autocompletion=among(*NAMES),
        help="Also log each round to tensorboard, mlflow or wandb; repeatable.",
    ),
]


def display(quiet: bool, as_json: bool, track: Sequence[str] | None = None) -> Any:
    """Progress display, with trackers if there are any; SettingsError if a tracker is not available."""
    from fedshift.runs.progress import Bars, Display, Json, LineDisplay, Silent

    errors, console = Console(stderr=True), Console()
    shown: Display = Bars(errors, console) if console.is_terminal else LineDisplay(errors, console)
    if quiet or as_json:
        shown = Json(errors, typer.echo) if as_json else Silent(errors)
    if not track:
        return shown
    from fedshift.track.watched import Watched

    return Watched(shown, track)


class Exit(SystemExit):
    """End of a command with an exit code, in contrast to a call of sys.exit() in a user's code."""


@contextmanager
def sentences() -> Iterator[None]:
    """Print a known error as one sentence; exit with 2 for a usage error and 1 for a run that failed."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exit:
        raise
    except SystemExit as problem:
        from fedshift.rounds.engine import describe
        from fedshift.runs.progress import echo

        echo(f"fedshift: your code raised {describe(problem)}", err=True)
        sys.exit(1)
    except Exception as problem:
        from fedshift.core.files import RunError
        from fedshift.data import DataError
        from fedshift.engines import ForkError, TrainingError
        from fedshift.experiment.toml import SettingsError
        from fedshift.rounds.loop import DivergedError
        from fedshift.runs.progress import echo

        ended = isinstance(problem, DivergedError | TrainingError | OSError)
        if not ended and not isinstance(problem, SettingsError | DataError | RunError | ForkError):
            raise
        echo(f"fedshift: {problem}", err=True, keep="\n")
        sys.exit(1 if ended else 2)
