"""Channel between a run and the process that watches it: a file of events, and a request to stop."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedshift.runs.events import Event

EVENTS, STOP = "events.jsonl", "enough"  # file names


class Channel:
    """A folder with one JSON line per event, read while it is written, and a file that requests the run to stop."""

    def __init__(self, folder: Path | str) -> None:
        self.file, self.stop_file = Path(folder) / EVENTS, Path(folder) / STOP
        self.position = 0  # in bytes

    def send(self, event: Event) -> None:
        with open(self.file, "ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")

    def receive(self) -> Iterator[Event]:
        """Yield the events since the last call."""
        if not self.file.exists():
            return
        with open(self.file, "rb") as file:
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.position += len(line)
                values: list[Any] = json.loads(line)
                yield Event(*values)

    @property
    def stop_requested(self) -> bool:
        return self.stop_file.exists()

    def request_stop(self) -> None:
        """Ask the run to stop after the current round."""
        self.stop_file.touch()
