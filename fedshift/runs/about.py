"""Machine, versions and commit of a run."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from fedshift import __version__


def machine() -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = f"{names[0]}, {len(names)} cores" if names else cpu
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]
    return gpu | {
        "cpu": cpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "fedshift": __version__,
        "commit": commit(),
        "command": " ".join(["fedshift", *sys.argv[1:]]),
    }


def commit() -> str:
    """Commit of the package, with a plus if files have changed; 'unknown' without a repository.

    The environment variable FEDSHIFT_COMMIT overrides it, for copies without a repository.
    """
    if override := os.environ.get("FEDSHIFT_COMMIT"):
        return override
    folder = Path(__file__).parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
