"""Timing on a busy machine: CPU time, repeats interleaved, medians."""

import ctypes
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median

Job = Callable[[], object]


def medians(jobs: Mapping[str, Job], repeats: int, tick: Callable[[str], None] = lambda name: None) -> dict[str, float]:
    """Median CPU seconds of each job; every repeat runs all of them, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for repeat in range(repeats + 1):
        for name, job in jobs.items():
            tick(name)
            start = time.process_time()
            job()
            if repeat:
                times[name].append(time.process_time() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def installed(package: str) -> bool:
    """Whether an optional package can be imported: one that misses something of its own cannot."""
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
    """What a function gives in a process of its own, so that its memory is its own."""
    program = f"from {module} import {function}; r = {function}{numbers}; print(*(r if isinstance(r, tuple) else (r,)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]
