"""Arguments of `fedshift paper` and `fedshift plan`."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
from click import Context
from typer.core import TyperCommand

from fedshift.cli.terminal import Formats, Minutes, Quiet, Set, Track, among, display, examples, path, sentences

ALGORITHMS = ("fedavg", "fedpaq", "fedef", "fedprox", "scaffold")
BITS = ("4", "5", "6", "7", "8")
MODELS = (
    "paper-cnn",
    "small-paper-cnn",
    "mlp",
    "logistic",
    "cnn",
    "resnet8",
    "resnet18",
    "char-lstm",
    "char-transformer",
)

paper = typer.Typer(
    help="Reproduce the tables and figures of the FedShift paper.",
    no_args_is_help=True,
    epilog=examples(
        "fedshift paper table1 --bits 4 8 --estimate",
        "fedshift paper all --seeds 3 --minutes 60",
        "fedshift paper report                 # from the records in results/",
    ),
)
REPORTS = ("paper", "details", "small", "tasks")
SEVERAL = ("--bits", "--algorithms")


def spread(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Rewrite `--bits 4 8` and `--bits 4,8` as `--bits 4 --bits 8`, which the parser accepts.

    >>> spread(["--bits", "4", "8", "--rounds", "200", "--bits=5,6"], ["--bits"])
    ['--bits', '4', '--bits', '8', '--rounds', '200', '--bits', '5', '--bits', '6']
    """
    result: list[str] = []
    option = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            values = argument.split(",") if option else [argument]
        else:
            option = name if name in options else ""
            values = value.split(",") if option and equals else [argument]
        if not option or values == [option]:
            result.append(argument)
            continue
        if result[-1:] == [option]:  # it is repeated before each of its values
            result.pop()
        result += [part for item in values for part in (option, item)]
    return result


class Several(TyperCommand):
    """Command with options that take several values."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args, SEVERAL))


Bits = Annotated[
    list[str] | None, typer.Option(metavar="N ...", autocompletion=among(*BITS), help="Bits, 4 to 8 (default: all).")
]
Algorithms = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME ...",
        autocompletion=among(*ALGORITHMS),
        help="fedavg, fedpaq, fedef, fedprox, scaffold (default: all).",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Number of seeds; the paper uses 3.")]
Rounds = Annotated[int | None, typer.Option(min=1, metavar="N", help="Rounds per run (default: those of the table).")]
Shift = Annotated[
    str,
    typer.Option(
        metavar="both|on|off",
        autocompletion=among("both", "on", "off"),
        help="Runs with the shift, without it, or both.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="DIR",
        help="Folder of the runs; finished ones are skipped (default: runs/paper, runs/small or runs/dadaquant).",
    ),
]
Estimate = Annotated[
    bool, typer.Option("--estimate", help="Only estimate the time of the missing runs on this device.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Uplink = Annotated[str, typer.Option(metavar="RATE", help="Rate of the link: 1MB/s, 10Mbit/s, or bytes per second.")]
Skip = Annotated[
    Path | None,
    typer.Option("--records", parser=path, metavar="DIR", help="Published records; runs with a record are skipped."),
]
Records = Annotated[Path, typer.Option(parser=path, metavar="DIR", help="Folder of the published records.")]


def grid(
    ctx: typer.Context,
    bits: Bits = None,
    algorithms: Algorithms = None,
    seeds: Seeds = 1,
    rounds: Rounds = None,
    shift: Shift = "both",
    out: Out = None,
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
        choice = chosen(bits or (), algorithms or (), shift)
        request = paper_tables.Request(table, choice, seeds, rounds, tuple(assignments or ()), records)
        paper_tables.train(request, out, estimate, display(quiet, as_json, track), as_json, minutes)


def whole(
    ctx: typer.Context,
    seeds: Seeds = 1,
    rounds: Rounds = None,
    out: Out = None,
    records: Skip = None,
    estimate: Estimate = False,
    minutes: Minutes = None,
    assignments: Set = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """As `grid`, for tables of which no part can be selected."""
    grid(
        ctx,
        seeds=seeds,
        rounds=rounds,
        out=out,
        records=records,
        estimate=estimate,
        minutes=minutes,
        assignments=assignments,
        track=track,
        quiet=quiet,
        as_json=as_json,
    )


WHOLE = "codecs", "dadaquant"
for name, about in {
    "table1": "Table 1: five algorithms, 4 to 8 bits, without and with the shift.",
    "table2": "Table 2: Dirichlet partitions, uniform and K-means codes.",
    "ablations": "Ablations beyond the paper: other shares, no quantization, quantization only, updates.",
    "beyond": "Filter centring, compared with no shift and with the paper's shift.",
    "uplinks": "Uplinks lean and extreme, earlier ones, and random K-means codes, against full precision.",
    "rivals": "FedHQ, agreement mask, grouped averaging, each with and without a shift; server optimizers.",
    "codecs": "Every codec at about one bit per weight, compared with full precision.",
    "centred": "Third column of Tables 1 and 2: filter centring instead of the paper's shift.",
    "differences": "Tests of possible reasons for differences from the paper: its authors' K-means, selection, "
    "augmentation.",
    "small": "Tables 1 and 2 and the claims on Fashion-MNIST, at a size for two cores and one night.",
    "dadaquant": "DAdaQuant's row of Synthetic(1, 1): QSGD, DAdaQuant and lean, compared with full precision.",
    "all": "All tables, in order of importance: one seed of everything first.",
}.items():
    part = "" if name in WHOLE else "--bits 4 8 "
    paper.command(
        name,
        help=f"{about}\n\nTrains the missing runs, then prints our results next to the paper's.",
        epilog=examples(f"fedshift paper {name} --estimate", f"fedshift paper {name} {part}--seeds 3"),
        cls=Several,
    )(whole if name in WHOLE else grid)


@paper.command(epilog=examples("fedshift paper figures", "fedshift paper figures 7 8 --records runs/mine --format pdf"))
def figures(
    numbers: Annotated[
        list[str] | None, typer.Argument(metavar="[N...]", help="Figures, 1 to 10 (default: all).")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="DIR", help="Finished runs or published records (default: results/, if it exists)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(parser=path, metavar="DIR", help="Output folder.")] = Path("figures"),
    formats: Formats = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train a small run on digits instead of reading records.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=10, metavar="N", help="Rounds of the small run (default: 60).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Draw the paper's figures; those that need runs use records or, without records, a small new run."""
    with sentences():
        from fedshift.cli import paper_figures

        paper_figures.figures(numbers or (), formats or (), records, out, rounds, fresh, display(quiet, False))


