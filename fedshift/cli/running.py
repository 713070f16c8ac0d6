"""Commands that train, resume, conclude and fetch, after their arguments are parsed."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from fedshift.cli.interrupts import interrupts
from fedshift.cli.terminal import Exit
from fedshift.core.extras import needs
from fedshift.core.files import RunError
from fedshift.core.names import printable, suggest
from fedshift.core.units import rough_time
from fedshift.data import fetch as fetch_data
from fedshift.data.catalog import CATALOG, DataError
from fedshift.data.datasets import INCLUDED, Dataset
from fedshift.experiment import frontier as frontiers
from fedshift.experiment.build import build, packable, require_goal
from fedshift.experiment.grid import GridRun
from fedshift.experiment.overrides import named_uplinks, placed
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, read
from fedshift.report.files import PAGE, write_report
from fedshift.runs import summary
from fedshift.runs.checkpoint import Checkpoints
from fedshift.runs.events import Event
from fedshift.runs.journal import require, require_settings, taken
from fedshift.runs.progress import Display, echo, strict_json
from fedshift.runs.record import SWEEP, RunFolder, begun, finished, settings_of
from fedshift.runs.run import Run, cores_here, resume
from fedshift.runs.sheet import estimates
from fedshift.runs.sweep import Sweep, training_time
from fedshift.runs.tradeoff import answers


def check(sweep: Sweep) -> None:
    """Build each distinct combination of settings of a grid once, before the first run starts."""
    built: list[tuple[object, ...]] = []
    loaded: dict[str, Dataset] = {}
    for run in sweep.runs:
        config = run.experiment
        parts = config.data, config.model, config.uplink, config.train, config.engine
        if parts not in built and not finished(run.folder):
            built.append(parts)
            if not begun(run.folder):
                require_goal(config)
            source = f"{config.data.name} {config.data.args}"
            loaded[source] = build(config, data=loaded.get(source)).task.data


def free(path: Path) -> Path:
    """Path, or a numbered variant of it, that does not exist yet."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in range(2, 1000))
    return path if not path.exists() else next(variant for variant in numbered if not variant.exists())


