"""`fedshift paper ...` and `fedshift plan`: their arguments."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
from click import Context
from typer.core import TyperCommand

from fedshift.cli.terminal import Formats, Minutes, Quiet, Set, Track, among, display, examples, sentences

ALGORITHMS = ("fedavg", "fedpaq", "fedef", "fedprox", "scaffold")
BITS = ("4", "5", "6", "7", "8")
MODELS = ("paper-cnn", "mlp")

paper = typer.Typer(
    help="The FedShift paper's tables and figures: run, compared, published.",
    no_args_is_help=True,
    epilog=examples(
        "fedshift paper table1 --bits 4 8 --estimate",
        "fedshift paper all --seeds 3 --minutes 60",
        "fedshift paper report                 # from the records in results/",
    ),
)
SEVERAL = ("--bits", "--algorithms")


def spread(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """`--bits 4 8` and `--bits 4,8` as what the parser knows, `--bits 4 --bits 8`.

    >>> spread(["--bits", "4", "8", "--rounds", "200", "--bits=5,6"], ["--bits"])
    ['--bits', '4', '--bits', '8', '--rounds', '200', '--bits', '5', '--bits', '6']
    """
    told: list[str] = []
    option = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            values = argument.split(",") if option else [argument]
        else:
            option = name if name in options else ""
            values = value.split(",") if option and equals else [argument]
        if not option or values == [option]:
            told.append(argument)
            continue
        if told[-1:] == [option]:  # what it announced follows
            told.pop()
        told += [part for one in values for part in (option, one)]
    return told


class Several(TyperCommand):
    """A command some of whose options take several values."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, SEVERAL))


Bits = Annotated[
    list[str] | None, typer.Option(metavar="N ...", autocompletion=among(*BITS), help="4 to 8; all otherwise.")
]
Algorithms = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME ...",
        autocompletion=among(*ALGORITHMS),
        help="fedavg, fedpaq, fedef, fedprox, scaffold; all otherwise.",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="How many; the paper has 3.")]
Rounds = Annotated[int | None, typer.Option(min=1, metavar="N", help="Of each run; 800 otherwise.")]
Shift = Annotated[
    str,
    typer.Option(
        metavar="both|on|off",
        autocompletion=among("both", "on", "off"),
        help="Runs without the shift, with it, or both.",
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where runs are; what is finished there is not run again.")]
Estimate = Annotated[bool, typer.Option("--estimate", help="Only say how long what is missing takes on this device.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
Uplink = Annotated[str, typer.Option(metavar="RATE", help="1MB/s, 500kB/s, 10Mbit/s, or bytes a second.")]
Skip = Annotated[
    Path | None, typer.Option("--records", metavar="DIR", help="Published records: what they hold is not run again.")
]
Records = Annotated[Path, typer.Option(metavar="DIR", help="Where published records are.")]


def grid(
    ctx: typer.Context,
    bits: Bits = None,
    algorithms: Algorithms = None,
    seeds: Seeds = 1,
    rounds: Rounds = None,
    shift: Shift = "both",
    out: Out = Path("runs/paper"),
    records: Skip = None,
    estimate: Estimate = False,
    minutes: Minutes = None,
    assignments: Set = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    with sentences():
        from fedshift.cli import paper_tables
        from fedshift.paper.experiments import chosen

        table = str(ctx.info_name)
        asked = paper_tables.Asked(
            table, chosen(bits or (), algorithms or (), shift), seeds, rounds, tuple(assignments or ()), records
        )
        if estimate:
            paper_tables.estimate(asked, out, as_json)
        else:
            paper_tables.run(asked, out, display(quiet, as_json, track), as_json, minutes)


for name, about in {
    "table1": "Table 1: five algorithms, 4 to 8 bits, without and with the shift.",
    "table2": "Table 2: Dirichlet partitions, uniform and K-means codes.",
    "ablations": "What the paper lacks: other shares, no quantization, nothing but quantization, updates.",
    "beyond": "Filter centring instead of the paper's shift, beside runs without a shift and with the paper's.",
    "uplinks": "Uplinks lean and extreme, and random K-means codes, beside full precision with the same server rule.",
    "all": "Tables 1 and 2, the ablations, filter centring and uplinks, in the order in which they are worth running.",
}.items():
    paper.command(
        name,
        help=f"{about}\n\nRuns what is missing, then prints ours beside the paper's.",
        epilog=examples(f"fedshift paper {name} --estimate", f"fedshift paper {name} --bits 4 8 --seeds 3"),
        cls=Several,
    )(grid)


@paper.command(epilog=examples("fedshift paper figures", "fedshift paper figures 7 8 --records runs/mine --format pdf"))
def figures(
    numbers: Annotated[list[str] | None, typer.Argument(metavar="[N...]", help="1 to 10; all otherwise.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Finished runs, anyone's, or published records; results/ where it is there."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where they go.")] = Path("figures"),
    formats: Formats = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="From a small run on digits, whatever records there are.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=10, metavar="N", help="Of such a run; 60 otherwise.")] = None,
    quiet: Quiet = False,
) -> None:
    """Draw the paper's figures: from records those that need runs, or from a fresh small run when there are none."""
    with sentences():
        from fedshift.cli import paper_figures

        paper_figures.figures(numbers or (), formats or (), records, out, rounds, fresh, display(quiet, False))


@paper.command(epilog=examples("fedshift paper table3 --uplink 500kB/s"))
def table3(
    uplink: Uplink = "1MB/s",
    to: Annotated[Path | None, typer.Option(metavar="DIR", help="Publish it there, too.")] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats behind each median.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Table 3: time and size of every codec on this machine, and up to which slowness of a link it pays off."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.table3(uplink, to, repeats, as_json)


@paper.command(epilog=examples("fedshift paper publish runs/paper --to results"))
def publish(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs, or folders with runs in them.")],
    to: Records = Path("results"),
    force: Annotated[bool, typer.Option("--force", help="Replace records that differ.")] = False,
) -> None:
    """Write a small record of each finished run: settings, machine and commit, a line a round."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.publish(folders, to, force)


@paper.command(epilog=examples("fedshift paper report", "fedshift paper report --markdown"))
def report(
    results: Records = Path("results"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Rewrite the generated part of the page.")] = False,
    page: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("docs/reproduction.md"),
    as_json: AsJson = False,
) -> None:
    """The tables and the claims, from published records alone."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.report(results, page if markdown else None, as_json)


def plan(
    uplink: Uplink,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=among(*MODELS), help="paper-cnn, mlp or module:function."),
    ] = None,
    weights: Annotated[
        int | None, typer.Option(min=1, max=10**15, metavar="N", help="Or how many weights it has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which uplink to take on a link: seconds for one upload, bytes, and measured accuracy; then every codec."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.plan(uplink, model, weights, as_json)
