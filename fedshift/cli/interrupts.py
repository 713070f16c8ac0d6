"""When to stop: somebody presses Ctrl-C, or the time is up."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event


class Enough:
    """Whether to stop after the round that is on: somebody asked for it, or the time is up."""

    def __init__(self, minutes: float | None) -> None:
        self.asked = Event()
        self.until = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def now(self) -> bool:
        return self.asked.is_set() or time.monotonic() >= self.until

    @property
    def code(self) -> int:
        """To exit with: an end that was planned is no failure."""
        return 130 if self.asked.is_set() else 0


@contextmanager
def interrupts(minutes: float | None = None) -> Iterator[Enough]:
    """Ctrl-C asks for an end after the round that is on, a second one for an end at once."""
    enough = Enough(minutes)

    def ask(*_: object) -> None:
        if enough.asked.is_set():
            raise KeyboardInterrupt
        enough.asked.set()
        # not through the display, which may be in the middle of something
        os.write(2, b"Stopping after this round; Ctrl-C once more stops at once.\n")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield enough
    finally:
        signal.signal(signal.SIGINT, before)
