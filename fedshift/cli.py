"""The command line."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedshift import __version__

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(help="Measure fedshift on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

File = Annotated[Path | None, typer.Argument(metavar="FILE.toml", help="Settings; without it, a preset.")]
Preset = Annotated[str | None, typer.Option(help="Start from: demo, smoke or paper.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting; repeatable.")]
On = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="Who trains: auto, sequential, processes or flower.")
]
Out = Annotated[Path | None, typer.Option(help="The folder of the run; runs/... otherwise.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the result.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a round, then the result.")]


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning when the uplink is the bottleneck."""


@app.command()
def run(
    file: File = None,
    preset: Preset = None,
    assignments: Set = None,
    engine: On = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train. Without arguments: what 4-bit uploads cost on digits, and what the shift gives back."""
    with sentences():
        from fedshift import command

        assignments = [*(assignments or []), *([f"engine.name={engine}"] if engine else [])]
        raw = command.settings(file, preset or (None if file else "demo"), assignments)
        where = out or command.free(Path("runs") / f"{raw.get('name', 'run')}-{datetime.now():%Y%m%d-%H%M%S}")
        with command.placed(str(file or f"--preset {preset or 'demo'}"), assignments):
            command.start(raw, where, display(quiet, as_json), as_json)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Settings with a table of lists called sweep.")],
    preset: Preset = None,
    assignments: Set = None,
    engine: On = None,
    out: Out = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a grid of runs: what is finished is skipped, what was stopped goes on."""
    with sentences():
        from fedshift import command

        assignments = [*(assignments or []), *([f"engine.name={engine}"] if engine else [])]
        raw = command.settings(file, preset, assignments)
        with command.placed(str(file), assignments):
            command.grid(raw, out or Path("runs") / file.stem, display(quiet, as_json), as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run or a sweep that was stopped.")],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run, or a sweep, to the bit as if it had not been stopped."""
    with sentences():
        from fedshift import command

        command.go_on(folder, display(quiet, as_json), as_json)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, mnist or fashion-mnist.")],
    source: Annotated[Path | None, typer.Option("--from", help="A local copy: an archive or a folder.")] = None,
) -> None:
    """Find or fetch a data set, verify it, and keep it in a cache folder (FEDSHIFT_DATA)."""
    with sentences():
        from fedshift import command

        command.fetch(name, source)


@bench.command()
def codecs(
    quick: Annotated[bool, typer.Option("--quick", help="Only the table of codecs, with fewer repeats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats behind each median.")] = 9,
) -> None:
    """Bytes, time and error of every codec on the paper's CNN, and the promises they keep."""
    from fedshift.bench import report

    measured(report.measure, quick, 3 if quick else repeats, as_json)


@bench.command()
def engines(
    quick: Annotated[
        bool, typer.Option("--quick", help="Without training the paper's CNN, which takes minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats behind each median.")] = 9,
) -> None:
    """What a round costs: against a loop written by hand, on all cores, and with many clients."""
    from fedshift.bench import report

    measured(report.measure_engines, quick, repeats, as_json)


@bench.command()
def flower(
    quick: Annotated[bool, typer.Option("--quick", help="Without a deployment, which takes minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats behind each median.")] = 9,
) -> None:
    """What Flower adds to a round, and what a node sends in one, counted at the level of TCP."""
    try:
        import fedshift.flower  # noqa: F401
    except ImportError as missing:
        typer.echo(f"fedshift: {missing}", err=True)
        raise typer.Exit(2) from None
    from fedshift.bench import report

    measured(report.measure_flower, quick, repeats, as_json)


def measured(measure: Any, quick: bool, repeats: int, as_json: bool) -> None:
    from fedshift.bench import report

    console = Console(stderr=True)
    with console.status("") as status:
        result = measure(quick, repeats, lambda text: status.update(f"measuring {text} ..."))
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        report.show(result, Console())


def display(quiet: bool, as_json: bool) -> Any:
    from fedshift.progress import Bars, Json, Lines, Silent

    errors, console = Console(stderr=True), Console()
    if as_json:
        return Json(errors, typer.echo)
    if quiet:
        return Silent(errors)
    return Bars(errors, console) if console.is_terminal else Lines(errors, console)


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
        from fedshift.data import DataError
        from fedshift.engines import ForkError, TrainingError
        from fedshift.files import RunError
        from fedshift.loop import DivergedError
        from fedshift.toml import SettingsError

        ended = isinstance(problem, DivergedError | TrainingError | OSError)
        if not ended and not isinstance(problem, SettingsError | DataError | RunError | ForkError):
            raise
        typer.echo(f"fedshift: {problem}", err=True)
        sys.exit(1 if ended else 2)
