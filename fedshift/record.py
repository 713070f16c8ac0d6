"""The run directory: what ran, one line a round, and the model at the end.

settings.toml       every setting, defaults included; `fedshift run settings.toml` repeats the run
about.json          versions, commit, machine, command; the names of the tensors that are shifted
clients.csv         once: each client's group, examples and labels
rounds.csv          one line a round, six significant digits
histograms.jsonl    every so often: a layer's weights before and after the quantizer
tensorboard/, wandb/, tracked.*.json    with --track: what trackers were told, and which run of theirs it is
checkpoint.*, memory/   the state to go on from, until the run is finished
model.safetensors   the final model; a run that has it is finished
report.html         the page to look at, written when the command ends
"""

import csv
import io
import json
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save

from fedshift.columns import client_header, client_rows, header, row
from fedshift.federation import Federation, Outcome
from fedshift.files import LOCK, Lock, RunError, no_link, write
from fedshift.settings import Experiment
from fedshift.types import Params

SETTINGS, SWEEP, ABOUT, MODEL = "settings.toml", "sweep.toml", "about.json", "model.safetensors"


class Folder:
    """A run directory that nobody else writes to while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.rounds = self.path / "rounds.csv"
        self.histograms = self.path / "histograms.jsonl"
        self.model = self.path / MODEL
        self.known = (self.path / LOCK).exists()  # whether a run or a sweep was begun here before
        self._lock = Lock(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    @property
    def begun(self) -> bool:
        """Whether it holds a run or a sweep."""
        return any((self.path / name).exists() for name in (SETTINGS, SWEEP))

    @property
    def foreign(self) -> str:
        """The name of something that is no run's, '' for none; a run killed at its start leaves what is its own."""
        others = sorted(path.name for path in self.path.iterdir() if path.name != LOCK)
        return others[0] if others and not self.known else ""

    def leave(self) -> None:
        """Go as if never here."""
        if not self.known:
            (self.path / LOCK).unlink(missing_ok=True)
        self.close()

    def begin(self, experiment: Experiment, fed: Federation, about: dict[str, Any]) -> None:
        """What is known before the first round; settings.toml comes last, because it makes the folder a run's."""
        write(self.path / ABOUT, json.dumps(about, indent=2).encode() + b"\n")
        write(self.path / "clients.csv", _lines([client_header(fed), *client_rows(fed)]))
        write(self.rounds, _lines([header(experiment, fed)]))
        write(self.path / SETTINGS, experiment.toml().encode())

    def recorded(self) -> int:
        """Whole lines of the record, from round 1 on without a gap."""
        return len(self._whole_lines())

    def rewind(self, number: int) -> None:
        """Forget what was recorded after round `number`."""
        first = self._text().partition("\n")[0]
        write(self.rounds, "".join(line + "\n" for line in [first, *self._whole_lines()[:number]]).encode())
        if self.histograms.exists():
            kept = [line for line in self.histograms.read_text().splitlines() if _round_of(line) <= number]
            write(self.histograms, "".join(line + "\n" for line in kept).encode())

    def add(self, experiment: Experiment, fed: Federation, outcome: Outcome) -> None:
        self._append(self.rounds, _lines([row(experiment, fed, outcome)]))
        if outcome.histograms:
            told = [json.dumps({"round": outcome.number} | h._asdict()) + "\n" for h in outcome.histograms]
            self._append(self.histograms, "".join(told).encode())

    def finish(self, params: Params) -> None:
        """The model; what was only there to go on from goes."""
        tensors = {name: x.clone(memory_format=torch.contiguous_format) for name, x in params.items()}
        write(self.model, save(tensors), sync=True)
        self.tidy()

    def tidy(self) -> None:
        """Without what was only there to go on from."""
        for path in self.path.glob("checkpoint.*.*.safetensors*"):
            path.unlink()
        for path in (self.path / "memory").glob("*.*.*.safetensors*"):
            path.unlink()
        with suppress(OSError):  # it is not there, or somebody else keeps something in it
            (self.path / "memory").rmdir()

    def _append(self, path: Path, content: bytes) -> None:
        try:
            with open(path, "ab", buffering=0, opener=no_link) as file:
                before = os.fstat(file.fileno()).st_size
                if file.write(content) != len(content):
                    file.truncate(before)
                    raise OSError(28, "No space left on device")
        except OSError as problem:
            raise RunError(f"{path}: cannot be written: {problem.strerror or problem}") from None

    def _text(self) -> str:
        try:
            return self.rounds.read_text(encoding="utf-8", errors="replace")
        except OSError as problem:
            raise RunError(f"{self.rounds}: cannot be read: {problem.strerror}") from None

    def _whole_lines(self) -> list[str]:
        first, *lines = self._text().split("\n")
        whole, columns = [], len(_cells(first))
        for number, line in enumerate(lines[:-1], 1):
            cells = _cells(line)
            if len(cells) != columns or cells[0] != str(number):
                break
            whole.append(line)
        return whole


def begun(path: Path) -> bool:
    """Whether there is a run in a folder."""
    return (path / SETTINGS).exists()


def finished(path: Path) -> bool:
    return (path / MODEL).exists()


def about(folder: Path) -> dict[str, Any]:
    """Versions, commit and machine; nothing where that cannot be read."""
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(rows: Iterable[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _round_of(line: str) -> float:
    try:
        return float(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return math.inf
