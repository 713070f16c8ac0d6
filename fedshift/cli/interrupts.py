"""Requests to stop: Ctrl-C or a time limit."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event


class StopRequest:
    """A request to stop after the current round, by Ctrl-C or because the time is up."""

    def __init__(self, minutes: float | None) -> None:
        self.asked = Event()
        self.until = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def now(self) -> bool:
        return self.asked.is_set() or time.monotonic() >= self.until

    @property
    def code(self) -> int:
        """Exit code: 130 after Ctrl-C, 0 after a time limit."""
        return 130 if self.asked.is_set() else 0


@contextmanager
def interrupts(minutes: float | None = None) -> Iterator[StopRequest]:
    """Stop after the current round on Ctrl-C, and at once on a second one."""
    request = StopRequest(minutes)

    def ask(*_: object) -> None:
        if request.asked.is_set():
            raise KeyboardInterrupt
        request.asked.set()
        # not through the display, which may be in the middle of a write
        os.write(2, b"Stopping after this round; press Ctrl-C again to stop at once.\n")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)
