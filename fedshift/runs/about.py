"""What a figure was measured on."""

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
    """The commit this package is run from, with a plus where files have changed; 'unknown' when installed.

    A copy without its repository is told by FEDSHIFT_COMMIT.
    """
    if told := os.environ.get("FEDSHIFT_COMMIT"):
        return told
    here = Path(__file__).parent
    try:
        described = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
