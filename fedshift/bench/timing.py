"""Optional packages, and functions in separate processes."""

import importlib
import subprocess
import sys


def installed(package: str) -> bool:
    """True if an optional package and its dependencies can be imported."""
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def in_process(module: str, function: str, *numbers: int) -> list[float]:
    """Result of a function in a separate process, so that its memory is measured alone."""
    program = f"from {module} import {function}; r = {function}{numbers}; print(*(r if isinstance(r, tuple) else (r,)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]
