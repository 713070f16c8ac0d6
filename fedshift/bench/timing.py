"""Timing on a busy machine: CPU time, repeats interleaved, medians."""

import ctypes
import importlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

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


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def memory(kept: bool = False) -> bool:
    """Fix what the C library does with large arrays, where it is glibc: new pages for each, or pages kept for the next.

    Left alone, it does the one or the other depending on what ran before, and the same copy takes
    one time or three times as long. New pages are the default: a client encodes once a round, in
    memory that it has not just used.
    """
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # numbers of malloc.h
    settings = {mmap_max: 0, trim_threshold: 1 << 30} if kept else {mmap_threshold: 1 << 22}
    try:
        return all(ctypes.CDLL(None).mallopt(option, value) for option, value in settings.items())
    except (OSError, AttributeError):
        return False


def machine() -> dict[str, str]:
    """What a figure was measured on."""
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{names[0]}, {len(names)} cores" if names else cpu
    return {
        "cpu": cpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(["fedshift", *sys.argv[1:]]),
    }


def commit() -> str:
    """The commit this package is run from, with a plus where files have changed; 'unknown' when installed."""
    here = Path(__file__).parent
    try:
        described = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
