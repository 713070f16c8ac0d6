"""Make a report from folders: find the runs, read their records, and build the sections."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedshift.core.files import RunError
from fedshift.experiment.grid import expand
from fedshift.experiment.toml import SettingsError, read
from fedshift.report import answers, clients, costs, inside, what, worth
from fedshift.report.charts import Report
from fedshift.report.lines import Grouped, counts, grouped
from fedshift.runs.record import ROUNDS, SETTINGS, SWEEP
from fedshift.runs.recorded import Broken, Recorded, recorded
from fedshift.runs.summary import names

UPLINK = 1.25e6  # 10 Mbit/s
NAMED = 5  # most runs that a warning names


def gather(folders: Sequence[Path], *, title: str = "", uplink: float = UPLINK) -> Report:
    """Report on the runs in these folders and below; `uplink` in bytes per second."""
    records = [recorded(folder) for folder in found(folders)]
    runs = [run for run in records if isinstance(run, Recorded)]
    broken = [run for run in records if isinstance(run, Broken)]
    if not runs:
        raise RunError(f"{broken[0].problem}; there is no other run in {folders[0]}")
    lines = grouped(runs)
    return Report(
        title=title or named(folders),
        about=about(runs),
        warnings=warnings(folders, lines, runs, broken),
        lines=[strand.line for strand in lines.strands],
        sections=[
            worth.section(lines),
            answers.section(lines),
            *clients.sections(lines.strands),
            costs.section(lines.strands, uplink),
            inside.section(lines.strands),
            what.section(lines, runs, broken),
        ],
    )


def found(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs in these folders and below, each once, including broken runs."""
    places: dict[Path, Path] = {}
    for folder in folders:
        if not os.path.isdir(folder):  # False also where permission is missing
            raise RunError(f"{folder}: there is no such folder")
        paths = sorted(_runs(folder))
        if not paths:
            raise RunError(f"{folder}: contains no run (there is no {SETTINGS} in it or below)")
        for path in paths:
            places.setdefault(path.resolve(), path)
    return list(places.values())


def _runs(folder: Path) -> set[Path]:
    """Folders that contain a run, and folders that cannot be read, which are reported as broken runs."""
    closed: list[str] = []
    walked = os.walk(folder, onerror=lambda problem: closed.append(str(problem.filename)))
    runs = {Path(place) for place, _, files in walked if SETTINGS in files or ROUNDS in files}
    return runs | {Path(place) for place in closed}


def not_started(folders: Iterable[Path]) -> list[str]:
    """Names of the runs of sweeps that have no folder yet."""
    missing = []
    walked = [Path(place, SWEEP) for folder in folders for place, _, files in os.walk(folder) if SWEEP in files]
    sweeps = {path.resolve(): path for path in walked}
    for sweep in sorted(sweeps.values()):
        try:
            planned = names(expand(read(sweep)))
        except SettingsError:  # the planned runs are unknown
            continue
        missing += [name for name in planned if not os.path.exists(sweep.parent / name)]
    return missing


def about(runs: Sequence[Recorded]) -> str:
    """Subtitle of the report, such as 'digits: 9 runs of 150 rounds, seeds 0, 1, 2'."""
    seeds = sorted({run.experiment.seed for run in runs})
    rounds = sorted({run.experiment.train.rounds for run in runs})
    data = ", ".join(dict.fromkeys(run.experiment.data.name for run in runs))
    listed = f"{len(seeds)} seeds" if len(seeds) > 5 else f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    length = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])
    return f"{data}: {len(runs)} run{'s' * (len(runs) > 1)} of {length} rounds, {listed}"


def warnings(folders: Sequence[Path], lines: Grouped, runs: Sequence[Recorded], broken: Sequence[Broken]) -> list[str]:
    """Sentences on runs that are unfinished, broken, damaged or duplicates."""
    sentences = []
    named = what.folder_names([*(run.folder for run in runs), *(run.folder for run in broken)])
    if late := [run for run in runs if not counts(run)]:
        listed = [f"{named[run.folder]} ({what.status(run)})" for run in late]
        sentences.append(f"Not finished, and not included in final scores: {_some(listed)}.")
    if waiting := not_started(folders):
        sentences.append(f"Not started: {_some(waiting)}.")
    if broken:
        sentences.append(f"Broken: {_some([f'{named[run.folder]} ({run.problem})' for run in broken])}.")
    if damaged := [run for run in runs if counts(run) and what.damage(run)]:
        listed = [f"{named[run.folder]} ({'; '.join(what.damage(run))})" for run in damaged]
        sentences.append(f"Damaged, and read without the damaged lines: {_some(listed)}.")
    if undirected := sorted({run.experiment.train.metric for run in runs if run.experiment.train.direction is None}):
        sentences.append(f"No goal is recorded for {_some(undirected)}; higher values are assumed to be better.")
    if lines.doubles:
        listed = [f"{named[double.folder]} ({kept.folder})" for double, kept in lines.doubles]
        sentences.append(f"Left out, because another run has the same settings and seed: {_some(listed)}.")
    return sentences


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def named(folders: Sequence[Path]) -> str:
    """
    >>> named([Path("runs/a")]), named([Path("a"), Path("b")]), named([Path("a"), Path("b"), Path("c"), Path("d")])
    ('a', 'a and b', 'a and 3 more')
    """
    names = [folder.resolve().name for folder in folders]
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"