@paper.command(epilog=examples("fedshift paper table3 --uplink 500kB/s"))
def table3(
    uplink: Uplink = "1MB/s",
    to: Annotated[
        Path | None, typer.Option(parser=path, metavar="DIR", help="Also publish the result in this folder.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Repeats per median.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Table 3: time and size of every codec on this machine, and the slowdown of a link up to which it pays off."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.table3(uplink, to, repeats, as_json)


@paper.command(epilog=examples("fedshift paper publish runs/paper --to results"))
def publish(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs, or folders that contain runs.")],
    to: Records = Path("results"),
    force: Annotated[bool, typer.Option("--force", help="Replace records that differ.")] = False,
) -> None:
    """Write a small record of each finished run: settings, machine, commit, and one line per round."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.publish(folders, to, force)


@paper.command(
    epilog=examples("fedshift paper report", "fedshift paper report small", "fedshift paper report --markdown")
)
def report(
    what: Annotated[
        str,
        typer.Argument(
            metavar="[WHAT]",
            autocompletion=among(*REPORTS),
            help="paper: its tables and claims; details: all other results; small: the small tables; tasks: uplinks.",
        ),
    ] = "paper",
    results: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="DIR", help="Folder of the published records (default: under results)."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Rewrite the generated part of the page in --page.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(parser=path, metavar="FILE", help="Page to rewrite (default: under docs).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print tables and claims from published records."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.report(what, results, page, markdown, as_json)


def plan(
    uplink: Uplink,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=among(*MODELS), help=f"Model: {', '.join(MODELS)} or module:function."
        ),
    ] = None,
    weights: Annotated[
        int | None, typer.Option(min=1, max=10**15, metavar="N", help="Number of weights, instead of a model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend an uplink for a link by upload time, bytes and measured accuracy; then list every codec."""
    with sentences():
        from fedshift.cli import paper_tables

        paper_tables.plan(uplink, model, weights, as_json)
