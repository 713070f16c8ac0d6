"""What the commands do, once their arguments are read."""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from fedshift.cli.interrupts import interrupts
from fedshift.core.extras import needs
from fedshift.core.files import RunError
from fedshift.core.names import printable
from fedshift.data import fetch as fetch_data
from fedshift.data.datasets import Dataset
from fedshift.experiment import frontier as frontiers
from fedshift.experiment.build import build, require_goal
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
from fedshift.runs.sweep import Sweep
from fedshift.runs.tradeoff import answers


def check(sweep: Sweep) -> None:
    """Build what the runs of a grid need, each thing once, before the first of them starts."""
    seen: list[tuple[object, ...]] = []
    held: dict[str, Dataset] = {}
    for one in sweep.runs:
        said = one.experiment
        needs = said.data, said.model, said.uplink, said.train, said.engine
        if needs not in seen and not finished(one.folder):
            seen.append(needs)
            if not begun(one.folder):
                require_goal(said)
            held[said.data.name] = build(said, data=held.get(said.data.name)).task.data


def free(path: Path) -> Path:
    """The path, or one like it that nothing is at."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in range(2, 1000))
    return path if not path.exists() else next(other for other in numbered if not other.exists())


def start(raw: dict[str, Any], out: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
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


def go_on(folder: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
    if (folder / SWEEP).exists():
        grid(read(folder / SWEEP), folder, display, as_json, minutes)
    elif finished(folder):
        experiment = settings_of(folder)
        require_settings(folder, experiment)
        with RunFolder(folder) as whole:
            whole.tidy()
        echo(f"{folder}: this run is finished.", err=True)
        conclude([summary.load(folder, experiment)], [experiment], folder, as_json)
    elif begun(folder) and (experiment := settings_of(folder)).engine.name == "flower":
        require(folder, experiment, ())
        watch(experiment, folder, display, as_json, minutes)
    else:
        follow(resume(folder, tell=display.tell), folder, display, as_json, minutes)


def follow(run: Run, out: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
    """Train a run to its end, showing how far it is."""
    with display, interrupts(minutes) as enough:
        display.start(out)
        place = display.add(run.experiment.name, run.experiment.train.rounds, out, run.experiment.train.metric)
        try:
            for outcome in run:
                display.round(place, outcome.number, outcome.accuracy, outcome.loss, sum(outcome.bytes_up))
                if enough.now() and not run.finished:
                    run.checkpoint()
                    break
        except KeyboardInterrupt:
            enough.asked.set()
        finally:
            run.close()
    if not run.finished:
        echo(f"Stopped; `fedshift resume {out}` goes on after round {run.saved}.", err=True)
        sys.exit(enough.code)
    conclude([summary.load(out, run.experiment)], [run.experiment], out, as_json)


def watch(experiment: Experiment, out: Path, display: Display, as_json: bool, minutes: float | None = None) -> None:
    """Train a run to its end on Flower's simulation, in processes of its own, showing how far it is."""
    check_flower()
    with display, interrupts(minutes) as enough, closing(on_flower(experiment, out, enough.now)) as events:
        display.start(out)
        place = display.add(experiment.name, experiment.train.rounds, out, experiment.train.metric)
        try:
            for event in events:
                if event.kind == "round":
                    display.round(place, event.number, event.score, event.loss, event.bytes_up)
                elif event.kind == "told":
                    display.tell(event.text)
        except KeyboardInterrupt:
            enough.asked.set()
    if not finished(out):
        saved = max((number for number, _ in Checkpoints(out).newest_first), default=0)
        hint = f"`fedshift resume {out}` goes on after round {saved}" if begun(out) else "nothing was begun"
        echo(f"Stopped; {hint}.", err=True)
        sys.exit(enough.code)
    conclude([summary.load(out, experiment)], [experiment], out, as_json)


def check_flower() -> None:
    """SettingsError without Flower."""
    if any(find_spec(name) is None for name in ("flwr", "ray")):
        raise SettingsError(f"engine.name = 'flower': {needs('flwr')}")


