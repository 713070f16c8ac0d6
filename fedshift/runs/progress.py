"""Progress of runs: bars in a terminal, lines elsewhere, JSON for programs, or nothing."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedshift.core.names import printable
from fedshift.core.units import megabytes
from fedshift.experiment.toml import plain

EVERY = 2.0  # seconds between lines
RECORDED = "Recording in {}"
CROWD = 12  # number of runs above which the bars of finished runs are hidden


class Display(Protocol):
    """Receiver of the events of one or several runs."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *problem: object) -> None: ...

    def start(self, folder: Path) -> None:
        """Called before the first round; all runs are recorded below the folder."""

    def add(self, name: str, rounds: int, folder: Path, metric: str = "accuracy") -> int:
        """Add a run that is recorded in the folder and scored by a metric; return its number."""

    def round(self, run: int, number: int, score: float | None, loss: float | None, bytes_up: int) -> None:
        """Called after each round of a run."""

    def failed(self, run: int, sentence: str) -> None:
        """Called when a run ends before its last round, with the reason."""

    def tell(self, sentence: str) -> None:
        """Show a warning or a note."""


class Silent:
    """Warnings and errors only."""

    def __init__(self, errors: Console) -> None:
        self.errors, self.names, self.rounds, self.metrics = errors, list[str](), list[int](), list[str]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def start(self, folder: Path) -> None:
        pass

    def add(self, name: str, rounds: int, folder: Path, metric: str = "accuracy") -> int:
        self.names.append(printable(name))
        self.rounds.append(rounds)
        self.metrics.append(metric)
        return len(self.names) - 1

    def round(self, run: int, number: int, score: float | None, loss: float | None, bytes_up: int) -> None:
        pass

    def failed(self, run: int, sentence: str) -> None:
        self.tell(sentence)

    def tell(self, sentence: str) -> None:
        _print(self.errors, sentence, "yellow")


class Json(Silent):
    """One JSON object per round."""

    def __init__(self, errors: Console, write: Callable[[str], None]) -> None:
        super().__init__(errors)
        self.write = write

    def round(self, run: int, number: int, score: float | None, loss: float | None, bytes_up: int) -> None:
        figures = {"run": self.names[run], "round": number, "score": score, "loss": loss, "bytes_up": bytes_up}
        self.write(strict_json(figures))


class LineDisplay(Silent):
    """One line every few seconds, and for the first and the last round."""

    def __init__(self, errors: Console, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(errors)
        self.console, self.now, self.last, self.sent = console, now, 0.0, dict[int, int]()

    def start(self, folder: Path) -> None:
        _print(self.console, RECORDED.format(folder))

    def round(self, run: int, number: int, score: float | None, loss: float | None, bytes_up: int) -> None:
        self.sent[run] = self.sent.get(run, 0) + bytes_up
        if number not in (1, self.rounds[run]) and self.now() - self.last < EVERY:
            return
        self.last = self.now()
        figures = figures_text(score, loss, self.sent[run], self.metrics[run])
        self.console.print(
            f"{self.names[run]}: round {number} of {self.rounds[run]}, {figures}",
            highlight=False,
            markup=False,
            emoji=False,
        )


class Bars(Silent):
    """One bar per run in progress."""

    def __init__(self, errors: Console, console: Console) -> None:
        super().__init__(errors)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )
        self.tasks: dict[int, TaskID] = {}
        self.sent: dict[int, int] = {}

    def start(self, folder: Path) -> None:
        _print(self.progress.console, RECORDED.format(folder))

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.progress.stop()

    def round(self, run: int, number: int, score: float | None, loss: float | None, bytes_up: int) -> None:
        self.sent[run] = self.sent.get(run, 0) + bytes_up
        if run not in self.tasks:
            self.tasks[run] = self.progress.add_task(
                self.names[run], total=self.rounds[run], completed=number - 1, figures=""
            )
        if score is not None:
            self.progress.update(self.tasks[run], figures=figures_text(score, loss, self.sent[run], self.metrics[run]))
        crowded = number == self.rounds[run] and len(self.names) > CROWD
        self.progress.update(self.tasks[run], completed=number, visible=not crowded)

    def tell(self, sentence: str) -> None:
        _print(self.progress.console, sentence, "yellow")


def _print(console: Console, sentence: str, style: str = "") -> None:
    """Print a sentence that may contain text of a user."""
    text = printable(sentence, keep="\n")
    console.print(text, style=style, highlight=False, soft_wrap=True, markup=False, emoji=False)


def echo(text: object, *, err: bool = False, keep: str = "") -> None:
    """Print one line of plain text; control characters in it are escaped."""
    typer.echo(printable(str(text), keep), err=err)


def strict_json(value: object) -> str:
    """JSON with null instead of NaN and infinity, and without raw control characters.

    >>> strict_json({"score": float("nan"), "rows": (1, 2.5)})
    '{"score": null, "rows": [1, 2.5]}'
    """

    def finite(leaf: object) -> object:
        return None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf

    return json.dumps(plain(value, finite), allow_nan=False).replace("\x7f", "\\u007f")


def figures_text(score: float | None, loss: float | None, sent: int, metric: str = "accuracy") -> str:
    """Score, loss and uploaded bytes as text.

    >>> figures_text(0.875, 0.4321, 1_250_000), figures_text(0.3, 0.4321, 1_250_000, "mine:mae")
    ('87.5 %, loss 0.432, 1.2 MB up', 'mae 0.3, loss 0.432, 1.2 MB up')
    """
    name = metric.rpartition(":")[2]
    named = [] if score is None or metric == "loss" else [f"{name} {score:.4g}"]
    figures = [f"{100 * score:.1f} %"] if score is not None and metric == "accuracy" else named
    figures += [] if loss is None else [f"loss {loss:.3f}"]
    return ", ".join([*figures, f"{megabytes(sent, digits=1)} MB up"])
