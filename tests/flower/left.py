"""What is left of processes."""

from contextlib import suppress
from pathlib import Path


def alive(pids: list[int]) -> list[int]:
    """Those that are running; a zombie is gone, whether anybody asks after it or not."""
    left = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                left.append(pid)
    return left
