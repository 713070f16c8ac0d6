"""`fedshift paper` and `fedshift plan`, after their arguments are parsed."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedshift.cli import running
from fedshift.core.files import write
from fedshift.core.names import printable
from fedshift.core.tables import Listing
from fedshift.core.types import Params
from fedshift.core.units import rough_time
from fedshift.experiment import grid, overrides
from fedshift.experiment.frontier import GRID
from fedshift.experiment.rates import rate
from fedshift.experiment.settings import ShiftSettings
from fedshift.experiment.toml import SettingsError, assign, dotted
from fedshift.paper import beyond, experiments, small, tasks, uplinks
from fedshift.paper import publish as publishing
from fedshift.paper import report as reporting
from fedshift.paper.experiments import Cell, CellChoice
from fedshift.paper.records import Results, finished_runs, merged, published
from fedshift.paper.tables import compared, listing
from fedshift.runs import sweep
from fedshift.runs.about import machine
from fedshift.runs.progress import Display, echo, strict_json
from fedshift.runs.record import finished
from fedshift.runs.run import cores_here


class Request(NamedTuple):
    """A table of the paper, or part of it, and the settings of its runs."""

    table: str
    choice: CellChoice
    seeds: int
    rounds: int | None
    assignments: tuple[str, ...] = ()
    records: Path | None = None  # published records; runs with a record are skipped

    @property
    def tables(self) -> dict[str, list[Cell]]:
        """Cells of each requested table."""
        every = ("table1", "ablations", "beyond", "uplinks", "rivals", "codecs", "table2")
        names = {"all": every, "small": ("table1", "table2")}.get(self.table, (self.table,))
        tables = {name: cells for name in names if (cells := experiments.TABLES[name](self.choice))}
        if not tables:
            raise SettingsError(f"paper {self.table}: no cell matches these --bits, --algorithms and --shift")
        return tables

    @property
    def runs(self) -> list[tuple[Cell, int]]:
        """Runs in order of importance: one seed of everything, then the other seeds; Table 2 last."""
        tables = self.tables
        last = tables.pop("table2", []) if self.table in ("all", "small") else []
        ordered = [(cell, seed) for seed in range(self.seeds) for cells in tables.values() for cell in cells]
        ordered += [(cell, seed) for seed in range(self.seeds) for cell in last]
        published = self.published.records
        distinct = dict.fromkeys(ordered)  # tables share cells
        return [(cell, seed) for cell, seed in distinct if seed not in published.get(cell.name, {})]

    @property
    def published(self) -> Results:
        """Published records of these tables; none without `records`."""
        if self.records is None:
            return Results({})
        if not self.records.is_dir():
            raise SettingsError(f"--records {self.records}: there is no such folder")
        changes = [a for a in self.assignments if not a.startswith(("engine.", "record."))]
        if self.rounds is not None or changes:
            seen = f"--set {changes[0]}" if changes else f"--rounds {self.rounds}"
            raise SettingsError(f"--records {self.records}: records have the paper's settings; leave out {seen}")
        cells = [cell for cells in self.tables.values() for cell in cells]
        return published(self.records, cells, self.base, self.default_rounds)[0]

    @property
    def base(self) -> dict[str, Any]:
        """Settings that the cells change."""
        return experiments.SMALL if self.table == "small" else experiments.BASE

    @property
    def default_rounds(self) -> int | None:
        """Rounds per run; None for those of each cell."""
        return experiments.SMALL_ROUNDS if self.table == "small" else None

    def raw(self, runs: Sequence[tuple[Cell, int]]) -> dict[str, Any]:
        """Settings of a sweep over these runs."""
        changes: dict[str, Any] = {}
        for assignment in self.assignments:
            assign(changes, assignment)
        over = {key: value for key, value in changes.items() if key != "sweep"}
        raw = experiments.sweep(runs, self.rounds or self.default_rounds, over, self.base)
        if "sweep" in changes:
            raise SettingsError("--set sweep: the runs of a table of the paper are fixed")
        if fixed := sorted(dotted(changes).keys() & (grid.keys(raw) | {"name", "seed"})):
            hint = "use --rounds instead" if fixed[0] == "train.rounds" else "it is fixed by the table"
            raise SettingsError(f"--set {fixed[0]}: {hint}")
        with overrides.placed("--set"):
            grid.expand(raw)
        return raw


def estimate(request: Request, out: Path, as_json: bool) -> None:
    """Print the estimated time of the missing runs on this device; nothing is trained."""
    runs = request.runs
    planned = sweep.Sweep(request.raw(runs), out).runs if runs else []
    missing = [run for run, plan in zip(runs, planned, strict=True) if not finished(plan.folder)]
    with overrides.placed(f"paper {request.table}", request.assignments):
        seconds = sweep.estimate(request.raw(missing), cores_here()) if missing else 0.0
    if as_json:
        echo(strict_json({"runs": len(planned), "missing": len(missing), "seconds": seconds}))
        return
    takes = f"; they take about {rough_time(seconds)} on this device" if missing else ""
    echo(f"{len(missing)} of {len(planned)} runs are missing in {out}{takes}.")


def run(request: Request, out: Path, display: Display, as_json: bool, minutes: float | None) -> None:
    """Train the missing runs, then print our results next to the paper's."""
    runs = request.runs
    if not runs:
        show_tables(request, request.published, None, as_json)
        return
    raw, code = request.raw(runs), 0
    planned = sweep.Sweep(raw, out).runs
    if not all(finished(plan.folder) for plan in planned):
        try:
            with overrides.placed(f"paper {request.table}", request.assignments):
                running.grid(raw, out, display, as_json, minutes, table=False)
        except SystemExit as ended:
            if ended.code not in (
                0,
                1,
            ):  # 0: the time is up; 1: some runs failed; show those that finished
                raise
            code = int(ended.code)
    done = [(*run, plan.folder) for run, plan in zip(runs, planned, strict=True) if finished(plan.folder)]
    show_tables(request, merged(request.published, finished_runs(done)), out if done else None, as_json)
    if code:
        sys.exit(code)


