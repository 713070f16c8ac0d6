"""What `fedshift paper figures` does, once its arguments are read."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedshift import command
from fedshift.files import RunError, write
from fedshift.paper.figures.records import Source, found, panels
from fedshift.presets import PRESETS
from fedshift.progress import Display
from fedshift.toml import SettingsError, merge

if TYPE_CHECKING:
    from fedshift.paper.figures.style import Drawn

NUMBERS, FORMATS = range(1, 11), ("svg", "png", "pdf")
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
    """Draw the figures asked for, all without any, and say what each was drawn from."""
    asked, kinds = chosen(numbers), written(formats)
    if find_spec("matplotlib") is None:
        raise SettingsError("paper figures: Matplotlib is not installed here; pip install 'fedshift[report]'")
    folder = recorded(records, fresh)
    if folder is not None and rounds is not None:
        raise SettingsError(
            f"--rounds {rounds}: is for a fresh run, and there are runs in {folder}; --fresh asks for one"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"--out {out}: cannot be written to: {problem.strerror or problem}") from None
    source = None
    if any(number in RECORDED for number in asked):
        source = runs(folder) if folder is not None else trained(out, rounds or ROUNDS, display)
    for number in asked:
        draw(number, kinds, out, source)


def chosen(numbers: Sequence[str]) -> list[int]:
    """
    >>> chosen(["7", "2", "7"]), len(chosen([]))
    ([2, 7], 10)
    """
    if bad := [text for text in numbers if text not in map(str, NUMBERS)]:
        raise SettingsError(f"figure {bad[0]}: there is no such figure; the paper has {NUMBERS[0]} to {NUMBERS[-1]}")
    return sorted({int(text) for text in numbers}) or list(NUMBERS)


def written(formats: Sequence[str]) -> list[str]:
    if bad := [text for text in formats if text not in FORMATS]:
        raise SettingsError(f"--format {bad[0]}: must be among {', '.join(FORMATS)}")
    return list(dict.fromkeys(formats)) or [FORMATS[0]]


def recorded(records: Path | None, fresh: bool) -> Path | None:
    """The folder to read: the one asked for, else published records where there are any; None for a fresh run."""
    if records is None:
        return None if fresh or not PUBLISHED.is_dir() or not found(PUBLISHED) else PUBLISHED
    if fresh:
        raise SettingsError("--fresh: goes without --records, which says where runs are")
    if not records.is_dir():
        raise SettingsError(f"--records {records}: there is no such folder")
    return records


def runs(folder: Path) -> Source:
    if not (records := found(folder)):
        raise RunError(f"--records {folder}: holds no finished run")
    return Source(panels(records), folder)


def trained(out: Path, rounds: int, display: Display) -> Source:
    """The demo's runs, shorter, beside the figures: what is finished there is not run again."""
    folder = out / "runs" / f"digits-{rounds}-rounds"
    raw: dict[str, Any] = merge(PRESETS["demo"], {"train": {"rounds": rounds}})
    command.grid(raw, folder, display, False, table=False)
    return Source(panels(found(folder)), folder, fresh=True)


def draw(number: int, formats: Sequence[str], out: Path, source: Source | None) -> None:
    """Into OUT/figure-N, once for each format."""
    from fedshift.paper.figures import gallery
    from fedshift.paper.figures.style import content, styled

    with styled():
        made: Drawn = gallery.RECORDED[number](source) if source and number in RECORDED else gallery.MADE[number]()
        for format in formats:
            path = out / f"figure-{number}.{format}"
            write(path, content(made.figure, format))
            typer.echo(f"{path}: {made.source}")
