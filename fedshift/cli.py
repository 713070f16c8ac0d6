"""The command line: `fedshift bench codecs`."""

import json
from typing import Annotated

import typer
from rich.console import Console

from fedshift import __version__

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)
bench = typer.Typer(help="Measure fedshift on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


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


@bench.command()
def codecs(
    quick: Annotated[bool, typer.Option("--quick", help="Only the table of codecs, with fewer repeats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats behind each median.")] = 9,
) -> None:
    """Bytes, time and error of every codec on the paper's CNN, and the promises they keep."""
    from fedshift.bench import report

    console = Console(stderr=True)
    with console.status("") as status:
        result = report.measure(quick, 3 if quick else repeats, lambda text: status.update(f"measuring {text} ..."))
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        report.show(result, Console())
