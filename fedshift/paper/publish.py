"""Small records of finished runs: settings, machine, commit, and one line per round with the columns of the tables."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedshift.core.files import TEMPORARY, RunError, write
from fedshift.experiment.toml import plain
from fedshift.paper.records import FinishedRun
from fedshift.runs.columns import ESTIMATES, column
from fedshift.runs.record import ABOUT, ROUNDS, SETTINGS, begun, finished
from fedshift.runs.sheet import PARTS, TOTAL, csv_lines

LAYER = ("mean_after", "step", "drift", "drift_coded")  # mean_before is mean_after / (1 - share)
DROPPED = ("command",)  # of about.json: contains paths of the machine


def runs_under(folders: Iterable[Path]) -> list[Path]:
    """Finished runs in these folders and their subfolders."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder}: there is no such folder")
        paths = sorted({path.parent for path in [folder / SETTINGS, *folder.rglob(SETTINGS)] if path.exists()})
        if not any(finished(path) for path in paths):
            raise RunError(f"{folder}: contains no finished run")
        found += [path for path in paths if finished(path) and path not in found]
    return found


def publish(run: Path, to: Path, force: bool = False) -> tuple[Path, bool]:
    """Publish a run; return the folder of its record, and True if it is new. `force` replaces a record that differs."""
    record = FinishedRun(run)
    place = to / run.resolve().name
    files = {
        SETTINGS: record.experiment.toml().encode(),
        ABOUT: (json.dumps(_about(record), indent=2) + "\n").encode(),
        ROUNDS: reduced(record),
    }
    if begun(place):
        if all((place / name).exists() and (place / name).read_bytes() == content for name, content in files.items()):
            return place, False
        if not force:
            raise RunError(f"{place}: contains another record of this run; replace it with --force")
    elif place.exists():
        raise RunError(f"{place}: already exists and is not a record; remove it")
    temporary = to / (place.name + TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        temporary.mkdir(parents=True)
        for name, content in files.items():
            write(temporary / name, content)
        if place.exists():
            shutil.rmtree(place)
        temporary.rename(place)
    except OSError as problem:
        raise RunError(f"{place}: cannot be written: {problem.strerror or problem}") from None
    return place, True


def _about(record: FinishedRun) -> dict[str, Any]:
    about: dict[str, Any] = plain({key: value for key, value in record.about.items() if key not in DROPPED})
    return about


def reduced(record: FinishedRun) -> bytes:
    """Lines of a run with the published columns, rounded to a few digits."""
    digits = {
        "round": 4,
        column(record.experiment): 5,
        "loss": 4,
        **{name: 3 for name in record.header if name.startswith("predicted.")},
        **{f"{figure}.{layer}": 3 for figure in LAYER for layer in record.layers(figure)},
        "error": 3,
        "share": 4,
        "seconds.round": 3,
    }
    checks = [name for name in ESTIMATES if name in record.header and record.column(name)]
    rows: list[list[object]] = [[*digits, TOTAL, *PARTS, "bytes.down", *checks]]
    for line in record.lines:
        parts = [int(line[part]) for part in PARTS]
        cells = [short(line[name], n) for name, n in digits.items()]
        rows.append([*cells, sum(parts), *parts, line["bytes.down"], *(line[name] for name in checks)])
    return csv_lines(rows)


def short(text: str, digits: int) -> str:
    """Shortest text of a number with this many significant digits.

    >>> short("0.0987654", 3), short("-0.000123456", 3), short("48512345", 4), short("1.23457e-6", 3), short("0", 3)
    ('.0988', '-.000123', '4.851e7', '1.23e-6', '0')
    """
    if not text or not math.isfinite(number := float(text)):
        return text
    decimal, power = f"{number:.{digits}g}", f"{number:.{digits - 1}e}"
    mantissa, _, exponent = power.partition("e")
    scientific = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if "e" not in decimal:
        decimal = decimal.replace("-0.", "-.") if number < 0 else decimal.removeprefix("0") or "0"
        return decimal if len(decimal) <= len(scientific) else scientific
    return scientific
