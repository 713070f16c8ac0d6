"""Worker processes, each connected by a pipe; a worker ends when the server closes its end of the pipe."""

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

# a forked worker has all objects of its parent, including those defined in a notebook; a spawned one receives pickles,
# and first runs the user's script again, which not every script supports
FORKS = sys.platform == "linux"
_ours: "set[Connection[Any, Any]]" = set()  # the server's ends of all pipes, which every fork copies


def start(work: Callable[..., None], *args: Any, daemon: bool = True) -> "tuple[Any, Connection[Any, Any]]":
    """Start a process that runs work(connection, *args); return it and the server's end of the connection."""
    context: Any = multiprocessing.get_context("fork" if FORKS else "spawn")
    ours, theirs = context.Pipe()
    _ours.add(ours)
    copies = list(_ours) if FORKS else []
    process = context.Process(target=_live, args=(theirs, os.getpid(), copies, work, args), daemon=daemon)
    with warnings.catch_warnings():  # of Python 3.12, about forking with threads: workers use none of their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def close(connection: "Connection[Any, Any]") -> None:
    """Close the server's end of a connection, which ends the worker."""
    _ours.discard(connection)
    with suppress(OSError):
        connection.close()


def _end_with_parent(parent: int) -> None:
    """End this process as soon as its parent has ended, even if it holds a lock or computes for hours.

    The parent's sentinel reports its end at once, unless another fork has a copy of it; then a new parent id shows it.
    The kernel's signal for this (PR_SET_PDEATHSIG) is sent when the thread that forked ends, not the process.
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
    args: Any,
) -> None:
    """Run a worker; `copies`, a fork's copies of the server's ends of pipes, would hide that the server has ended."""
    for connection in copies:
        connection.close()
    Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the server has ended
        work(server, *args)
