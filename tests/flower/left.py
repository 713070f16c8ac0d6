"""Processes that are still running."""

from contextlib import suppress
from pathlib import Path


def alive(pids: list[int]) -> list[int]:
    """Return the processes that are running; zombies do not count."""
    left = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left.append(pid)
    return left
