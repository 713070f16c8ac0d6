"""What every command shares: options, examples and completion, how progress is shown, how a problem is told."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from fedshift.rounds.uplinks import UPLINKS
from fedshift.track.loading import NAMES

FORMATS = ("svg", "png", "pdf")


def examples(*lines: str) -> str:
    """What the help of a command ends with: typer makes a line of each paragraph."""
    return "\n\n".join(["For example:", *lines])


def among(*names: str) -> Callable[[str], list[str]]:
    """What the shell offers for a value.

    >>> among("demo", "smoke", "paper")("s")
    ['smoke']
    """

    def offered(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return offered


def _finite(minutes: float | None) -> float | None:
    if minutes is not None and not math.isfinite(minutes):
        raise typer.BadParameter(f"{minutes} is no time.")
    return minutes


Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; repeatable.")]
Uplink = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", autocompletion=among(*UPLINKS), help="How clients upload: exact, paper, lean or extreme."
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="N", callback=_finite, help="Stop after so long, at the end of a round, to go on later."
    ),
]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        metavar="svg|png|pdf",
        autocompletion=among(*FORMATS),
        help="Of figures; repeatable.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        autocompletion=among(*NAMES),
        help="Log each round to tensorboard, mlflow or wandb as well; repeatable.",
    ),
]


def display(quiet: bool, as_json: bool, track: Sequence[str] | None = None) -> Any:
    """How progress is shown, and who else hears of it; SettingsError where a tracker is not to be had."""
    from fedshift.runs.progress import Bars, Display, Json, LineDisplay, Silent

    errors, console = Console(stderr=True), Console()
    shown: Display = Bars(errors, console) if console.is_terminal else LineDisplay(errors, console)
    if quiet or as_json:
        shown = Json(errors, typer.echo) if as_json else Silent(errors)
    if not track:
        return shown
    from fedshift.track.watched import Watched

    return Watched(shown, track)


@contextmanager
def sentences() -> Iterator[None]:
    """What a user did wrong, or what went wrong with a run, in one sentence and an exit code: 2 or 1."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Stopped.", err=True)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
