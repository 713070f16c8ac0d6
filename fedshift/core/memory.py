"""Resident memory of this process."""

import ctypes
from contextlib import suppress
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def fresh_memory() -> None:
    """Make glibc allocate large arrays in new pages and return them immediately; no effect on other C libraries."""
    mmap_threshold = -3  # of malloc.h
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def resident(field: str) -> int:
    """Resident memory of this process in bytes: VmRSS (current) or VmHWM (peak).

    Without /proc, both are the peak since the start of the process, so that a difference is a lower bound.
    """
    if not STATUS.exists():
        import resource  # not on Windows
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def reset_peak() -> int:
    """Reset the peak, if the system can, and return the current resident memory in bytes."""
    with suppress(OSError):
        CLEAR.write_text("5")
    return resident("VmRSS")
