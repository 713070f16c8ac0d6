"""What `fedshift paper ...` and `fedshift plan` do, once their arguments are read."""

import sys
from collections.abc import Sequence
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
from fedshift.paper import beyond, experiments, uplinks
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


class Asked(NamedTuple):
    """A table, or a part of it, and how it is run."""

    table: str
    choice: CellChoice
    seeds: int
    rounds: int | None
    assignments: tuple[str, ...] = ()
    records: Path | None = None  # published records: runs that have one are not run again

    @property
    def tables(self) -> dict[str, list[Cell]]:
        """The cells of each table that is asked for."""
        names = ("table1", "ablations", "beyond", "uplinks", "table2") if self.table == "all" else (self.table,)
        found = {name: cells for name in names if (cells := experiments.TABLES[name](self.choice))}
        if not found:
            raise SettingsError(f"paper {self.table}: has no cell with these --bits, --algorithms and --shift")
        return found

    @property
    def runs(self) -> list[tuple[Cell, int]]:
        """In the order in which they are worth running: one seed of everything, then the others; Table 2 last."""
        tables = self.tables
        last = tables.pop("table2", []) if self.table == "all" else []
        ordered = [(cell, seed) for seed in range(self.seeds) for cells in tables.values() for cell in cells]
        ordered += [(cell, seed) for seed in range(self.seeds) for cell in last]
        published = self.published.records
        once = dict.fromkeys(ordered)  # tables share cells
        return [(cell, seed) for cell, seed in once if seed not in published.get(cell.name, {})]

    @property
    def published(self) -> Results:
        """Published records of these tables, none without `records`."""
        if self.records is None:
            return Results({})
        if not self.records.is_dir():
            raise SettingsError(f"--records {self.records}: there is no such folder")
        over = [a for a in self.assignments if not a.startswith(("engine.", "record."))]
        if self.rounds is not None or over:
            seen = f"--set {over[0]}" if over else f"--rounds {self.rounds}"
            raise SettingsError(f"--records {self.records}: records are of the paper's settings; leave out {seen}")
        return published(self.records, [cell for cells in self.tables.values() for cell in cells])[0]

    def raw(self, runs: Sequence[tuple[Cell, int]]) -> dict[str, Any]:
        """The settings of a sweep over these runs."""
        over: dict[str, Any] = {}
        for assignment in self.assignments:
            assign(over, assignment)
        raw = experiments.sweep(runs, self.rounds, {key: value for key, value in over.items() if key != "sweep"})
        if "sweep" in over:
            raise SettingsError("--set sweep: a table of the paper says which runs there are")
        if taken := sorted(dotted(over).keys() & (grid.keys(raw) | {"name", "seed"})):
            hint = "--rounds changes it" if taken[0] == "train.rounds" else "it makes a cell of the table what it is"
            raise SettingsError(f"--set {taken[0]}: {hint}")
        with overrides.placed("--set"):
            grid.expand(raw)
        return raw


def estimate(asked: Asked, out: Path, as_json: bool) -> None:
    """How long what is missing takes on this device; nothing is run."""
    runs = asked.runs
    made = sweep.Sweep(asked.raw(runs), out).runs if runs else []
    missing = [run for run, one in zip(runs, made, strict=True) if not finished(one.folder)]
    with overrides.placed(f"paper {asked.table}", asked.assignments):
        seconds = sweep.estimate(asked.raw(missing), cores_here()) if missing else 0.0
    if as_json:
        echo(strict_json({"runs": len(made), "missing": len(missing), "seconds": seconds}))
        return
    takes = f"; they take about {rough_time(seconds)} on this device" if missing else ""
    echo(f"{len(missing)} of {len(made)} runs are missing in {out}{takes}.")


def run(asked: Asked, out: Path, display: Display, as_json: bool, minutes: float | None) -> None:
    """Train what is missing, then print ours beside the paper's."""
    runs = asked.runs
    if not runs:
        tell(asked, asked.published, None, as_json)
        return
    raw, code = asked.raw(runs), 0
    made = sweep.Sweep(raw, out)
    if not all(finished(one.folder) for one in made.runs):
        try:
            with overrides.placed(f"paper {asked.table}", asked.assignments):
                running.grid(raw, out, display, as_json, minutes, table=False)
        except SystemExit as ended:
            if ended.code not in (0, 1):  # 0: the time is up; 1: some runs failed; what is finished is worth a table
                raise
            code = int(ended.code)
    done = [(*run, one.folder) for run, one in zip(runs, made.runs, strict=True) if finished(one.folder)]
    tell(asked, merged(asked.published, finished_runs(done)), out if done else None, as_json)
    if code:
        sys.exit(code)


