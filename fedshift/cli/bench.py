"""Arguments of `fedshift bench`."""

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedshift.cli.terminal import examples, path, sentences
from fedshift.core.extras import needs

bench = typer.Typer(
    help="Measure fedshift on this machine.",
    no_args_is_help=True,
    epilog=examples("fedshift bench codecs --quick", "fedshift bench engines --gpu"),
)


@bench.command(
    epilog=examples("fedshift bench codecs --quick", "fedshift bench codecs --repeats 21 --json"),
)
def codecs(
    quick: Annotated[bool, typer.Option("--quick", help="Measure the codecs only, with 3 repeats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats per median.")] = 9,
) -> None:
    """Measure bytes, time and error of every codec on the paper's CNN, and check the promised ratios."""
    from fedshift.bench import report

    measured(report.measure, quick, 3 if quick else repeats, as_json)


@bench.command(
    epilog=examples("fedshift bench engines --quick", "fedshift bench engines --gpu --json"),
)
def engines(
    quick: Annotated[bool, typer.Option("--quick", help="Skip training the paper's CNN, which takes minutes.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure only the speedup of a GPU, which takes seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats per median.")] = 9,
) -> None:
    """Measure the time of a round: against a plain loop, on all cores, with many clients, and on a GPU."""
    from fedshift.bench import report

    if gpu and not torch_has_gpu():
        typer.echo("fedshift: --gpu: no CUDA device was found", err=True)
        raise typer.Exit(2)
    measured(report.measure_only_gpu if gpu else report.measure_engines, quick, repeats, as_json)


def torch_has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@bench.command(
    epilog=examples("fedshift bench rates", "fedshift bench rates --run runs/paper/fedavg_32+32_seed-0"),
)
def rates(
    folder: Annotated[
        Path | None, typer.Option("--run", parser=path, metavar="DIR", help="Use the next round of this recorded run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the error of every codec at 0.5, 1 and 2 bits, on an update of the paper's CNN (needs cifar10)."""
    from fedshift.bench import report

    with sentences():
        measured(lambda quick, repeats, tick: report.measure_rates(folder, tick), False, 1, as_json)


@bench.command(
    epilog=examples("fedshift bench flower --quick"),
)
def flower(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the deployment, which takes minutes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats per median.")] = 9,
) -> None:
    """Measure what Flower adds to a round, and the TCP bytes that a node sends per round."""
    require_flower(None if quick else "--quick skips it")
    from fedshift.bench import report

    measured(report.measure_flower, quick, repeats, as_json)


def require_flower(deployment: str | None) -> None:
    """Exit if Flower is missing, or trustme for a deployment; `deployment` is a hint how to avoid it, None for none."""
    try:
        import fedshift.flower  # noqa: F401
    except ImportError as missing:
        typer.echo(f"fedshift: {missing}", err=True)
        raise typer.Exit(2) from None
    if deployment and find_spec("trustme") is None:
        typer.echo(f"fedshift: a deployment {needs('trustme')}; {deployment}", err=True)
        raise typer.Exit(2)


@bench.command(
    epilog=examples("fedshift bench large --quick", "fedshift bench large --flower --json"),
)
def large(
    quick: Annotated[bool, typer.Option("--quick", help="Measure small models, which takes seconds.")] = False,
    flower: Annotated[
        bool, typer.Option("--flower", help="Also run a simulation and a deployment of Flower, which takes minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats per median.")] = 3,
) -> None:
    """Measure time and memory of uploads of a transformer with 85 million weights, and of 10,000 tensors."""
    if flower:
        require_flower("omit --flower to skip it")
    from fedshift.bench import report

    measured(partial(report.measure_large, flower=flower), quick, repeats, as_json)


@bench.command(
    epilog=examples("fedshift bench peers --quick", "fedshift bench peers --json"),
)
def peers(
    quick: Annotated[bool, typer.Option("--quick", help="Train two rounds with each system, without targets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats per median.")] = 3,
) -> None:
    """Compare a round with a hand-written loop, pfl-research and Flower's simulation, for 100 to 100,000 clients."""
    from fedshift.bench import report
    from fedshift.bench.peers.usage import supported

    if not supported():
        typer.echo("fedshift: bench peers: reads CPU times and memory from /proc, which only Linux has", err=True)
        raise typer.Exit(2)
    with sentences():
        measured(report.measure_peers, quick, 1 if quick else repeats, as_json)


def measured(measure: Any, quick: bool, repeats: int, as_json: bool) -> None:
    from fedshift.bench import report

    console = Console(stderr=True)
    with console.status("") as status:
        result = measure(quick, repeats, lambda text: status.update(f"measuring {text} ..."))
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        report.show(result, Console())
