"""No process is left, even if its starter is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedshift.flower.app.processes import Process, ProcessError, answers, descendants, free_port, wait_for_port
from tests.flower.left import alive
from tests.runs import linux

# one child that waits, a grandchild without a parent, and one in a separate session
FAMILY = "(sleep 1000 &) ; setsid sleep 1000 & echo here; sleep 1000"


def family(folder: Path) -> Process:
    process = Process(["sh", "-c", FAMILY], os.environ, folder / "log", str(folder / "scratch"))
    (folder / "scratch").mkdir()
    until(lambda: "here" in process.text() and len(descendants(process.keeper.pid)) == 4)
    return process


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@linux
@pytest.mark.parametrize("end", [Process.stop, Process.kill])
def test_ending_a_process_ends_all_its_descendants(end: Callable[[Process], None], tmp_path: Path) -> None:
    process = family(tmp_path)
    members = descendants(process.keeper.pid)
    assert alive(members) == members
    end(process)
    assert process.code is not None
    assert alive(members) == []
    assert not (tmp_path / "scratch").exists()
    end(process)  # again, to no effect


def test_a_process_that_ends_by_itself_ends_its_descendants(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "sleep 1000 & echo here; exit 7"], os.environ, tmp_path / "log")
    assert process.wait(600) == 7
    assert process.text() == "here\n"
    process.stop()


STARTER = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
from pathlib import Path
from fedshift.flower.app.processes import Process
process = Process(["sh", "-c", sys.argv[2]], os.environ, Path(sys.argv[1]) / "log")
print(process.keeper.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", STARTER, str(tmp_path), FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield process
        process.kill()


@linux
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_starter_dies(how: signal.Signals, starter: subprocess.Popen[str]) -> None:
    assert starter.stdout is not None
    keeper = int(starter.stdout.readline())
    until(lambda: len(descendants(keeper)) == 4)
    members = [keeper, *descendants(keeper)]
    starter.send_signal(how)
    starter.wait()
    until(lambda: alive(members) == [])


def test_a_process_that_ends_while_starting_is_reported_with_its_log(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo no such thing; exit 1"], os.environ, tmp_path / "log")
    with pytest.raises(ProcessError, match=r"sh ended while starting, see .*log:\nno such thing"):
        wait_for_port(process, free_port(), timeout=600)
    process.stop()


def test_a_process_that_does_not_listen_is_reported_after_the_timeout(tmp_path: Path) -> None:
    process = Process(["sleep", "1000"], os.environ, tmp_path / "log")
    with pytest.raises(ProcessError, match=r"sleep does not answer after 0\.2 s"):
        wait_for_port(process, free_port(), timeout=0.2)
    process.kill()


def test_a_log_is_continued_and_its_text_is_that_of_the_last_start_without_colours(tmp_path: Path) -> None:
    for word in "one", "two":
        process = Process(["printf", f"\\033[92m{word}\\033[0m"], os.environ, tmp_path / "log")
        process.wait(600)
        process.stop()
    assert process.text() == "two"
    assert "one" in (tmp_path / "log").read_text()


def test_a_free_port_does_not_answer() -> None:
    assert not answers(free_port())
