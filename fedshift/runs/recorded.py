"""A run's record as it is found: whole, unfinished, published in short, or damaged here and there.

A damaged line is lost, not the file; settings that cannot be read make the run a broken one.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift.core.files import RunError
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.engine import Histogram
from fedshift.runs.columns import ESTIMATES, column
from fedshift.runs.record import ROUNDS, about, finished, settings_of

CLIENTS, HISTOGRAMS = "clients.csv", "histograms.jsonl"
PARTS, TOTAL = ("bytes.codes", "bytes.side", "bytes.header"), "bytes.up"  # a published record has but their sum
TEXT = {"failed", "group"}  # columns that hold no numbers
DAMAGE = "\0", "\ufffd"  # what is no text leaves these

Figures = NDArray[np.float64]


class Sheet(NamedTuple):
    """A CSV file, line by line; lines that are not whole are left out and counted."""

    path: Path
    header: list[str]
    lines: list[list[str]]
    lost: int

    def column(self, name: str) -> list[float]:
        """The measured values, line after line; lines without one are left out. RunError where it is no number."""
        return [value for value in self.values(name) if value is not None]

    def uploaded(self) -> "Uploaded":
        """Bytes sent in each line's round."""
        names = [name for name in (*PARTS, TOTAL, *ESTIMATES) if name in self.header]
        figures = {name: np.array(self.values(name), dtype=np.float64) for name in names}
        return uploaded(figures, len(self.lines))

    def values(self, name: str) -> list[float | None]:
        """A value for each line, None where nothing was measured. RunError where it is no number."""
        if name not in self.header:
            raise RunError(f"{self.path}: has no column {name}")
        place = self.header.index(name)
        try:
            return [float(cells[place]) if cells[place] else None for cells in self.lines]
        except ValueError:
            raise RunError(f"{self.path}: {name}: holds something that is no number") from None


class Estimate(NamedTuple):
    """Number of rounds of a run whose uploaded bytes are estimates, and what they are multiplied by."""

    rounds: int  # in all
    estimated: int  # of which the bytes are estimates, times the ratio
    framed: int  # in which real frames were made to check the estimate
    ratio: float  # real over estimated bytes in those; 1 where there are none


class Uploaded(NamedTuple):
    """Uploaded bytes of a run, corrected where they are estimates."""

    up: Figures  # (n,) bytes that all clients sent in a round
    correction: Figures  # (n,) what the ratio changed of it
    estimate: Estimate


def uploaded(figures: Mapping[str, Figures], rounds: int) -> Uploaded:
    """Bytes sent in each round: those that are estimates times sum(framed) / sum(estimated) of the framed rounds.

    Bytes that are no number count as none.

    >>> found = {"bytes.up": [98, 200], "bytes.estimated": [100, 200], "bytes.framed": [98, math.nan]}
    >>> sent = uploaded({name: np.array(values) for name, values in found.items()}, 2)
    >>> sent.up.tolist(), sent.estimate
    ([98.0, 196.0], Estimate(rounds=2, estimated=1, framed=1, ratio=0.98))
    """
    nothing = np.full(rounds, math.nan)
    names = (TOTAL,) if TOTAL in figures else PARTS
    sums = sum((figures.get(name, nothing) for name in names), np.zeros(rounds))
    sums = np.where(np.isfinite(sums), sums, 0.0)
    estimated, framed = (figures.get(name, nothing) for name in ESTIMATES)
    both, only = np.isfinite(estimated) & np.isfinite(framed), np.isfinite(estimated) & np.isnan(framed)
    real, guessed = float(framed[both].sum()), float(estimated[both].sum())
    ratio = real / guessed if guessed > 0 and 0 < real / guessed < math.inf else 1.0
    correction = np.where(only, (ratio - 1) * sums, 0.0)
    return Uploaded(sums + correction, correction, Estimate(rounds, int(only.sum()), int(both.sum()), ratio))


def estimates(runs: Iterable[Estimate]) -> str:
    """A sentence on how the uploaded bytes of some runs were estimated; '' where none were.

    >>> estimates([Estimate(100, 98, 2, 1.0012), Estimate(100, 98, 2, 1.0031), Estimate(100, 0, 0, 1.0)])
    'Uploaded bytes of 196 of 300 rounds are estimated from counts of codes, times 1.0012 to 1.0031, the ratio of \
real frames to estimates measured in 4 rounds.'
    """
    runs = list(runs)
    some = [one for one in runs if one.estimated]
    if not some:
        return ""
    framed = sum(one.framed for one in some)
    ends = list(dict.fromkeys(f"{end([one.ratio for one in some]):.5g}" for end in (min, max)))
    which = f"Uploaded bytes of {sum(one.estimated for one in some)} of {sum(one.rounds for one in runs)} rounds"
    how = f"times {' to '.join(ends)}, the ratio of real frames to estimates measured in {framed} round"
    if not framed:
        return f"{which} are estimated from counts of codes, and no real frames were made to check them."
    return f"{which} are estimated from counts of codes, {how}{'s' * (framed > 1)}."


def sheet(path: Path) -> Sheet:
    """The whole lines of a CSV file; the last one is whole when it is ended."""
    try:
        first, *lines = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    except OSError as problem:
        raise RunError(f"{path}: cannot be read: {problem.strerror}") from None
    header = _cells(first)
    cut = lines.pop() if lines else first
    split = [_cells(line) for line in lines if not any(sign in line for sign in DAMAGE)]
    whole = [cells for cells in split if len(cells) == len(header)]
    return Sheet(path, header, whole, len(lines) - len(whole) + bool(cut))