def on_flower(experiment: Experiment, out: Path, stop: Callable[[], bool]) -> Generator[Event]:
    """Train a run on Flower's simulation; Flower is imported by the process that calls this, after any fork."""
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
    """Train what is left of a grid, and say what came of it unless the caller does."""
    sweep, failures = Sweep(raw, out), 0
    check(sweep)
    if any(one.experiment.engine.name == "flower" for one in sweep.runs):
        check_flower()
    skipped = [one for one in sweep.runs if finished(one.folder)]
    if skipped:
        display.tell(f"{len(skipped)} of {len(sweep.runs)} runs are finished already.")
    with display, interrupts(minutes) as enough:
        display.start(out)
        trains = [(one, one.experiment.train) for one in sweep.runs]
        places = [display.add(one.name, train.rounds, one.folder, train.metric) for one, train in trains]
        try:
            with closing(sweep.train(cores_here(), enough.now, on_flower)) as events:
                for event in events:
                    if event.kind == "round":
                        display.round(places[event.place], event.number, event.score, event.loss, event.bytes_up)
                    elif event.kind == "told":
                        display.tell(event.text)
                    elif event.kind == "failed":
                        failures += 1
                        display.failed(places[event.place], event.text)
        except KeyboardInterrupt:
            enough.asked.set()
    left = [one for one in sweep.runs if not finished(one.folder)]
    if left and enough.now() and not failures:
        hint = f"`fedshift resume {out}` goes on from there" if (out / SWEEP).exists() else "nothing was begun"
        echo(f"Stopped; {hint}.", err=True)
        sys.exit(enough.code)
    done = [summary.load(one.folder, one.experiment) for one in sweep.runs if finished(one.folder)]
    if done and table:
        conclude(done, [one.experiment for one in sweep.runs], out, as_json)
    if failures:
        echo(
            f"fedshift: {failures} of {len(sweep.runs)} runs failed; `fedshift resume {out}` tries them again", err=True
        )
        sys.exit(1)


def frontier(
    name: str,
    seeds: int,
    assignments: Sequence[str],
    out: Path | None,
    display: Display,
    as_json: bool,
    minutes: float | None,
) -> None:
    """Train what is missing of a frontier, and end like a sweep."""
    raw = frontiers.settings(name, seeds, assignments)
    if "uplink" in frontiers.task(name):
        display.tell(f"{name}: its uplink is not used; a frontier trains {len(frontiers.GRID)} others.")
    with placed(f"--task {name}", assignments):
        grid(raw, out or Path("runs") / f"frontier-{Path(name).stem}", display, as_json, minutes)


def conclude(results: Sequence[summary.RunResult], of: Sequence[Experiment], out: Path, as_json: bool) -> None:
    """The table, what it says, where the rest is, and whether compression was worth it; `of`: runs there should be."""
    rows, experiment = summary.rows(results, of), of[0]
    answer = answers(rows) if len(rows) > 1 else []
    if as_json:
        made = [_json(row) for row in summary.by_merit(rows)]
        echo(strict_json({"out": str(out), "rows": made, "answer": answer, "report": report(out)}))
        return
    console = Console(markup=False, emoji=False)
    console.print(summary.table(rows, experiment, experiment.data.name, console.width))
    spread = ", ± the standard deviation over seeds" if any(row.spread is not None for row in rows) else ""
    metrics = ", ".join(dict.fromkeys(summary.directed(row.experiment) for row in rows))
    window = min(summary.WINDOW, max(1, experiment.train.rounds // experiment.record.evaluate))
    console.print(f"{printable(metrics)}: mean of the last {window} evaluated rounds{spread}", highlight=False)
    if len(rows) > 2:
        console.print(f"Order: {summary.ORDER}.", highlight=False)
    guessed = estimates(result.estimate for result in results if result.estimate)
    shifted = summary.sentences([row for row in rows if row.against == "no shift"])
    for sentence in (*shifted, *([guessed] if guessed else [])):
        console.print(sentence, highlight=False)
    console.print(f"Everything is in {printable(str(out))}", highlight=False, soft_wrap=True)
    look_at(out)
    for sentence in answer:
        console.print(printable(sentence), highlight=False)


def _json(row: summary.SummaryRow) -> dict[str, Any]:
    """A row for programs: `gain` is the difference of the metrics, whatever the goal; `full`: from full precision."""
    train, cost = row.experiment.train, row.cost
    fields = {key: value for key, value in row._asdict().items() if key not in ("experiment", "runs", "full")}
    fields |= {"full": None if cost is None else cost._asdict() | {"times_fewer": row.fewer}}
    return fields | {"mean": row.mean, "spread": row.spread, "metric": train.metric, "goal": train.direction}


def look_at(out: Path) -> None:
    """Write the page of what is in a folder, and say where it is."""
    if page := report(out):
        echo(f"To look at: {page}")


def report(out: Path) -> str | None:
    """The page of what is in a folder; runs are not lost where it cannot be written."""
    try:
        return str(write_report([out], out / PAGE))
    except (RunError, OSError) as problem:
        echo(f"fedshift: no report was written: {problem}", err=True)
        return None


def fetch(name: str, source: Path | None) -> None:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(printable(what), total=None)
            progress.update(tasks[what], completed=done, total=total or None)

        path = fetch_data(name, source, show)
    echo(f"{name}: {path}")
