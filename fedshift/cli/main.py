"""The command line."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedshift import __version__
from fedshift.cli.bench import bench
from fedshift.cli.paper import paper, plan
from fedshift.cli.terminal import Formats, Minutes, Quiet, Set, Track, Uplink, among, display, examples, sentences
from fedshift.experiment.presets import PRESETS

ENGINES = ("auto", "sequential", "processes", "batched", "flower")
TASKS = ("digits", "cifar10")
DATA = ("cifar10", "cifar100", "mnist", "fashion-mnist")

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["--help", "-h"]}
)
app.add_typer(bench, name="bench")

File = Annotated[Path | None, typer.Argument(metavar="FILE.toml", help="Settings; without it, a preset.")]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", autocompletion=among(*PRESETS), help="Start from: demo, smoke or paper."),
]
On = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        autocompletion=among(*ENGINES),
        help="Who trains: auto, sequential, processes, batched or flower.",
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="The folder of the run; runs/... otherwise.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a round, then the result.")]


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(
    epilog=examples(
        "fedshift run                          # the demo: what few bits cost",
        "fedshift run my.toml                  # your own settings",
        "fedshift resume runs/my               # go on after it was stopped",
        "fedshift frontier                     # accuracy against bytes, 15 uplinks",
        "fedshift plan --uplink 10Mbit/s       # which uplink to take on a link",
    )
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning when the uplink is the bottleneck.

    Clients on slow links upload few bits, and the server corrects what that costs.
    """


def named(uplink: str | None, engine: str | None) -> list[str]:
    """Options that are settings, to be changed further by --set."""
    given = {"uplink": uplink, "engine.name": engine}
    return [f"{key}={name}" for key, name in given.items() if name is not None]


@app.command(
    epilog=examples(
        "fedshift run                          # the demo",
        "fedshift run my.toml --uplink lean --set train.lr=0.1",
        "fedshift run --preset smoke --minutes 1 --track tensorboard",
    )
)
def run(
    file: File = None,
    preset: Preset = None,
    assignments: Set = None,
    uplink: Uplink = None,
    engine: On = None,
    out: Out = None,
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train, show how far it is, and record every round in a folder.

    Without arguments it runs the demo: what lean uploads save on digits, and what they cost.
    """
    with sentences():
        from fedshift.cli import running
        from fedshift.experiment import overrides

        assignments = named(uplink, engine) + (assignments or [])
        raw = overrides.settings(file, preset or (None if file else "demo"), assignments)
        shown = display(quiet, as_json, track)
        where = out or running.free(Path("runs") / f"{raw.get('name', 'run')}-{datetime.now():%Y%m%d-%H%M%S}")
        with overrides.placed(str(file or f"--preset {preset or 'demo'}"), assignments):
            running.start(raw, where, shown, as_json, minutes)


@app.command(
    epilog=examples(
        "fedshift sweep grid.toml              # into runs/grid; again to go on",
        "fedshift sweep grid.toml --out runs/mine --track wandb",
    )
)
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Settings with a table of lists called sweep.")],
    preset: Preset = None,
    assignments: Set = None,
    uplink: Uplink = None,
    engine: On = None,
    out: Out = None,
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a grid of runs: every combination of what the file lists under sweep.

    What is finished is skipped, what was stopped goes on. It ends in a table that compares the runs.
    """
    with sentences():
        from fedshift.cli import running
        from fedshift.experiment import overrides

        assignments = named(uplink, engine) + (assignments or [])
        raw = overrides.settings(file, preset, assignments)
        shown = display(quiet, as_json, track)
        with overrides.placed(str(file), assignments):
            running.grid(overrides.listed(raw), out or Path("runs") / file.stem, shown, as_json, minutes)


@app.command(
    epilog=examples(
        "fedshift frontier                     # digits, one seed: minutes",
        "fedshift frontier --task my.toml --seeds 3 --minutes 30",
        "fedshift frontier --task cifar10 --set train.rounds=200",
    )
)
def frontier(
    task: Annotated[
        str,
        typer.Option(
            metavar="NAME", autocompletion=among(*TASKS), help="digits, cifar10, or FILE.toml: settings of one run."
        ),
    ] = "digits",
    seeds: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Train seeds 0 to N - 1.")] = 1,
    assignments: Set = None,
    engine: On = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs (default: runs/frontier-NAME).")
    ] = None,
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy against uploaded bytes: one task, 15 uplinks, one report.

    The same command resumes what was stopped and skips finished runs. cifar10 is meant for a GPU.
    """
    with sentences():
        from fedshift.cli import running

        assignments = named(None, engine) + (assignments or [])
        running.frontier(task, seeds, assignments, out, display(quiet, as_json, track), as_json, minutes)


@app.command(
    epilog=examples(
        "fedshift resume runs/demo-20260101-120000",
        "fedshift resume runs/grid --minutes 30",
    )
)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run or a sweep that was stopped.")],
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run or a sweep that was stopped, to the bit as if it had not been."""
    with sentences():
        from fedshift.cli import running

        running.go_on(folder, display(quiet, as_json, track), as_json, minutes)


@app.command(
    epilog=examples(
        "fedshift report runs/demo", "fedshift report runs/a runs/b --out both.html --figures figures --format pdf"
    ),
)
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Runs, sweeps, or folders with runs below.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page; report.html in the first folder otherwise.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw every figure there, too.")] = None,
    formats: Formats = None,
    uplink: Annotated[
        str, typer.Option(metavar="RATE", help="The link all uploads share: 1MB/s, 10Mbit/s, or bytes a second.")
    ] = "10Mbit/s",
    title: Annotated[str, typer.Option(help="Of the page; the folder's name otherwise.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print what is in it instead of writing a page.")] = False,
) -> None:
    """One page that says whether the shift helped, what it cost, what happened inside, and what was run."""
    with sentences():
        from fedshift.experiment.rates import rate
        from fedshift.report import files

        files.report(folders, out, figures, formats or ["svg"], rate(uplink), title, as_json)


@app.command(
    epilog=examples("fedshift data cifar10", "fedshift data mnist --from ~/downloads/mnist"),
)
def data(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", autocompletion=among(*DATA), help="cifar10, cifar100, mnist or fashion-mnist."),
    ],
    source: Annotated[
        Path | None, typer.Option("--from", metavar="PATH", help="A local copy: an archive or a folder.")
    ] = None,
) -> None:
    """Find or fetch a data set, verify it, and keep it in a cache folder.

    The variable FEDSHIFT_DATA says which folder; without it, it is the one of your system.
    """
    with sentences():
        from fedshift.cli import running

        running.fetch(name, source)


app.add_typer(paper, name="paper")
app.command(
    epilog=examples(
        "fedshift plan --uplink 10Mbit/s",
        "fedshift plan --uplink 500kB/s --weights 11000000",
    )
)(plan)
