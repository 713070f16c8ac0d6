"""Events in a file that grows: lines of JSON, read while they are written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedshift.runs.events import Event

EVENTS, ENOUGH = "events.jsonl", "enough"


class Desk:
    """A folder between a run and whoever watches it: events go one way, the wish to stop goes the other."""

    def __init__(self, folder: Path | str) -> None:
        self.file, self.wish = Path(folder) / EVENTS, Path(folder) / ENOUGH
        self.read = 0  # bytes

    def say(self, event: Event) -> None:
        with open(self.file, "ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")

    def heard(self) -> Iterator[Event]:
        """What was said since the last time."""
        if not self.file.exists():
            return
        with open(self.file, "rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.read += len(line)
                told: list[Any] = json.loads(line)
                yield Event(*told)

    @property
    def enough(self) -> bool:
        return self.wish.exists()

    def stop(self) -> None:
        """Ask for an end after the round that is on."""
        self.wish.touch()
