"""The command line."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedshift import __version__
from fedshift.cli.bench import bench
from fedshift.cli.paper import paper, plan
from fedshift.cli.terminal import Formats, Minutes, Quiet, Set, Track, Uplink, among, display, examples, path, sentences
from fedshift.experiment.presets import PRESETS

ENGINES = ("auto", "sequential", "processes", "batched", "flower")
TASKS = ("digits", "cifar10", "fashion", "shakespeare", "transformer", "synthetic")
DATA = ("cifar10", "cifar100", "mnist", "fashion-mnist", "shakespeare")

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["--help", "-h"]}
)
app.add_typer(bench, name="bench")

File = Annotated[Path | None, typer.Argument(metavar="FILE.toml", help="Settings file (default: the demo preset).")]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", autocompletion=among(*PRESETS), help=f"Preset to start from: {', '.join(PRESETS)}."),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        autocompletion=among(*ENGINES),
        help="Engine: auto, sequential, processes, batched or flower.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(parser=path, metavar="DIR", help="Output folder (default: a folder in runs/).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per round, then the result.")]


def show_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(
    epilog=examples(
        "fedshift run                          # demo: uploads of few bits",
        "fedshift run my.toml                  # your own settings",
        "fedshift resume runs/my               # resume a stopped run",
        "fedshift frontier                     # accuracy against bytes, 16 uplinks",
        "fedshift plan --uplink 10Mbit/s       # recommend an uplink for a link",
    )
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning when the uplink is the bottleneck.

    Clients on slow links upload few bits, and the server corrects the resulting error.
    """


def as_assignments(uplink: str | None, engine: str | None) -> list[str]:
    """Options as assignments like those of --set, which follow and take precedence."""
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
    engine: EngineName = None,
    out: Out = None,
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train, show progress, and record every round in a folder.

    Without arguments it runs the demo, which compares compressed uploads with full precision on digits.
    """
    with sentences():
        from fedshift.cli import running
        from fedshift.experiment import overrides

        assignments = as_assignments(uplink, engine) + (assignments or [])
        raw = overrides.settings(file, preset or (None if file else "demo"), assignments)
        shown = display(quiet, as_json, track)
        folder = out or running.free(Path("runs") / f"{raw.get('name', 'run')}-{datetime.now():%Y%m%d-%H%M%S}")
        with overrides.placed(str(file or f"--preset {preset or 'demo'}"), assignments):
            running.start(raw, folder, shown, as_json, minutes)


@app.command(
    epilog=examples(
        "fedshift sweep grid.toml              # into runs/grid; repeat to resume",
        "fedshift sweep grid.toml --out runs/mine --track wandb",
    )
)
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="Settings with a table of lists named sweep.")],
    preset: Preset = None,
    assignments: Set = None,
    uplink: Uplink = None,
    engine: EngineName = None,
    out: Out = None,
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a grid of runs: every combination of the values that the file lists under sweep.

    Finished runs are skipped and stopped runs are resumed. A table compares the runs at the end.
    """
    with sentences():
        from fedshift.cli import running
        from fedshift.experiment import overrides

        assignments = as_assignments(uplink, engine) + (assignments or [])
        raw = overrides.settings(file, preset, assignments)
        shown = display(quiet, as_json, track)
        with overrides.placed(str(file), assignments):
            running.grid(overrides.listed(raw), out or Path("runs") / file.stem, shown, as_json, minutes)


@app.command(
    epilog=examples(
        "fedshift frontier                     # digits, one seed: minutes",
        "fedshift frontier --task my.toml --seeds 3 --minutes 30",
        "fedshift frontier --task fashion --estimate",
        "fedshift frontier --task shakespeare --brief --seeds 3",
    )
)
def frontier(
    task: Annotated[
        str,
        typer.Option(
            metavar="NAME", autocompletion=among(*TASKS), help=f"{', '.join(TASKS)}, or FILE.toml: settings of one run."
        ),
    ] = "digits",
    brief: Annotated[
        bool,
        typer.Option("--brief", help="Eight runs: exact and lean with each shift and without one, extreme, 32+4."),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Train seeds 0 to N - 1.")] = 1,
    assignments: Set = None,
    engine: EngineName = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, metavar="DIR", help="Folder of the runs (default: runs/frontier-NAME).")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only estimate the time of the missing runs on this device.")
    ] = False,
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy against uploaded bytes: one task, 16 uplinks, one report.

    The same command resumes stopped runs and skips finished ones. cifar10 is meant for a GPU.
    """
    with sentences():
        from fedshift.cli import running

        assignments = as_assignments(None, engine) + (assignments or [])
        shown = display(quiet, as_json, track)
        running.frontier(task, seeds, assignments, out, shown, as_json, minutes, brief, estimate)


@app.command(
    epilog=examples(
        "fedshift resume runs/demo-20260101-120000",
        "fedshift resume runs/grid --minutes 30",
    )
)
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a stopped run or sweep.")],
    minutes: Minutes = None,
    track: Track = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Resume a stopped run or sweep; the result is identical to that of an uninterrupted one."""
    with sentences():
        from fedshift.cli import running

        running.resume_folder(folder, display(quiet, as_json, track), as_json, minutes)


@app.command(
    epilog=examples(
        "fedshift report runs/demo", "fedshift report runs/a runs/b --out both.html --figures figures --format pdf"
    ),
)
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Runs, sweeps, or folders that contain them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(parser=path, metavar="FILE.html", help="Output page (default: report.html in the first folder)."),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(parser=path, metavar="DIR", help="Also write every figure to this folder.")
    ] = None,
    formats: Formats = None,
    uplink: Annotated[
        str, typer.Option(metavar="RATE", help="Rate of the shared link: 1MB/s, 10Mbit/s, or bytes per second.")
    ] = "10Mbit/s",
    title: Annotated[str, typer.Option(help="Page title (default: folder name).")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON instead of writing a page.")
    ] = False,
) -> None:
    """Write an HTML page about runs: effect of the shift, costs, statistics per layer, and settings."""
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
        typer.Argument(metavar="NAME", autocompletion=among(*DATA), help=f"{', '.join(DATA[:-1])} or {DATA[-1]}."),
    ],
    source: Annotated[
        Path | None, typer.Option("--from", parser=path, metavar="PATH", help="Local copy: an archive or a folder.")
    ] = None,
) -> None:
    """Fetch a data set, verify it, and store it in a cache folder.

    FEDSHIFT_DATA sets the cache folder (default: the user cache folder of the system).
    """
    with sentences():
        from fedshift.cli import running

        running.fetch(name, source)


@app.command(
    epilog=examples(
        "fedshift methods                      # names and arguments",
        "fedshift methods --json",
    )
)
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """List algorithms, quantizers and coders: names in settings, arguments and references."""
    with sentences():
        from fedshift.cli import methods as listed

        listed.methods(as_json)


app.add_typer(paper, name="paper")
app.command(
    epilog=examples(
        "fedshift plan --uplink 10Mbit/s",
        "fedshift plan --uplink 500kB/s --weights 11000000",
    )
)(plan)