def show_tables(request: Request, results: Results, out: Path | None, as_json: bool) -> None:
    """Print the tables, and write the report of the finished runs in `out`."""
    listings = small.tables(results, request.choice) if request.table == "small" else list[Listing]()
    for name, cells in request.tables.items() if request.table != "small" else ():
        if name == "beyond":
            listings.append(beyond.centring_listing(experiments.contrasts(request.choice), results))
        elif name == "uplinks":
            listings.append(beyond.uplinks_listing(experiments.compressed(request.choice), results))
        elif name == "codecs":
            listings.append(beyond.codecs_listing(experiments.at_one_bit(), results))
        elif name == "rivals":
            rules, optimizers = experiments.rivals_contrasts(request.choice), experiments.optimizers(request.choice)
            listings += [beyond.rivals_listing(rules, results)] if rules else []
            listings += [beyond.optimizers_listing(optimizers, results)] if optimizers else []
        else:
            listings.append(listing(name, cells, results, request.rounds))
    if as_json:
        tables = {name: [compared(cell, results).as_dict() for cell in cells] for name, cells in request.tables.items()}
        page = {"report": running.report(out) if out else None}
        echo(strict_json(tables | page))
        return
    show(listings)
    echo("last ten: mean of the last ten rounds, ± sample standard deviation over seeds; difference: of these means")
    if out:
        running.show_report(out)


def publish(folders: Sequence[Path], to: Path, force: bool) -> None:
    for path in publishing.runs_under(folders):
        place, new = publishing.publish(path, to, force)
        echo(f"{place}: {'published' if new else 'already published'}")