def tell(asked: Asked, results: Results, out: Path | None, as_json: bool) -> None:
    """The tables, and the page of the finished runs in `out`."""
    listings = list[Listing]()
    for name, cells in asked.tables.items():
        if name == "beyond":
            listings.append(beyond.centring_listing(experiments.contrasts(asked.choice), results))
        elif name == "uplinks":
            listings.append(beyond.uplinks_listing(experiments.compressed(asked.choice), results))
        else:
            listings.append(listing(name, cells, results, asked.rounds))
    if as_json:
        told = {name: [compared(cell, results).as_dict() for cell in cells] for name, cells in asked.tables.items()}
        page = {"report": running.report(out) if out else None}
        echo(strict_json(told | page))
        return
    show(listings)
    echo("last ten: mean of the last ten rounds, ± the sample standard deviation over seeds; difference: of that")
    if out:
        running.look_at(out)


def publish(folders: Sequence[Path], to: Path, force: bool) -> None:
    for path in publishing.runs_under(folders):
        place, new = publishing.publish(path, to, force)
        echo(f"{place}: {'published' if new else 'is published already'}")


def report(folder: Path, page: Path | None, as_json: bool) -> None:
    if not folder.is_dir():
        raise SettingsError(f"--results {folder}: there is no such folder")
    made = reporting.report(folder)
    if page is not None:
        try:
            before = page.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise SettingsError(f"--page {page}: cannot be read: {problem}") from None
        write(page, reporting.rewritten(before, made, str(page)).encode())
        echo(f"{page}: written")
    elif as_json:
        echo(strict_json(made.as_dict()))
    else:
        for title, parts in made.sections:
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
        "times slower: (t32 - encode) / t; a codec pays off while the slow link is no more than so many times slower\n"
        "than the fast one; seconds: encode + bytes / rate; encode: median CPU time, one thread",
        keep="\n",
    )


def plan(uplink: str, model: str | None, weights: int | None, as_json: bool) -> None:
    at = rate(uplink)
    params, times = uplinks.model(model, weights)
    with Console(stderr=True).status("") as status:
        found = uplinks.candidates(params, times, tick=lambda name: status.update(f"measuring {name} ..."))
    uploads = measured(params, times)
    advice = uplinks.advice(found, uploads, at)
    if as_json:
        best = uplinks.recommended(found, at)
        named = [
            {
                "name": one.name,
                "settings": GRID[one.name],
                "sends": one.sends,
                "seconds": one.upload.seconds(at),
                "encode": one.upload.encode,
                "bytes": one.upload.bytes,
                "digits": uplinks.MEASURED[one.name]._asdict(),
                "recommended": one is best,
            }
            for one in sorted(found, key=lambda one: one.upload.seconds(at))
        ]
        rows = [one._asdict() | {"seconds": one.seconds(at), "error": one.error} for one in uploads]
        codecs = sorted(rows, key=lambda row: row["seconds"])
        shift = ShiftSettings().model_dump(include={"on", "per", "share"}) | {"bytes": 0}
        echo(strict_json({"rate": at, "uplinks": named, "codecs": codecs, "shift": shift, "advice": advice}))
        return
    show([uplinks.choices(found, at)])
    for sentence in advice:
        echo(sentence)
    show([uplinks.plan(uploads, at)])


def measured(params: Params, times: float, repeats: int = 3) -> list[uplinks.CodecUpload]:
    """Every codec, with a word on what is going on."""
    with Console(stderr=True).status("") as status:
        return uplinks.measure(params, times, repeats, lambda name: status.update(f"measuring {name} ..."))


def show(parts: Sequence[str | Listing]) -> None:
    """Tables as wide as they need to be when nobody watches."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, width=160)
    for part in parts:
        if isinstance(part, str):
            console.print(printable(part), highlight=False, soft_wrap=True)
        else:
            console.print(part.drawn(), highlight=False)