def start(raw: dict[str, Any], out: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
    """Start a run or, if the settings have a sweep, a grid of runs."""
    for line in named_uplinks(raw):
        display.tell(line)
    if "sweep" in raw:
        if (out / SWEEP).exists() or begun(out):
            raise taken(out)
        grid(raw, out, display, as_json, minutes)
    elif (experiment := Experiment(**raw)).engine.name == "flower":
        if begun(out):
            raise taken(out)
        watch(experiment, out, display, as_json, minutes)
    else:
        follow(Run(experiment, out, tell=display.tell), out, display, as_json, minutes)


def resume_folder(folder: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
    """Resume the run or sweep in a folder; show the result of a finished run."""
    if (folder / SWEEP).exists():
        grid(read(folder / SWEEP), folder, display, as_json, minutes)
    elif finished(folder):
        experiment = settings_of(folder)
        require_settings(folder, experiment)
        with RunFolder(folder) as files:
            files.tidy()
        echo(f"{folder}: this run is already finished.", err=True)
        conclude([summary.load(folder, experiment)], [experiment], folder, as_json)
    elif begun(folder) and (experiment := settings_of(folder)).engine.name == "flower":
        require(folder, experiment, ())
        watch(experiment, folder, display, as_json, minutes)
    else:
        follow(resume(folder, tell=display.tell), folder, display, as_json, minutes)


def follow(run: Run, out: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
    """Train a run to its end and show progress."""
    with display, interrupts(minutes) as stop:
        display.start(out)
        row = display.add(run.experiment.name, run.experiment.train.rounds, out, run.experiment.train.metric)
        try:
            for outcome in run:
                display.round(row, outcome.number, outcome.accuracy, outcome.loss, sum(outcome.bytes_up))
                if stop.now() and not run.finished:
                    run.checkpoint()
                    break
        except KeyboardInterrupt:
            stop.asked.set()
        finally:
            run.close()
    if not run.finished:
        echo(f"Stopped; resume after round {run.saved} with `fedshift resume {out}`.", err=True)
        raise Exit(stop.code)
    conclude([summary.load(out, run.experiment)], [run.experiment], out, as_json)


def watch(experiment: Experiment, out: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
    """Train a run to its end on Flower's simulation, in separate processes, and show progress."""
    check_flower()
    with display, interrupts(minutes) as stop, closing(on_flower(experiment, out, stop.now)) as events:
        display.start(out)
        row = display.add(experiment.name, experiment.train.rounds, out, experiment.train.metric)
        try:
            for event in events:
                if event.kind == "round":
                    display.round(row, event.number, event.score, event.loss, event.bytes_up)
                elif event.kind == "message":
                    display.tell(event.text)
        except KeyboardInterrupt:
            stop.asked.set()
    if not finished(out):
        saved = max((number for number, _ in Checkpoints(out).newest_first), default=0)
        hint = f"; resume after round {saved} with `fedshift resume {out}`" if begun(out) else " before the run started"
        echo(f"Stopped{hint}.", err=True)
        raise Exit(stop.code)
    conclude([summary.load(out, experiment)], [experiment], out, as_json)


def check_flower() -> None:
    """Raise SettingsError if Flower or Ray is not installed."""
    if any(find_spec(name) is None for name in ("flwr", "ray")):
        raise SettingsError(f"engine.name = 'flower': {needs('flwr')}")


def on_flower(experiment: Experiment, out: Path, stop: Callable[[], bool]) -> Generator[Event]:
    """Train a run on Flower's simulation; the calling process imports Flower, after any fork."""
    from fedshift.flower.app.simulate import simulate

    yield from simulate(experiment, out, stop)


def grid(
    raw: Mapping[str, Any],
    out: Path,
    display: Display,
    as_json: bool,
    minutes: float | None = None,
    *,
    table: bool = True,
) -> None:
    """Train the unfinished runs of a grid, and print the result unless `table` is False."""
    sweep, failures = Sweep(raw, out), 0
    check(sweep)
    if any(run.experiment.engine.name == "flower" for run in sweep.runs):
        check_flower()
    skipped = [run for run in sweep.runs if finished(run.folder)]
    if skipped:
        display.tell(f"{len(skipped)} of {len(sweep.runs)} runs are already finished.")
    with display, interrupts(minutes) as stop:
        display.start(out)
        trains = [(run, run.experiment.train) for run in sweep.runs]
        rows = [display.add(run.name, train.rounds, run.folder, train.metric) for run, train in trains]
        try:
            with closing(sweep.train(cores_here(), stop.now, on_flower)) as events:
                for event in events:
                    if event.kind == "round":
                        display.round(rows[event.place], event.number, event.score, event.loss, event.bytes_up)
                    elif event.kind == "message":
                        display.tell(event.text)
                    elif event.kind == "failed":
                        failures += 1
                        display.failed(rows[event.place], event.text)
        except KeyboardInterrupt:
            stop.asked.set()
    unfinished = [run for run in sweep.runs if not finished(run.folder)]
    if unfinished and stop.now() and not failures:
        hint = f"; resume with `fedshift resume {out}`" if (out / SWEEP).exists() else " before the first run started"
        echo(f"Stopped{hint}.", err=True)
        raise Exit(stop.code)
    done = [summary.load(run.folder, run.experiment) for run in sweep.runs if finished(run.folder)]
    if done and table:
        conclude(done, [run.experiment for run in sweep.runs], out, as_json)
    if failures:
        echo(
            f"fedshift: {failures} of {len(sweep.runs)} runs failed; retry them with `fedshift resume {out}`", err=True
        )
        raise Exit(1)


def estimate(planned: Sequence[GridRun], out: Path, as_json: bool) -> None:
    """Print the estimated time of the missing runs in a folder on this device; nothing is trained."""
    missing = [run.experiment for run in planned if not finished(run.folder)]
    seconds = training_time(missing, cores_here()) if missing else 0.0
    if as_json:
        echo(strict_json({"runs": len(planned), "missing": len(missing), "seconds": seconds}))
        return
    cores = min(cores_here(), len(missing))
    on = "this device" if not missing or packable(missing[0]) else f"{cores} core{'s' * (cores > 1)} of this device"
    takes = f"; they take about {rough_time(seconds)} on {on}" if missing else ""
    echo(f"{len(missing)} of {len(planned)} runs are missing in {out}{takes}.")


def frontier(
    name: str,
    seeds: int,
    assignments: Sequence[str],
    out: Path | None,
    display: Display,
    as_json: bool,
    minutes: float | None,
    brief: bool = False,
    estimated: bool = False,
) -> None:
    """Train the missing runs of a frontier and conclude like a sweep; `estimated`: only print how long it takes."""
    raw = frontiers.settings(name, seeds, assignments, brief)
    if ignored := [key for key in ("uplink", *(["shift"] if brief else [])) if key in frontiers.task(name)]:
        others = len(frontiers.BRIEF if brief else frontiers.GRID)
        verb = "is" if len(ignored) == 1 else "are"
        display.tell(f"{name}: its {' and '.join(ignored)} {verb} ignored; a frontier trains {others} others.")
    with placed(f"--task {name}", assignments):
        folder = out or Path("runs") / f"frontier-{Path(name).stem}{'-brief' * brief}"
        if estimated:
            estimate(Sweep(raw, folder).runs, folder, as_json)
        else:
            grid(raw, folder, display, as_json, minutes)


def conclude(results: Sequence[summary.RunResult], planned: Sequence[Experiment], out: Path, as_json: bool) -> None:
    """Print the table of results, its summary, the output folder, the report, and the effect of compression."""
    rows, experiment = summary.rows(results, planned), planned[0]
    answer = answers(rows) if len(rows) > 1 else []
    if as_json:
        table = [_json(row) for row in summary.by_merit(rows)]
        echo(strict_json({"out": str(out), "rows": table, "answer": answer, "report": report(out)}))
        return
    console = Console(markup=False, emoji=False)
    console.print(summary.table(rows, experiment, experiment.data.name, console.width))
    spread = ", ± the standard deviation over seeds" if any(row.spread is not None for row in rows) else ""
    metrics = ", ".join(dict.fromkeys(summary.directed(row.experiment) for row in rows))
    window = min(summary.WINDOW, max(1, experiment.train.rounds // experiment.record.evaluate))
    console.print(f"{printable(metrics)}: mean of the last {window} evaluated rounds{spread}", highlight=False)
    if len(rows) > 2:
        console.print(f"Order: {summary.ORDER}.", highlight=False)
    estimated = estimates(result.estimate for result in results if result.estimate)
    shifted = summary.sentences([row for row in rows if row.against == "no shift"])
    for sentence in (*shifted, *([estimated] if estimated else [])):
        console.print(sentence, highlight=False)
    for further in (summary.metrics_table(rows), summary.clients_table(rows)):
        if further is not None:
            console.print(further)
    console.print(f"Results are in {printable(str(out))}", highlight=False, soft_wrap=True)
    show_report(out)
    for sentence in answer:
        console.print(printable(sentence), highlight=False)


def _json(row: summary.SummaryRow) -> dict[str, Any]:
    """Row as JSON: `gain` is the difference of the metrics, whatever the goal; `full`: relative to full precision."""
    train, cost = row.experiment.train, row.cost
    fields = {key: value for key, value in row._asdict().items() if key not in ("experiment", "runs", "full")}
    fields |= {"metrics": {name: mean for name, (mean, _) in row.metrics.items()}}
    fields |= {"clients": {name: mean for name, (mean, _) in row.clients.items()}} if row.clients else {}
    fields |= {"full": None if cost is None else cost._asdict() | {"times_fewer": row.fewer}}
    return fields | {"mean": row.mean, "spread": row.spread, "metric": train.metric, "goal": train.direction}


def show_report(out: Path) -> None:
    """Write the report of a folder and print its path."""
    if page := report(out):
        echo(f"Report: {page}")


def report(out: Path) -> str | None:
    """Write the report of a folder; a failure is printed, since the runs themselves are complete."""
    try:
        return str(write_report([out], out / PAGE))
    except (RunError, OSError) as problem:
        echo(f"fedshift: the report could not be written: {problem}", err=True)
        return None


def fetch(name: str, source: Path | None) -> None:
    """Fetch a data set with a progress bar and print its path."""
    if name in INCLUDED and source is None:
        echo(f"{name}: is included in fedshift, nothing to fetch")
        return
    if name not in (*CATALOG, *INCLUDED):
        known = suggest(name, (*CATALOG, *INCLUDED))
        raise DataError(f"unknown data set {name!r}; {known} ({' and '.join(INCLUDED)} need not be fetched)")
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(printable(label), total=None)
            progress.update(tasks[label], completed=done, total=total or None)

        path = fetch_data(name, source, show)
    echo(f"{name}: {path}")
