"""Processes that end with all their descendants, even if the process that started them is killed.

Flower and Ray start further processes, some of them in new sessions. So each command runs under a keeper: a small
process that adopts every orphaned descendant, and ends them all on request or when the pipe to its starter closes, as
it does after Ctrl-C, an exception or `kill -9`.

This file is also the program of the keeper: run by its path, it needs only the standard library and starts quickly.
"""

import ctypes
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE = 5.0  # seconds for a process to end after SIGTERM
STOP, KILL = b"s", b"k"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ADOPT = 36  # prctl(PR_SET_CHILD_SUBREAPER)


class ProcessError(RuntimeError):
    """A process failed; the message includes the end of its log."""


class Process:
    """A running command with all its descendants; their output is appended to the file `log`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, scratch: str | None = None
    ) -> None:
        """Start the command; append to an existing log, and remove the folder `scratch` at the end."""
        self.name, self.log = Path(command[0]).name, log
        with open(log, "ab") as file:
            self.began = file.tell()
            self.keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, scratch or "", *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C must reach only the starter
            )

    @property
    def code(self) -> int | None:
        """Exit code, None while the command or a descendant is running."""
        return self.keeper.poll()

    def text(self) -> str:
        """Output since this start, without colours."""
        return COLOUR.sub("", self.log.read_bytes()[self.began :].decode(errors="replace"))

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def wait(self, timeout: float) -> int | None:
        """Wait for the exit code; None if it is still running after `timeout` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.keeper.wait(timeout)
        return self.code

    def stop(self) -> None:
        """Send SIGTERM, and kill all remaining processes after the grace period."""
        self._end(STOP)

    def kill(self) -> None:
        """Kill it at once, with all its descendants."""
        self._end(KILL)

    def _end(self, command: bytes) -> None:
        assert self.keeper.stdin is not None
        with suppress(OSError, ValueError):  # it has already ended
            self.keeper.stdin.write(command)
        self.keeper.stdin.close()
        self.keeper.wait()


def free_port() -> int:
    """Return a free port, outside of the range for outgoing connections."""
    for port in random.SystemRandom().sample(range(20000, 32000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ProcessError("no port between 20000 and 32000 is free on 127.0.0.1")


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def wait_for_port(process: Process, port: int, timeout: float) -> None:
    """Wait until the process listens on a port; ProcessError if it ends before, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not answers(port):
        if process.code is not None:
            raise ProcessError(f"{process.name} ended while starting, see {process.log}:\n{process.tail()}")
        if time.monotonic() > deadline:
            raise ProcessError(
                f"{process.name} does not answer after {timeout:g} s, see {process.log}:\n{process.tail()}"
            )
        time.sleep(0.05)


# the keeper


def keep(scratch: str, *command: str) -> int:
    """Run the command until it ends or the starter requests it, end all its descendants, and return its exit code."""
    if sys.platform == "linux":  # elsewhere orphans are not found, but Flower's processes watch their parents
        ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)
    no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)  # the pipe is for the keeper only
    child = os.posix_spawnp(command[0], command, os.environ, file_actions=[no_input])
    code = None
    while code is None and not select.select([0], [], [], 0.05)[0]:
        code = _reap(child)
    if code is None and os.read(0, 1) != KILL:
        os.kill(child, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while code is None and time.monotonic() < deadline:
            code = _reap(child)
            time.sleep(0.02)
    while left := descendants(os.getpid()):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = _reap(child)
        code = ended if code is None else code
        time.sleep(0.02)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
    return 128 - code if code is not None and code < 0 else code or 0  # a signal as 128 + its number, like in a shell


def _reap(child: int) -> int | None:
    """Reap all ended processes; return the exit code of the child if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all descendants of a process, zombies included."""
    parents = _parents()
    found = [ancestor]
    for pid in found:  # the list grows during the loop
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _parents() -> dict[int, int]:
    """Return the parent of each process of this machine."""
    if not Path("/proc/self/stat").exists():
        with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
            listed = [line.split() for line in ps.communicate()[0].splitlines()]
        return {int(pid): int(parent) for pid, parent in listed if int(pid) != ps.pid}
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # the process has ended in the meantime
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


if __name__ == "__main__":
    sys.exit(keep(*sys.argv[1:]))
