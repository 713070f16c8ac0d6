"""`fedshift paper figures`, after its arguments are parsed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedshift.cli import running
from fedshift.cli.terminal import Exit
from fedshift.core.files import RunError, make_folder, write
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.toml import SettingsError, merge
from fedshift.paper import experiments
from fedshift.paper.figures.records import Source, found, panels
from fedshift.report.style import FORMATS, PAPER, check, check_places, content, styled
from fedshift.runs.progress import Display, echo

NUMBERS = range(1, 11)
MAKER = "fedshift paper figures"  # in every file
RECORDED = (5, 7, 8, 9)  # figures that need runs
PUBLISHED = Path("results")
ROUNDS = 60  # of a fresh run


def figures(
    numbers: Sequence[str],
    formats: Sequence[str],
    records: Path | None,
    out: Path,
    rounds: int | None,
    fresh: bool,
    display: Display,
) -> None:
    """Draw the selected figures (default: all) and print the source of each."""
    selected, kinds = chosen(numbers), list(dict.fromkeys(formats)) or [FORMATS[0]]
    check(kinds, "paper figures")
    if records is not None and (fresh or rounds is not None):
        option = "--fresh" if fresh else f"--rounds {rounds}"
        raise SettingsError(
            f"{option}: requests a new run, and --records {records} existing runs; leave out one of them"
        )
    if records is not None and not records.is_dir():
        raise SettingsError(f"--records {records}: there is no such folder")
    check_places((place(out, number, kind) for number in selected for kind in kinds), MAKER, "--out")
    make_folder(out, "--out")
    source, failed = None, False
    if any(number in RECORDED for number in selected):
        recorded = None if fresh or rounds is not None else runs(records)
        source = recorded or trained(out, rounds or ROUNDS, display)
    for number in selected:
        failed |= not draw(number, kinds, out, source)
    if failed:
        raise Exit(2)


def chosen(numbers: Sequence[str]) -> list[int]:
    """Sorted figure numbers, without duplicates; all for none.

    >>> chosen(["7", "2", "7"]), len(chosen([]))
    ([2, 7], 10)
    """
    if bad := [text for text in numbers if text not in map(str, NUMBERS)]:
        raise SettingsError(f"figure {bad[0]}: there is no such figure; the paper has {NUMBERS[0]} to {NUMBERS[-1]}")
    return sorted({int(text) for text in numbers}) or list(NUMBERS)


def runs(folder: Path | None) -> Source | None:
    """Finished runs of a folder (default: published records, if any; of those of the paper's tables, only Table 1)."""
    records, others = found(folder or PUBLISHED)
    if folder is None:
        names = {cell.name for cell in experiments.drawn()}
        records = [run for run in records if run.folder.name.rpartition("_seed-")[0] in names] or records
    if folder is not None and not records:
        raise RunError(f"--records {folder}: contains no finished run{f' ({others[0]})' if others else ''}")
    if others:
        echo(f"{len(others)} of {len(others) + len(records)} runs are skipped: {others[0]}", err=True)
    return Source(panels(records), folder or PUBLISHED) if records else None


# full precision, the paper's uplink, and the paper's uplink with its shift
PAPERS = [
    {"uplink": "exact", "shift": {"on": False}},
    {"uplink": "paper", "shift": {"on": False}},
    {"uplink": "paper", "shift": {"on": True, "per": "layer"}},
]


def trained(out: Path, rounds: int, display: Display) -> Source:
    """Train the paper's uplink on a shorter demo task, next to the figures; finished runs are skipped."""
    folder = out / "runs" / f"digits-{rounds}-rounds"
    raw: dict[str, Any] = merge(PRESETS["demo"], {"train": {"rounds": rounds}, "sweep": {"runs": PAPERS}})
    running.grid(raw, folder, display, False, table=False)
    return Source(panels(found(folder)[0]), folder, fresh=True)


def draw(number: int, formats: Sequence[str], out: Path, source: Source | None) -> bool:
    """Write OUT/figure-N in each format; print an error and return False if the runs lack its data."""
    from fedshift.paper.figures import curves, fence, partitions, predictions, quantizing, shifting, system, training

    made_here = {
        1: system.draw,
        2: quantizing.draw,
        3: training.draw,
        4: shifting.draw,
        6: partitions.main,
        10: partitions.dirichlet,
    }
    recorded = {5: fence.draw, 7: curves.draw_accuracy, 8: predictions.draw, 9: curves.draw_movement}
    with styled(PAPER):
        try:
            drawing = recorded[number](source) if source and number in RECORDED else made_here[number]()
        except RunError as problem:
            echo(f"fedshift: figure {number}: {problem}", err=True)
            return False
        for kind in formats:
            path = place(out, number, kind)
            write(path, content(drawing.figure, kind, MAKER))
            echo(f"{path}: {drawing.source}")
    return True


def place(out: Path, number: int, kind: str) -> Path:
    return out / f"figure-{number}.{kind}"
