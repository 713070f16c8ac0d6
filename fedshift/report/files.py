"""The command `fedshift report`: write the page and figures, or print JSON."""

import os
from collections.abc import Sequence
from pathlib import Path

from fedshift.core.files import RunError, make_folder, write
from fedshift.report.charts import Report, to_json
from fedshift.report.gather import UPLINK, gather
from fedshift.report.style import check
from fedshift.runs.progress import echo, strict_json

PAGE = "report.html"
SIGN = b'<meta name="generator" content="fedshift'  # in the head of every page
HEAD = 4096  # bytes


def report(
    folders: Sequence[Path],
    out: Path | None,
    figures: Path | None,
    formats: Sequence[str],
    uplink: float,
    title: str,
    as_json: bool,
) -> None:
    """Write the page, and figures if requested.

    With `as_json`, print the report and write the page only if `out` is given.
    """
    page = out or (None if as_json else folders[0] / PAGE)
    if page:
        check_place(page)
    if figures:
        check(formats, "--figures")
    made = gather(folders, title=title, uplink=uplink)
    paths: list[Path] = []
    if figures:
        from fedshift.report.drawing import draw

        paths = draw(made, figures, formats)
    if page:
        write_page(made, page)
    if as_json:
        echo(strict_json(to_json(made)))
    elif page:
        echo(str(page))
        if figures:
            echo(f"{len(paths)} figures written to {figures}")


def write_report(folders: Sequence[Path], out: Path, *, title: str = "", uplink: float = UPLINK) -> Path:
    """Write the page on the runs in these folders and below; return its path. RunError if another file is there."""
    check_place(out)
    write_page(gather(folders, title=title, uplink=uplink), out)
    return out


def check_place(out: Path) -> None:
    """Raise RunError unless the path is free or an older report, which may be overwritten."""
    if os.path.isdir(out):
        raise RunError(f"{out}: is a folder instead of a file; choose another file with `fedshift report --out`")
    try:
        with open(out, "rb") as file:
            ours = SIGN in file.read(HEAD)
    except FileNotFoundError:
        return
    except OSError as problem:
        raise RunError(f"{out}: cannot be read: {problem.strerror}") from None
    if not ours:
        raise RunError(f"{out}: already exists and is not a report; choose another file with `fedshift report --out`")


def write_page(made: Report, out: Path) -> None:
    from fedshift.report.page import render

    make_folder(out.parent)
    write(out, render(made).encode("utf-8", "backslashreplace"))  # folder names may not be valid UTF-8
