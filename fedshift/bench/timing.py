"""Timing on a busy machine: CPU time, repeats interleaved, medians."""

import ctypes
import importlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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


def fresh_memory() -> None:
    """Have the C library, where it is glibc, give large arrays new pages and take them back at once."""
    mmap_threshold = -3  # of malloc.h
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


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
