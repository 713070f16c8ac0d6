"""Threads of trackers: each tracker logs new rounds of the records in its own thread, in parallel to training."""

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

WAIT = 60.0  # seconds that trackers have to finish after the records are complete
SILENT = 3.0  # seconds of them before the wait is reported
SLICE = 0.5  # seconds of one wait: a signal that arrives just before a wait begins does not interrupt it


class News(NamedTuple):
    """Notice of a round of a run, or of its end."""

    folder: Path
    number: int
    how: How | None = None


class Feed:
    """Connection of one run to one tracker, which gets new rounds of the record."""

    def __init__(self, name: str, kind: type[Tracker], folder: Path, now: int) -> None:
        self.note = folder / f"tracked.{name}.json"
        self.figures = Figures(folder / ROUNDS)
        kept = json.loads(self.note.read_text(encoding="utf-8")) if self.note.exists() else {}
        self.tracker = kind(about(folder, now), kept)

    def update(self) -> None:
        if rounds := {number: figures for number, figures in self.figures.new() if number > self.tracker.after}:
            self.tracker.add(rounds)
            write(self.note, json.dumps(self.tracker.kept | {"round": max(rounds)}).encode() + b"\n")


class TrackerWorker:
    """Thread of one tracker, for all runs of a command."""

    def __init__(self, name: str, kind: type[Tracker]) -> None:
        self.name, self.kind = name, kind
        self.news: SimpleQueue[News | None] = SimpleQueue()
        self.problems: SimpleQueue[str] = SimpleQueue()
        self.feeds: dict[Path, Feed | None] = {}  # None: it failed, or the run has ended
        self.over = Event()  # instead of Thread.join, which regards a thread as ended if Ctrl-C interrupts it
        self.thread = Thread(target=self._work, name=f"track {name}", daemon=True)

    def put(self, news: News | None) -> None:
        if self.thread.ident is None:  # at the first round, after worker processes have been forked
            self.thread.start()
        self.news.put(news)

    def _work(self) -> None:
        while (news := self.news.get()) is not None:
            try:
                self._log(news)
            except Exception as problem:
                self.problems.put(f"--track {self.name}: {sentence(problem)}; training continues without it")
                feed, self.feeds[news.folder] = self.feeds.get(news.folder), None
                with suppress(Exception):  # close its resources
                    if feed:
                        feed.tracker.end("failed")
        self.over.set()

    def _log(self, news: News) -> None:
        if news.folder not in self.feeds:
            self.feeds[news.folder] = None
            self.feeds[news.folder] = Feed(self.name, self.kind, news.folder, news.number)
        if feed := self.feeds[news.folder]:
            feed.update()
            if news.how:
                self.feeds[news.folder] = None
                feed.tracker.end(news.how)


class Trackers:
    """All trackers of a command; `tell` is called with their errors, once per message."""

    def __init__(self, kinds: Mapping[str, type[Tracker]], tell: Callable[[str], None]) -> None:
        self.workers = [TrackerWorker(name, kind) for name, kind in kinds.items()]
        self.tell, self.reported = tell, set[str]()
        self.active: dict[Path, int] = {}  # last round of each run that has not ended

    def round(self, folder: Path, number: int) -> None:
        """Log a recorded round; after the last one, when its record is complete, the run ends."""
        self.active[folder] = number
        self._put(News(folder, number))
        if finished(folder):
            self.end(folder, "finished")

    def end(self, folder: Path, how: How) -> None:
        if number := self.active.pop(folder, 0):
            self._put(News(folder, number, how))

    def close(self, how: How) -> None:
        """End all runs that have not ended, and wait for the trackers."""
        for folder in list(self.active):
            self.end(folder, how)
        begun = [worker for worker in self.workers if worker.thread.ident is not None]
        for worker in begun:
            worker.put(None)
        with suppress(KeyboardInterrupt):  # everything is recorded, so that Ctrl-C may end the wait
            for name in self._late(begun, SILENT):
                self.tell(f"--track {name}: has not finished yet; waiting up to {WAIT:g} seconds, or until Ctrl-C")
            self._late(begun, WAIT - SILENT)
        for name in self._late(begun, 0):
            self.tell(f"--track {name}: has not finished; the last rounds may be missing there")

    def _late(self, workers: Iterable[TrackerWorker], seconds: float) -> list[str]:
        """Names of trackers that have not finished after this many seconds."""
        until = time.monotonic() + seconds
        late = []
        for worker in workers:
            while not worker.over.wait(min(SLICE, max(0.0, until - time.monotonic()))):
                if time.monotonic() >= until:
                    late.append(worker.name)
                    break
        self._report()
        return late

    def _put(self, news: News) -> None:
        for worker in self.workers:
            worker.put(news)
        self._report()

    def _report(self) -> None:
        for worker in self.workers:
            while not worker.problems.empty():
                sentence = worker.problems.get()
                if sentence not in self.reported:  # once, if all runs of a sweep have the same error
                    self.reported.add(sentence)
                    self.tell(sentence)
