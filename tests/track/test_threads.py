"""Training neither waits for a tracker nor ends because of one."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from fedshift.runs.record import finished
from fedshift.runs.run import Run
from fedshift.track import threads
from fedshift.track.base import About, How, Rounds, Tracker
from fedshift.track.threads import Trackers
from tests.runs import digits, small


class LoggedCalls:
    """A tracker that keeps the arguments of its calls."""

    calls: list[Any]

    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        self.after, self.kept = kept.get("round", 0), {"again": bool(kept)}
        self.calls.append(run)

    def add(self, rounds: Rounds) -> None:
        self.calls.append(rounds)

    def end(self, how: How) -> None:
        self.calls.append(how)


@pytest.fixture
def tracker() -> type[LoggedCalls]:
    LoggedCalls.calls = []
    return LoggedCalls


def followed(out: Path, kinds: Mapping[str, type[Tracker]], **train: int) -> tuple[list[str], list[int]]:
    """Warnings, and the numbers of the trained rounds; the run is finished."""
    warnings: list[str] = []
    return warnings, follow(out, Trackers(kinds, warnings.append), **train)


def follow(out: Path, trackers: Trackers, **train: int) -> list[int]:
    """Train a run to its end; return the numbers of its rounds."""
    numbers = []
    for outcome in Run(small({"train": {"rounds": 3, **train}}), out, data=digits()):
        trackers.round(out, outcome.number)
        numbers.append(outcome.number)
    trackers.close("stopped")
    assert finished(out)
    return numbers


def test_a_tracker_gets_the_run_its_rounds_and_its_end(tmp_path: Path, tracker: type[LoggedCalls]) -> None:
    assert followed(tmp_path / "one", {"good": tracker}) == ([], [1, 2, 3])
    run, *rounds, how = tracker.calls
    assert (run.name, run.group, run.now, how) == ("one", "", 1, "finished")
    assert run.settings["train.rounds"] == 3
    heard = {number: figures for part in rounds for number, figures in part.items()}
    assert list(heard) == [1, 2, 3]
    assert heard[3]["bytes/up_total"] == sum(figures["bytes/up"] for figures in heard.values())
    assert (tmp_path / "one" / "tracked.good.json").read_text() == '{"again": false, "round": 3}\n'


class FailsAtStart(LoggedCalls):
    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        raise ConnectionError("nobody\nanswers")


class FailsToAdd(LoggedCalls):
    def add(self, rounds: Rounds) -> None:
        raise OSError(28, "No space left on device")


class FailsToEnd(LoggedCalls):
    def end(self, how: How) -> None:
        raise ValueError("not now")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (FailsAtStart, "ConnectionError: nobody answers"),
        (FailsToAdd, "OSError: [Errno 28] No space left on device"),
        (FailsToEnd, "ValueError: not now"),
    ],
)
def test_a_tracker_that_fails_is_reported_once_and_dropped(
    kind: type[Tracker], why: str, tmp_path: Path, tracker: type[LoggedCalls]
) -> None:
    warnings, numbers = followed(tmp_path / "one", {"bad": kind, "good": tracker})
    assert (warnings, numbers) == ([f"--track bad: {why}; training continues without it"], [1, 2, 3])
    assert "finished" in tracker.calls  # the other continues; both write to one list, each from its own thread


def test_the_same_error_of_two_runs_is_reported_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers = Trackers({"bad": FailsAtStart}, warnings.append)
    for name in ("one", "two"):
        for outcome in Run(small({"train": {"rounds": 1}}), tmp_path / name, data=digits()):
            trackers.round(tmp_path / name, outcome.number)
    trackers.close("stopped")
    assert len(warnings) == 1


def test_a_run_that_is_not_finished_ends_as_stopped(tmp_path: Path, tracker: type[LoggedCalls]) -> None:
    trackers = Trackers({"good": tracker}, pytest.fail)
    with Run(small(), tmp_path / "one", data=digits()) as run:
        trackers.round(tmp_path / "one", next(run).number)
    trackers.close("stopped")
    assert tracker.calls[-1] == "stopped"


def test_training_does_not_wait_for_a_tracker_that_hangs(
    tmp_path: Path, tracker: type[LoggedCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SILENT", 0.1)
    monkeypatch.setattr(threads, "WAIT", 0.2)
    free, ended = Event(), Event()

    class Hanging(LoggedCalls):
        def add(self, rounds: Rounds) -> None:
            free.wait()
            super().add(rounds)

        def end(self, how: How) -> None:
            super().end(how)
            ended.set()

    warnings, numbers = followed(tmp_path / "one", {"slow": Hanging})
    assert numbers == [1, 2, 3]
    assert warnings == [
        "--track slow: has not finished yet; waiting up to 0.2 seconds, or until Ctrl-C",
        "--track slow: has not finished; the last rounds may be missing there",
    ]
    free.set()
    assert ended.wait(600)
    assert tracker.calls[-1] == "finished"
    rounds = [part for part in tracker.calls if isinstance(part, dict)]
    assert sorted(number for part in rounds for number in part) == [1, 2, 3]  # the rest is logged when it continues


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_wait_for_trackers(
    tmp_path: Path, tracker: type[LoggedCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SILENT", 0.1)
    free, waiting = Event(), Event()

    class Hanging(LoggedCalls):
        def end(self, how: How) -> None:
            free.wait()

    def press() -> None:
        waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def tell(sentence: str) -> None:
        warnings.append(sentence)
        waiting.set()  # the wait has begun, so that Ctrl-C ends it

    warnings: list[str] = []
    presses = Thread(target=press)
    presses.start()
    assert follow(tmp_path / "one", Trackers({"slow": Hanging}, tell)) == [1, 2, 3]
    free.set()
    presses.join()
    assert warnings == [
        "--track slow: has not finished yet; waiting up to 600 seconds, or until Ctrl-C",
        "--track slow: has not finished; the last rounds may be missing there",
    ]


def test_rounds_that_a_tracker_missed_are_replayed(tmp_path: Path, tracker: type[LoggedCalls]) -> None:
    out = tmp_path / "one"
    with Run(small(), out, data=digits()) as run:
        for _ in range(3):
            next(run)
    trackers = Trackers({"good": tracker}, pytest.fail)
    with Run(small(), out, data=digits(), again=True) as run:
        trackers.round(out, next(run).number)
    trackers.close("stopped")
    assert tracker.calls[0].now == 4
    assert list(tracker.calls[1]) == [1, 2, 3, 4]
