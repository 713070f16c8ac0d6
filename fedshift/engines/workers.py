"""Worker processes: one end of a pipe here, the other in a process that lives until this end is closed."""

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import torch

# a forked worker has everything its parent has, even what was written in a notebook; a spawned one is sent it, and
# begins by running the user's script once more, which not every script is written for
FORKS = sys.platform == "linux"
_ours: "set[Connection[Any, Any]]" = set()  # our ends of all pipes, which every fork copies


def start(work: Callable[..., None], *given: Any, daemon: bool = True) -> "tuple[Any, Connection[Any, Any]]":
    """A process that does work(connection, *given), and our end of its connection."""
    context: Any = multiprocessing.get_context("fork" if FORKS else "spawn")
    ours, theirs = context.Pipe()
    _ours.add(ours)
    copies = list(_ours) if FORKS else []
    process = context.Process(target=_live, args=(theirs, os.getpid(), copies, work, given), daemon=daemon)
    with warnings.catch_warnings():  # of Python 3.12, on forking with threads about: no worker takes a lock of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def close(connection: "Connection[Any, Any]") -> None:
    """Which ends the worker."""
    _ours.discard(connection)
    with suppress(OSError):
        connection.close()


def _end_with_parent(parent: int) -> None:
    """End this process as soon as its parent is gone, whatever it is doing: it may hold a lock, or compute for hours.

    The parent's sentinel reports its end at once, unless another fork holds a copy of it; then the new parent does. The
    kernel's own signal for this would come with the end of the thread that made the fork, not of the process.
    """
    process = multiprocessing.parent_process()
    sentinels = [process.sentinel] if process else []
    while not wait(sentinels, timeout=1.0) and os.getppid() == parent:
        pass
    os._exit(1)


def _live(
    server: "Connection[Any, Any]",
    parent: int,
    copies: "list[Connection[Any, Any]]",
    work: Callable[..., None],
    given: Any,
) -> None:
    """`copies` are a fork's copies of our ends of pipes: open here, they would hide that the server is gone."""
    for connection in copies:
        connection.close()
    Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the server is gone
        work(server, *given)
