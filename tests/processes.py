"""Processes that a test watches: their children, and whether they are gone."""

import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int) -> list[Path]:
    return [Path("/proc") / child for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def assert_gone(processes: list[Path]) -> None:
    """Wait until they have ended. A zombie has, once no thread but its first is left: the others may hold its locks."""

    def alive(process: Path) -> bool:
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            return state != "Z" or len(list((process / "task").iterdir())) > 1
        except OSError:
            return False

    wait_until(lambda: not any(map(alive, processes)))


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
