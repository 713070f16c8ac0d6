"""Program that trains the task with one system and prints what it used: `python -m fedshift.bench.peers.runner`.

Every measurement is a separate process, so that the libraries, threads and memory of one system do not affect another.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from fedshift.bench.peers.systems import SYSTEMS
from fedshift.bench.peers.task import RoundResult
from fedshift.bench.peers.usage import adopt_orphans, kill_descendants, usage
from fedshift.core.memory import resident

WARM = 2  # rounds before the measured ones


class Request(NamedTuple):
    """Arguments of the program, as JSON."""

    system: str
    task: str
    rounds: int  # measured rounds
    begin: float  # time.monotonic() when the process was started
    model: str = ""  # file for the final model


class Measured(NamedTuple):
    """Output of the program, as JSON on its last line."""

    wall: float  # seconds per measured round
    cpu: float  # seconds of CPU time per measured round, of all processes
    startup: float  # seconds from the start of the process, without the time of its first rounds
    peak: int  # bytes of resident memory, of all processes
    bytes_up: float  # per measured round
    accuracy: list[float]  # after each round


class Meter:
    """Time and CPU time between the end of the warm-up and the end of the last round."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.results: list[RoundResult] = []

    def __call__(self, result: RoundResult) -> None:
        """Take the result of a round."""
        self.results.append(result._replace(params={}))
        if len(self.results) == WARM:
            self.cpu, self.began = usage(os.getpid()).seconds, time.monotonic()
        if len(self.results) == WARM + self.request.rounds:
            self.ended = time.monotonic()
            self.used = usage(os.getpid())
            if self.request.model:
                torch.save({name: x.detach().clone() for name, x in result.params.items()}, self.request.model)

    def measured(self) -> Measured:
        rounds = self.request.rounds
        wall = (self.ended - self.began) / rounds
        return Measured(
            wall=wall,
            cpu=(self.used.seconds - self.cpu) / rounds,
            startup=self.began - self.request.begin - WARM * wall,
            peak=max(self.used.resident, resident("VmHWM")),
            bytes_up=sum(result.bytes_up for result in self.results[WARM:]) / rounds,
            accuracy=[result.accuracy for result in self.results],
        )


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    adopt_orphans()
    torch.set_num_threads(1)
    meter = Meter(request)
    try:
        SYSTEMS[request.system].run(Path(request.task), WARM + request.rounds, meter)
    finally:
        kill_descendants(os.getpid())
    sys.stdout.write("\n" + json.dumps(meter.measured()._asdict()) + "\n")


if __name__ == "__main__":
    main()