def _cells(line: str) -> list[str]:
    """Line by line, so that a stray quotation mark swallows no other."""
    line = line.removesuffix("\r")
    try:
        return next(csv.reader([line]), []) if '"' in line else line.split(",")
    except csv.Error:
        return []


class Client(NamedTuple):
    number: int
    group: str
    examples: int
    labels: list[int]  # examples of each


class Weights(NamedTuple):
    """A layer's weights in one round."""

    round: int
    histogram: Histogram


class Broken(NamedTuple):
    """A run of which nothing can be told but why."""

    folder: Path
    problem: str


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a run has recorded; figures are NaN where nothing was measured."""

    folder: Path
    experiment: Experiment
    about: dict[str, Any]
    rounds: NDArray[np.int64]  # (n,) in order
    figures: dict[str, Figures]  # (n,) by column
    clients: list[Client]
    weights: list[Weights]
    lost: dict[str, int]  # damaged lines, by file
    ended: bool  # its model is there

    @property
    def reached(self) -> int:
        """The last round."""
        return int(self.rounds[-1]) if len(self.rounds) else 0

    @property
    def finished(self) -> bool:
        """What is published of a run has no model, but all of its rounds."""
        return bool(self.reached) and (self.ended or self.reached == self.experiment.train.rounds)

    @property
    def missing(self) -> int:
        """Rounds without a line although later ones, or a model, are there."""
        return (self.experiment.train.rounds if self.finished else self.reached) - len(self.rounds)

    def figure(self, name: str) -> Figures:
        """A column, NaN throughout where it was not recorded."""
        found = self.figures.get(name)
        return np.full(len(self.rounds), math.nan) if found is None else found

    @cached_property
    def evaluated(self) -> NDArray[np.bool_]:
        """(n,) whether the model was; a loss or a metric of one's own may be NaN all the same."""
        evaluated: NDArray[np.bool_] = ~np.isnan(self.scores) | ~np.isnan(self.figure("loss"))
        return evaluated

    @property
    def scores(self) -> Figures:
        return self.figure(column(self.experiment))

    @property
    def up(self) -> Figures:
        """Bytes all clients of a round sent, none where that is no number; what is published has them in one sum."""
        return self.uploaded.up

    @cached_property
    def uploaded(self) -> Uploaded:
        return uploaded(self.figures, len(self.rounds))

    @property
    def down(self) -> Figures:
        """Bytes that all clients of a round received, NaN where that was not recorded."""
        return self.figure("bytes.down")

    def layers(self, figure: str) -> list[str]:
        """The layers a figure is recorded for."""
        return [name.removeprefix(f"{figure}.") for name in self.figures if name.startswith(f"{figure}.")]


def recorded(folder: Path) -> Recorded | Broken:
    """All that can be read of a run."""
    try:
        experiment = settings_of(folder)
        rounds = sheet(folder / ROUNDS)
        if "round" not in rounds.header:
            raise RunError(f"{rounds.path}: its first line names no columns")
    except (RunError, SettingsError) as problem:
        return Broken(folder, str(problem))
    numbers, figures = _by_round(rounds, experiment.train.rounds)
    clients, clients_lost = _clients(folder / CLIENTS)
    weights, weights_lost = _weights(folder / HISTOGRAMS)
    lost = {ROUNDS: rounds.lost + len(rounds.lines) - len(numbers), CLIENTS: clients_lost, HISTOGRAMS: weights_lost}
    return Recorded(
        folder=folder,
        experiment=experiment,
        about=about(folder),
        rounds=numbers,
        figures=figures,
        clients=clients,
        weights=weights,
        lost={name: count for name, count in lost.items() if count},
        ended=finished(folder),
    )


def _by_round(rounds: Sheet, most: int) -> tuple[NDArray[np.int64], dict[str, Figures]]:
    """The lines that are all numbers, by column, in the order of their rounds, each round once."""
    places = [i for i, name in enumerate(rounds.header) if name not in TEXT]
    place = rounds.header.index("round")
    found: dict[int, list[float]] = {}
    for cells in rounds.lines:
        try:
            number = int(cells[place])
            values = [float(cells[i]) if cells[i] else math.nan for i in places]
        except ValueError:
            continue
        if 1 <= number <= most:
            found.setdefault(number, values)
    ordered = sorted(found)
    table = np.array([found[number] for number in ordered], dtype=np.float64).reshape(len(ordered), len(places))
    columns = {rounds.header[i]: table[:, j] for j, i in enumerate(places)}
    return np.array(ordered, dtype=np.int64), columns


def _clients(path: Path) -> tuple[list[Client], int]:
    """The clients, none where that is not recorded, and how many lines are lost."""
    if not path.exists():
        return [], 0
    try:
        lines = sheet(path)
    except RunError:
        return [], 1
    found = []
    for cells in lines.lines:
        try:
            number, group, examples, *labels = cells
            found.append(Client(int(number), group, int(examples), [int(count) for count in labels]))
        except ValueError:
            continue
    return found, lines.lost + len(lines.lines) - len(found)


def _weights(path: Path) -> tuple[list[Weights], int]:
    """The histograms, none where none are recorded, and how many lines are lost."""
    try:
        content = path.read_bytes()
    except OSError:
        return [], int(path.exists())
    lines = content.split(b"\n")
    found = [made for line in lines if line and (made := _histogram(line))]
    return found, sum(1 for line in lines if line) - len(found)


def _histogram(line: bytes) -> Weights | None:
    try:
        told = json.loads(line)
        low, high = float(told["low"]), float(told["high"])
        counts = [[int(n) for n in told[name]] for name in ("before", "after")]
        if not (math.isfinite(high - low) and low <= high and counts[0] and len(counts[0]) == len(counts[1])):
            return None
        return Weights(int(told["round"]), Histogram(str(told["layer"]), low, high, *counts))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
