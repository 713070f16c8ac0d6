"""Memory of a process, and functions in processes of their own."""

import ctypes
import importlib
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def installed(package: str) -> bool:
    """True if an optional package can be imported: one with a missing dependency cannot."""
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def fresh_memory() -> None:
    """Have the C library, where it is glibc, give large arrays new pages and take them back at once."""
    mmap_threshold = -3  # of malloc.h
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def resident(field: str) -> int:
    """VmRSS, the memory this process has now, or VmHWM, the most it had, in bytes (Linux only)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def apart(module: str, function: str, *numbers: int) -> list[float]:
    """Result of a function in a separate process, so that its memory is measured alone."""
    program = f"from {module} import {function}; r = {function}{numbers}; print(*(r if isinstance(r, tuple) else (r,)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]
