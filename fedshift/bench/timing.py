"""Memory of a process, and functions in separate processes."""

import ctypes
import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def installed(package: str) -> bool:
    """True if an optional package and its dependencies can be imported."""
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def fresh_memory() -> None:
    """Make glibc allocate large arrays in new pages and return them immediately; no effect on other C libraries."""
    mmap_threshold = -3  # of malloc.h
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def resident(field: str) -> int:
    """Resident memory of this process in bytes: VmRSS (current) or VmHWM (peak) (Linux only)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def in_process(module: str, function: str, *numbers: int) -> list[float]:
    """Result of a function in a separate process, so that its memory is measured alone."""
    program = f"from {module} import {function}; r = {function}{numbers}; print(*(r if isinstance(r, tuple) else (r,)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]
