"""The command line."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedshift import __version__
from fedshift.paper.cli import paper, plan
from fedshift.terminal import Minutes, Quiet, Set, Track, display, sentences

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(help="Measure fedshift on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

File = Annotated[Path | None, typer.Argument(metavar="FILE.toml", help="Settings; without it, a preset.")]
Preset = Annotated[str | None, typer.Option(help="Start from: demo, smoke or paper.")]
On = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="Who trains: auto, sequential, processes, batched or flower."),
]
Out = Annotated[Path | None, typer.Option(help="The folder of the run; runs/... otherwise.")]
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
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train. Without arguments: what 4-bit uploads cost on digits, and what the shift gives back."""
    with sentences():
        from fedshift import command

        assignments = [*(assignments or []), *([f"engine.name={engine}"] if engine else [])]
        raw = command.settings(file, preset or (None if file else "demo"), assignments)
        shown = display(quiet, as_json, track)
        where = out or command.free(Path("runs") / f"{raw.get('name', 'run')}-{datetime.now():%Y%m%d-%H%M%S}")
        with command.placed(str(file or f"--preset {preset or 'demo'}"), assignments):
            command.start(raw, where, shown, as_json, minutes)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Settings with a table of lists called sweep.")],
    preset: Preset = None,
    assignments: Set = None,
    engine: On = None,
    out: Out = None,
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a grid of runs: what is finished is skipped, what was stopped goes on."""
    with sentences():
        from fedshift import command

        assignments = [*(assignments or []), *([f"engine.name={engine}"] if engine else [])]
        raw = command.settings(file, preset, assignments)
        shown = display(quiet, as_json, track)
        with command.placed(str(file), assignments):
            command.grid(raw, out or Path("runs") / file.stem, shown, as_json, minutes)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run or a sweep that was stopped.")],
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run, or a sweep, to the bit as if it had not been stopped."""
    with sentences():
        from fedshift import command

        command.go_on(folder, display(quiet, as_json, track), as_json, minutes)


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
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Only what a GPU gains; seconds where the rest takes minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats behind each median.")] = 9,
) -> None:
    """What a round costs: against a loop written by hand, on all cores, with many clients, and on a GPU."""
    from fedshift.bench import report

    if gpu and not torch_has_gpu():
        typer.echo("fedshift: --gpu: there is no CUDA device here", err=True)
        raise typer.Exit(2)
    measured(report.measure_only_gpu if gpu else report.measure_engines, quick, repeats, as_json)


def torch_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


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


app.add_typer(paper, name="paper")
app.command()(plan)
