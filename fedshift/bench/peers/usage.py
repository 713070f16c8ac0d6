"""CPU time and memory of a process with all its descendants (Linux only)."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
ADOPT = 36  # prctl(PR_SET_CHILD_SUBREAPER)


class Usage(NamedTuple):
    """Sums over processes."""

    seconds: float  # of CPU time, including children that have ended
    resident: int  # bytes; memory that processes share is counted in each


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat."""

    pid: int
    state: str
    parent: int
    ticks: int  # of CPU time, including children that have ended
    pages: int


def supported() -> bool:
    return (PROC / "self" / "stat").exists()


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that `tree` finds them."""
    ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)


def tree(root: int) -> list[ProcessStat]:
    """The process `root`, if it exists, and its descendants."""
    stats = {stat.pid: stat for stat in _stats()}
    children: dict[int, list[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    pids = [root] if root in stats else []
    for pid in pids:
        pids += children.get(pid, [])
    return [stats[pid] for pid in pids]


def usage(root: int) -> Usage:
    processes = tree(root)
    seconds = sum(process.ticks for process in processes) / os.sysconf("SC_CLK_TCK")
    return Usage(seconds, sum(process.pages for process in processes) * os.sysconf("SC_PAGE_SIZE"))


def kill_descendants(root: int) -> None:
    """Kill all descendants of a process that adopts orphans."""
    while others := [process.pid for process in tree(root)[1:] if process.state != "Z"]:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill(root: int) -> None:
    """Kill a process that adopts orphans, after all its descendants."""
    kill_descendants(root)
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGKILL)


def _stats() -> Iterator[ProcessStat]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                head, _, tail = (folder / "stat").read_text().rpartition(")")
                fields = tail.split()
                ticks = sum(int(field) for field in fields[11:15])
                yield ProcessStat(int(head.split()[0]), fields[0], int(fields[1]), ticks, int(fields[21]))
