"""Processes that leave nothing behind, whatever happens to the one that started them.

Flower's processes start others, some in sessions of their own, and so does Ray. So each runs under a keeper: a small
process that adopts every descendant that loses its parent, and ends them all as soon as it is told to, or as soon as
the pipe to its starter closes, as it does at Ctrl-C, at an exception and at `kill -9` alike.

This file is the keeper as well: run by its path it needs nothing but the standard library, and is up at once.
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

GRACE = 5.0  # seconds a process gets to end by itself
STOP, KILL = b"s", b"k"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ADOPT = 36  # prctl(PR_SET_CHILD_SUBREAPER)


class ProcessError(RuntimeError):
    """What went wrong with a process, in a sentence and the end of its log."""


class Process:
    """A running command with all its descendants; what they say is in the file `log`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, scratch: str | None = None
    ) -> None:
        """Start; a log that is there already is continued, and the folder `scratch` is removed in the end."""
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
                start_new_session=True,  # Ctrl-C is for the starter, who decides what becomes of the rest
            )

    @property
    def code(self) -> int | None:
        """The exit code, once there is one; no descendant is left then."""
        return self.keeper.poll()

    def text(self) -> str:
        """What it said since this start, without colours."""
        return COLOUR.sub("", self.log.read_bytes()[self.began :].decode(errors="replace"))

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def wait(self, timeout: float) -> int | None:
        """The exit code, or None if it is still running after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.keeper.wait(timeout)
        return self.code

    def stop(self) -> None:
        """Ask it to end, and end what is left after the time of grace."""
        self._end(STOP)

    def kill(self) -> None:
        """As a crash would: at once, with all its descendants."""
        self._end(KILL)

    def _end(self, order: bytes) -> None:
        assert self.keeper.stdin is not None
        with suppress(OSError, ValueError):  # it has ended by itself, or was ended before
            self.keeper.stdin.write(order)
        self.keeper.stdin.close()
        self.keeper.wait()


def free_port() -> int:
    """A port of this machine that nobody uses, out of those that are not given to outgoing connections meanwhile."""
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
    """Until the process listens there; ProcessError if it ends before, or takes longer."""
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
    """Run the command until it ends or the starter says so, then end all its descendants; its exit code."""
    if (
        sys.platform == "linux"
    ):  # elsewhere orphans are not found, but Flower's processes watch their parents themselves
        ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)  # the pipe is the keeper's
    child = os.posix_spawnp(command[0], command, os.environ, file_actions=[nothing])
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
    return 128 - code if code is not None and code < 0 else code or 0  # -signal is told as a shell tells it


def _reap(child: int) -> int | None:
    """Take note of all that have ended; the exit code of the child if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def descendants(ancestor: int) -> list[int]:
    """The processes that it or one of its descendants started, zombies included."""
    parents = _parents()
    found = [ancestor]
    for pid in found:  # grows while we walk
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _parents() -> dict[int, int]:
    """Each process of this machine, and its parent."""
    if not Path("/proc/self/stat").exists():
        with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
            listed = [line.split() for line in ps.communicate()[0].splitlines()]
        return {int(pid): int(parent) for pid, parent in listed if int(pid) != ps.pid}
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended in the meantime
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


if __name__ == "__main__":
    sys.exit(keep(*sys.argv[1:]))
