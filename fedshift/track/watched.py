"""A display that also passes rounds to trackers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Self

from fedshift.runs.progress import Display
from fedshift.track.loading import load
from fedshift.track.threads import Trackers


class Watched:
    """Wrapper of a display; trackers end after it, when the records are complete."""

    def __init__(self, display: Display, names: Iterable[str]) -> None:
        self.display, self.trackers = display, Trackers({name: load(name) for name in names}, display.tell)
        self.folders: list[Path] = []

    def __enter__(self) -> Self:
        self.display.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.display.__exit__(*problem)
        self.trackers.close("failed" if isinstance(problem[1], Exception) else "stopped")

    def start(self, folder: Path) -> None:
        self.display.start(folder)

    def add(self, name: str, rounds: int, folder: Path, metric: str = "accuracy") -> int:
        self.folders.append(folder)
        return self.display.add(name, rounds, folder, metric)

    def round(self, run: int, number: int, score: float | None, loss: float | None, bytes_up: int) -> None:
        self.display.round(run, number, score, loss, bytes_up)
        self.trackers.round(self.folders[run], number)

    def failed(self, run: int, sentence: str) -> None:
        self.display.failed(run, sentence)
        self.trackers.end(self.folders[run], "failed")

    def tell(self, sentence: str) -> None:
        self.display.tell(sentence)
