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


class Own:
    """A tracker that remembers what it is told."""

    told: list[Any]

    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        self.after, self.kept = kept.get("round", 0), {"again": bool(kept)}
        self.told.append(run)

    def add(self, rounds: Rounds) -> None:
        self.told.append(rounds)

    def end(self, how: How) -> None:
        self.told.append(how)


@pytest.fixture
def own() -> type[Own]:
    Own.told = []
    return Own


def followed(out: Path, kinds: Mapping[str, type[Tracker]], **train: int) -> tuple[list[str], list[int]]:
    """What is told of trouble, and the rounds that were trained; the run is finished."""
    told: list[str] = []
    return told, follow(out, Trackers(kinds, told.append), **train)


def follow(out: Path, trackers: Trackers, **train: int) -> list[int]:
    """The rounds that were trained, to the end of the run."""
    numbers = []
    for outcome in Run(small({"train": {"rounds": 3, **train}}), out, data=digits()):
        trackers.round(out, outcome.number)
        numbers.append(outcome.number)
    trackers.close("stopped")
    assert finished(out)
    return numbers


def test_a_tracker_gets_the_run_its_rounds_and_its_end(tmp_path: Path, own: type[Own]) -> None:
    assert followed(tmp_path / "one", {"own": own}) == ([], [1, 2, 3])
    run, *rounds, how = own.told
    assert (run.name, run.group, run.now, how) == ("one", "", 1, "finished")
    assert run.settings["train.rounds"] == 3
    heard = {number: figures for part in rounds for number, figures in part.items()}
    assert list(heard) == [1, 2, 3]
    assert heard[3]["bytes/up_total"] == sum(figures["bytes/up"] for figures in heard.values())
    assert (tmp_path / "one" / "tracked.own.json").read_text() == '{"again": false, "round": 3}\n'


class NotToBegin(Own):
    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        raise ConnectionError("nobody\nanswers")


class NotToAdd(Own):
    def add(self, rounds: Rounds) -> None:
        raise OSError(28, "No space left on device")


class NotToEnd(Own):
    def end(self, how: How) -> None:
        raise ValueError("not now")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (NotToBegin, "ConnectionError: nobody answers"),
        (NotToAdd, "OSError: [Errno 28] No space left on device"),
        (NotToEnd, "ValueError: not now"),
    ],
)
def test_a_tracker_that_fails_is_reported_once_and_dropped(
    kind: type[Tracker], why: str, tmp_path: Path, own: type[Own]
) -> None:
    told, numbers = followed(tmp_path / "one", {"bad": kind, "own": own})
    assert (told, numbers) == ([f"--track bad: {why}; training continues without it"], [1, 2, 3])
    assert "finished" in own.told  # the other goes on; both write to one list, each from its own thread


def test_the_same_error_of_two_runs_is_reported_once(tmp_path: Path) -> None:
    told: list[str] = []
    trackers = Trackers({"bad": NotToBegin}, told.append)
    for name in ("one", "two"):
        for outcome in Run(small({"train": {"rounds": 1}}), tmp_path / name, data=digits()):
            trackers.round(tmp_path / name, outcome.number)
    trackers.close("stopped")
    assert len(told) == 1


def test_a_run_that_is_not_finished_ends_as_stopped(tmp_path: Path, own: type[Own]) -> None:
    trackers = Trackers({"own": own}, pytest.fail)
    with Run(small(), tmp_path / "one", data=digits()) as run:
        trackers.round(tmp_path / "one", next(run).number)
    trackers.close("stopped")
    assert own.told[-1] == "stopped"


def test_training_does_not_wait_for_a_tracker_that_hangs(
    tmp_path: Path, own: type[Own], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SILENT", 0.1)
    monkeypatch.setattr(threads, "WAIT", 0.2)
    free, ended = Event(), Event()

    class Hanging(Own):
        def add(self, rounds: Rounds) -> None:
            free.wait()
            super().add(rounds)

        def end(self, how: How) -> None:
            super().end(how)
            ended.set()

    told, numbers = followed(tmp_path / "one", {"slow": Hanging})
    assert numbers == [1, 2, 3]
    assert told == [
        "--track slow: has not finished yet; waiting up to 0.2 seconds, or until Ctrl-C",
        "--track slow: has not finished; the last rounds may be missing there",
    ]
    free.set()
    assert ended.wait(600)
    assert own.told[-1] == "finished"
    rounds = [part for part in own.told if isinstance(part, dict)]
    assert sorted(number for part in rounds for number in part) == [1, 2, 3]  # the rest came when it could


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_wait_for_trackers(tmp_path: Path, own: type[Own], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SILENT", 0.1)
    free, waiting = Event(), Event()

    class Hanging(Own):
        def end(self, how: How) -> None:
            free.wait()

    def press() -> None:
        waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def tell(sentence: str) -> None:
        told.append(sentence)
        waiting.set()  # of the wait itself: from here on Ctrl-C has something to cut short

    told: list[str] = []
    presses = Thread(target=press)
    presses.start()
    assert follow(tmp_path / "one", Trackers({"slow": Hanging}, tell)) == [1, 2, 3]
    free.set()
    presses.join()
    assert told == [
        "--track slow: has not finished yet; waiting up to 600 seconds, or until Ctrl-C",
        "--track slow: has not finished; the last rounds may be missing there",
    ]


def test_rounds_that_a_tracker_missed_are_replayed(tmp_path: Path, own: type[Own]) -> None:
    out = tmp_path / "one"
    with Run(small(), out, data=digits()) as run:
        for _ in range(3):
            next(run)
    trackers = Trackers({"own": own}, pytest.fail)
    with Run(small(), out, data=digits(), again=True) as run:
        trackers.round(out, next(run).number)
    trackers.close("stopped")
    assert own.told[0].now == 4
    assert list(own.told[1]) == [1, 2, 3, 4]