# report -> its content from a folder of records, the default folder, and the default page
REPORTS: dict[str, tuple[Callable[[Path], reporting.PaperReport], str, str]] = {
    "paper": (reporting.report, "results", "docs/reproduction.md"),
    "small": (small.report, "results/small", "docs/small.md"),
    "tasks": (tasks.report, "results/tasks", "docs/tasks.md"),
}


def report(what: str, results: Path | None, page: Path | None, markdown: bool, as_json: bool) -> None:
    if what not in REPORTS:
        raise SettingsError(f"paper report {what}: must be one of {', '.join(REPORTS)}")
    make, default, document = REPORTS[what]
    folder = results or Path(default)
    if not folder.is_dir():
        raise SettingsError(f"--results {folder}: there is no such folder")
    content = make(folder)
    if markdown:
        page = page or Path(document)
        try:
            before = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise SettingsError(f"--page {page}: cannot be read: {problem}") from None
        write(page, reporting.rewritten(before, content, str(page)).encode())
        echo(f"{page}: written")
    elif as_json:
        echo(strict_json(content.as_dict()))
    else:
        for title, parts in content.sections:
            show([part._replace(title=title) if isinstance(part, Listing) else f"{title}: {part}" for part in parts])


def table3(uplink: str, to: Path | None, repeats: int, as_json: bool) -> None:
    at = rate(uplink)
    uploads = measured(*uplinks.model(None, None), repeats)
    if to is not None:
        echo(f"{reporting.publish_codecs(to, uploads, machine())}: published", err=True)
    table = uplinks.table3(uploads, at)
    if as_json:
        echo(strict_json({"machine": machine(), "rate": at, "codecs": table.as_dicts()}))
        return
    show([table])
    echo(
        "times slower: (t32 - encode) / t; a codec pays off while the slow link is at most this many times slower\n"
        "than the fast one; seconds: encode + bytes / rate; encode: median CPU time, one thread",
        keep="\n",
    )


def plan(uplink: str, model: str | None, weights: int | None, as_json: bool) -> None:
    at = rate(uplink)
    params, times = uplinks.model(model, weights)
    with Console(stderr=True).status("") as status:
        candidates = uplinks.candidates(params, times, tick=lambda name: status.update(f"measuring {name} ..."))
    uploads = measured(params, times)
    advice = uplinks.advice(candidates, uploads, at)
    if as_json:
        best = uplinks.recommended(candidates, at)
        named = [
            {
                "name": item.name,
                "settings": GRID[item.name],
                "sends": item.sends,
                "seconds": item.upload.seconds(at),
                "encode": item.upload.encode,
                "bytes": item.upload.bytes,
                "digits": uplinks.MEASURED[item.name]._asdict(),
                "recommended": item is best,
            }
            for item in sorted(candidates, key=lambda item: item.upload.seconds(at))
        ]
        rows = [item._asdict() | {"seconds": item.seconds(at), "error": item.error} for item in uploads]
        codecs = sorted(rows, key=lambda row: row["seconds"])
        shift = ShiftSettings().model_dump(include={"on", "per", "share"}) | {"bytes": 0}
        echo(strict_json({"rate": at, "uplinks": named, "codecs": codecs, "shift": shift, "advice": advice}))
        return
    show([uplinks.choices(candidates, at)])
    for sentence in advice:
        echo(sentence)
    show([uplinks.plan(uploads, at)])


def measured(params: Params, times: float, repeats: int = 3) -> list[uplinks.CodecUpload]:
    """Measurements of every codec, with progress on stderr."""
    with Console(stderr=True).status("") as status:
        return uplinks.measure(params, times, repeats, lambda name: status.update(f"measuring {name} ..."))


def show(parts: Sequence[str | Listing]) -> None:
    """Print tables, 160 columns wide where the output is not a terminal."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, width=160)
    for part in parts:
        if isinstance(part, str):
            console.print(printable(part), highlight=False, soft_wrap=True)
        else:
            console.print(part.drawn(), highlight=False)
