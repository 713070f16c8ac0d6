"""Trackers beside the training: each in a thread of its own, which passes on what is new in the records."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple

from fedshift.core.files import write
from fedshift.runs.record import ROUNDS, finished
from fedshift.track.base import How, Tracker, about
from fedshift.track.figures import Figures
from fedshift.track.loading import sentence

WAIT = 60.0  # seconds that trackers have to come to an end, once the records are complete
SILENT = 3.0  # of them, before the wait is told of


class News(NamedTuple):
    """A round of a run, or its end."""

    folder: Path
    number: int
    how: How | None = None


class Feed:
    """One run and one tracker: what is new in the record goes there."""

    def __init__(self, name: str, kind: type[Tracker], folder: Path, now: int) -> None:
        self.note = folder / f"tracked.{name}.json"
        self.figures = Figures(folder / ROUNDS)
        kept = json.loads(self.note.read_text(encoding="utf-8")) if self.note.exists() else {}
        self.tracker = kind(about(folder, now), kept)

    def go_on(self) -> None:
        if rounds := {number: figures for number, figures in self.figures.new() if number > self.tracker.after}:
            self.tracker.add(rounds)
            write(self.note, json.dumps(self.tracker.kept | {"round": max(rounds)}).encode() + b"\n")


class Aside:
    """One tracker, for all runs of a command."""

    def __init__(self, name: str, kind: type[Tracker]) -> None:
        self.name, self.kind = name, kind
        self.news: SimpleQueue[News | None] = SimpleQueue()
        self.problems: SimpleQueue[str] = SimpleQueue()
        self.feeds: dict[Path, Feed | None] = {}  # None: it failed, or the run is over
        self.over = Event()  # not the thread's own end: a join that Ctrl-C interrupts takes it for one
        self.thread = Thread(target=self._listen, name=f"track {name}", daemon=True)

    def put(self, news: News | None) -> None:
        if self.thread.ident is None:  # with the first round: worker processes are forked before
            self.thread.start()
        self.news.put(news)

    def _listen(self) -> None:
        while (news := self.news.get()) is not None:
            try:
                self._pass_on(news)
            except Exception as problem:
                self.problems.put(f"--track {self.name}: {sentence(problem)}; the training goes on without it")
                feed, self.feeds[news.folder] = self.feeds.get(news.folder), None
                with suppress(Exception):  # what it holds open
                    if feed:
                        feed.tracker.end("failed")
        self.over.set()

    def _pass_on(self, news: News) -> None:
        if news.folder not in self.feeds:
            self.feeds[news.folder] = None
            self.feeds[news.folder] = Feed(self.name, self.kind, news.folder, news.number)
        if feed := self.feeds[news.folder]:
            feed.go_on()
            if news.how:
                self.feeds[news.folder] = None
                feed.tracker.end(news.how)


class Trackers:
    """All trackers of a command; `tell` is called with what goes wrong there, each thing once."""

    def __init__(self, kinds: Mapping[str, type[Tracker]], tell: Callable[[str], None]) -> None:
        self.asides = [Aside(name, kind) for name, kind in kinds.items()]
        self.tell, self.told = tell, set[str]()
        self.on: dict[Path, int] = {}  # the last round of runs that have not ended

    def round(self, folder: Path, number: int) -> None:
        """A round that is in the record. After its last a run is over; its record is complete by then."""
        self.on[folder] = number
        self._put(News(folder, number))
        if finished(folder):
            self.end(folder, "finished")

    def end(self, folder: Path, how: How) -> None:
        if number := self.on.pop(folder, 0):
            self._put(News(folder, number, how))

    def close(self, how: How) -> None:
        """End all runs that have not ended, and wait for the trackers."""
        for folder in list(self.on):
            self.end(folder, how)
        begun = [aside for aside in self.asides if aside.thread.ident is not None]
        for aside in begun:
            aside.put(None)
        with suppress(KeyboardInterrupt):  # whoever does not want to wait: everything is recorded
            for name in self._late(begun, SILENT):
                self.tell(
                    f"--track {name}: has not come to an end yet; it has {WAIT:g} seconds, Ctrl-C cuts them short"
                )
            self._late(begun, WAIT - SILENT)
        for name in self._late(begun, 0):
            self.tell(f"--track {name}: has not come to an end; what it was told last may be missing there")

    def _late(self, asides: Iterable[Aside], seconds: float) -> list[str]:
        """Those that have not come to their end by then."""
        until = time.monotonic() + seconds
        late = [aside.name for aside in asides if not aside.over.wait(max(0.0, until - time.monotonic()))]
        self._hear()
        return late

    def _put(self, news: News) -> None:
        for aside in self.asides:
            aside.put(news)
        self._hear()

    def _hear(self) -> None:
        for aside in self.asides:
            while not aside.problems.empty():
                sentence = aside.problems.get()
                if sentence not in self.told:  # of one run is enough where a whole sweep has the same trouble
                    self.told.add(sentence)
                    self.tell(sentence)
