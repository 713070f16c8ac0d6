"""`fedshift paper` and `fedshift plan`, after their arguments are parsed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedshift.cli import running
from fedshift.cli.terminal import Exit
from fedshift.core.files import write
from fedshift.core.names import printable
from fedshift.core.tables import Listing
from fedshift.core.types import Params
from fedshift.experiment import grid, overrides
from fedshift.experiment.frontier import GRID
from fedshift.experiment.rates import rate
from fedshift.experiment.settings import ShiftSettings
from fedshift.experiment.toml import SettingsError, assign, dotted
from fedshift.paper import beyond, claims, dadaquant, experiments, small, tasks, uplinks
from fedshift.paper import publish as publishing
from fedshift.paper import report as reporting
from fedshift.paper.experiments import Cell, CellChoice
from fedshift.paper.records import Results, finished_runs, merged, published
from fedshift.paper.tables import NOTE, ablations, compared, differences, last_rounds, listing
from fedshift.runs import sweep
from fedshift.runs.about import machine
from fedshift.runs.progress import Display, echo, strict_json
from fedshift.runs.record import finished


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
        """Cells of each requested table, in order of importance."""
        if self.table == "dadaquant":
            return {self.table: experiments.dadaquant()}
        names = {"all": [*experiments.TABLES], "small": ["table1", "table2", "centred"]}.get(self.table, [self.table])
        tables = {name: cells for name in names if (cells := experiments.TABLES[name](self.choice))}
        if not tables:
            raise SettingsError(f"paper {self.table}: no cell matches these --bits, --algorithms and --shift")
        return tables

    @property
    def runs(self) -> list[tuple[Cell, int]]:
        """Runs in order of importance: one seed of everything, then more seeds, those of `repeated` first."""
        cells = {cell.name: cell for cells in self.tables.values() for cell in cells}  # tables share cells
        first = [cell.name for cell in experiments.decisive()] if self.table == "all" else []
        several = self.table in ("all", "small")
        repeated = [cell.name for cell in experiments.repeated(self.choice)] if several else []
        ordered = [(name, 0) for name in (*first, *cells)]
        ordered += [(name, seed) for names in (repeated, cells) for seed in range(1, self.seeds) for name in names]
        published = self.published.records
        distinct = [(name, seed) for name, seed in dict.fromkeys(ordered) if name in cells]
        return [(cells[name], seed) for name, seed in distinct if seed not in published.get(name, {})]

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
        if self.table == "dadaquant":
            return dadaquant.read(self.records)
        cells = [cell for table in experiments.TABLES.values() for cell in table()]  # tables compare with other cells
        return published(self.records, cells, self.base, self.default_rounds)[0]

    @property
    def base(self) -> dict[str, Any]:
        """Settings that the cells change."""
        return {"small": experiments.SMALL, "dadaquant": experiments.SYNTHETIC}.get(self.table, experiments.BASE)

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


def train(
    request: Request, out: Path | None, estimated: bool, display: Display, as_json: bool, minutes: float | None
) -> None:
    """Train the missing runs and print the tables; `estimated`: only print how long this takes."""
    out = out or Path("runs") / (request.table if request.table in ("small", "dadaquant") else "paper")
    if estimated:
        estimate(request, out, as_json)
    else:
        run(request, out, display, as_json, minutes)


def estimate(request: Request, out: Path, as_json: bool) -> None:
    """Print the estimated time of the missing runs on this device; nothing is trained."""
    runs = request.runs
    planned = sweep.Sweep(request.raw(runs), out).runs if runs else []
    with overrides.placed(f"paper {request.table}", request.assignments):
        running.estimate(planned, out, as_json)


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
        except Exit as ended:
            # 0: the time is up; 1: some runs failed; show those that finished
            if ended.code not in (0, 1):
                raise
            code = int(ended.code)
    done = [(*run, plan.folder) for run, plan in zip(runs, planned, strict=True) if finished(plan.folder)]
    show_tables(request, merged(request.published, finished_runs(done)), out if done else None, as_json)
    if code:
        raise Exit(code)


def show_tables(request: Request, results: Results, out: Path | None, as_json: bool) -> None:
    """Print the tables, and write the report of the finished runs in `out`."""
    if request.table == "small":
        listings = [*small.tables(results, request.choice), claims.listing(claims.answers(results))]
    else:
        listings = [table for name, cells in request.tables.items() for table in shown(name, cells, request, results)]
    if as_json:
        tables = {name: [compared(cell, results).as_dict() for cell in cells] for name, cells in request.tables.items()}
        page = {"report": running.report(out) if out else None}
        echo(strict_json(tables | page))
        return
    show(listings)
    if {"table1", "table2", "centred"} & request.tables.keys():
        echo(small.NOTE if request.table == "small" else NOTE)
    if out:
        running.show_report(out)


def shown(name: str, cells: Sequence[Cell], request: Request, results: Results) -> list[Listing]:
    """Tables of a part of the request; the third column is a part of Tables 1 and 2."""
    choice = request.choice
    if name == "centred" and request.table == "all":
        return []
    if name in ("table1", "table2"):
        columns = experiments.with_third_column(name, choice)
        return [listing(name, columns, results), last_rounds(name, columns, results, request.rounds)]
    if name == "centred":
        tables = {table: experiments.with_third_column(table, choice) for table in experiments.CENTRED}
        return [listing(table, columns, results) for table, columns in tables.items() if columns]
    if name == "ablations":
        return [ablations(cells, results, request.rounds)]
    if name == "differences":
        return [differences(experiments.changed(choice), results)]
    if name == "beyond":
        return [beyond.centring_listing(experiments.contrasts(choice), results)]
    if name == "uplinks":
        return [beyond.uplinks_listing(experiments.compressed(choice), results)]
    if name == "codecs":
        return [beyond.codecs_listing(experiments.at_one_bit(), results)]
    if name == "dadaquant":
        return [dadaquant.listing(results)]
    rules, optimizers = experiments.rivals_contrasts(choice), experiments.optimizers(choice)
    return [
        *([beyond.rivals_listing(rules, results)] if rules else []),
        *([beyond.optimizers_listing(optimizers, results)] if optimizers else []),
    ]


def publish(folders: Sequence[Path], to: Path, force: bool) -> None:
    for path in publishing.runs_under(folders):
        place, new = publishing.publish(path, to, force)
        echo(f"{place}: {'published' if new else 'already published'}")


# report -> its content from a folder of records, the default folder, and the default page
REPORTS: dict[str, tuple[Callable[[Path], reporting.PaperReport], str, str]] = {
    "paper": (reporting.report, "results", "docs/reproduction.md"),
    "details": (reporting.details, "results", "docs/reproduction-method.md"),
    "small": (small.report, "results/small", "docs/small.md"),
    "tasks": (tasks.report, "results", "docs/tasks.md"),
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
