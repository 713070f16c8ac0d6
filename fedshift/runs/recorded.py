"""Read the record of a run, which may be complete, unfinished, published in short form, or damaged.

Damaged lines are skipped and counted. A run whose settings cannot be read is `Broken`.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedshift.core.files import RunError
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.engine import Histogram
from fedshift.runs.columns import column
from fedshift.runs.record import CLIENT_SCORES, ROUNDS, UPLINKS, about, finished, settings_of
from fedshift.runs.sheet import Figures, Sheet, Uploaded, layers, sheet, uploaded

CLIENTS, HISTOGRAMS = "clients.csv", "histograms.jsonl"
TEXT = {"failed", "group"}  # columns without numbers
T = TypeVar("T")


class ClientRecord(NamedTuple):
    number: int
    group: str
    examples: int
    labels: list[int]  # number of examples of each


class ClientScore(NamedTuple):
    """Scores of one client on its held-out examples."""

    round: int
    client: int
    group: str
    examples: int
    scores: dict[str, float]  # by column; NaN without a score


class Weights(NamedTuple):
    """Histogram of a layer's weights in one round."""

    round: int
    histogram: Histogram


class UplinkRecord(NamedTuple):
    """Uplink of one used upload, chosen by a policy."""

    round: int
    client: int
    codec: str
    bytes: int
    bits: float  # per value


class Broken(NamedTuple):
    """Run that cannot be read, and the reason."""

    folder: Path
    problem: str


@dataclass(frozen=True, eq=False)
class Recorded:
    """Record of a run; figures that were not measured are NaN."""

    folder: Path
    experiment: Experiment
    about: dict[str, Any]
    rounds: NDArray[np.int64]  # (n,) in ascending order
    figures: dict[str, Figures]  # (n,) by column
    clients: list[ClientRecord]
    weights: list[Weights]
    uplinks: list[UplinkRecord]  # [] without an uplink policy
    lost: dict[str, int]  # number of damaged lines, by file
    ended: bool  # the final model is complete
    client_scores: list[ClientScore] = field(default_factory=list)  # of the last evaluation for each client

    @property
    def reached(self) -> int:
        """Last recorded round, 0 for none."""
        return int(self.rounds[-1]) if len(self.rounds) else 0

    @property
    def finished(self) -> bool:
        """True if the run has a final model or all of its rounds; a published record has no model."""
        return bool(self.reached) and (self.ended or self.reached == self.experiment.train.rounds)

    @property
    def missing(self) -> int:
        """Number of rounds without a line up to the last one, or up to the end if the run is finished."""
        return (self.experiment.train.rounds if self.finished else self.reached) - len(self.rounds)

    def figure(self, name: str) -> Figures:
        """Values of a column; all NaN if it was not recorded."""
        found = self.figures.get(name)
        return np.full(len(self.rounds), math.nan) if found is None else found

    @cached_property
    def evaluated(self) -> NDArray[np.bool_]:
        """(n,) rounds with an evaluation; its loss or score may be NaN."""
        evaluated: NDArray[np.bool_] = ~np.isnan(self.scores) | ~np.isnan(self.figure("loss"))
        return evaluated

    @property
    def scores(self) -> Figures:
        return self.figure(column(self.experiment))

    @property
    def up(self) -> Figures:
        """(n,) bytes that all clients sent in a round; 0 where the record has no finite value."""
        return self.uploaded.up

    @cached_property
    def uploaded(self) -> Uploaded:
        return uploaded(self.figures, len(self.rounds))

    @property
    def down(self) -> Figures:
        """(n,) bytes that all clients received in a round; NaN if not recorded."""
        return self.figure("bytes.down")

    def layers(self, figure: str) -> list[str]:
        """Names of the layers for which a figure is recorded."""
        return layers(self.figures, figure)


def recorded(folder: Path) -> Recorded | Broken:
    """Read the record of a run as far as it is readable."""
    try:
        experiment = settings_of(folder)
        rounds = sheet(folder / ROUNDS)
        if "round" not in rounds.header:
            raise RunError(f"{rounds.path}: the first line contains no column named round")
    except (RunError, SettingsError) as problem:
        return Broken(folder, str(problem))
    numbers, figures = _by_round(rounds, experiment.train.rounds)
    clients, clients_lost = _clients(folder / CLIENTS)
    weights, weights_lost = _weights(folder / HISTOGRAMS)
    scores, scores_lost = _client_scores(folder / CLIENT_SCORES)
    uplinks, uplinks_lost = _uplinks(folder / UPLINKS)
    lost = {ROUNDS: rounds.lost + len(rounds.lines) - len(numbers), CLIENTS: clients_lost, HISTOGRAMS: weights_lost}
    lost |= {CLIENT_SCORES: scores_lost, UPLINKS: uplinks_lost}
    return Recorded(
        folder=folder,
        experiment=experiment,
        about=about(folder),
        rounds=numbers,
        figures=figures,
        clients=clients,
        weights=weights,
        uplinks=uplinks,
        lost={name: count for name, count in lost.items() if count},
        ended=finished(folder),
        client_scores=scores,
    )


def _by_round(rounds: Sheet, most: int) -> tuple[NDArray[np.int64], dict[str, Figures]]:
    """Rounds in ascending order and values by column; lines with invalid numbers and repeated rounds are skipped."""
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


def _clients(path: Path) -> tuple[list[ClientRecord], int]:
    """Clients, [] if they are not recorded, and the number of damaged lines."""

    def client(cells: list[str], header: list[str]) -> ClientRecord:
        number, group, examples, *labels = cells
        return ClientRecord(int(number), group, int(examples), [int(count) for count in labels])

    return _records(path, client)


def _client_scores(path: Path) -> tuple[list[ClientScore], int]:
    """Scores of clients, [] if they are not recorded, and the number of damaged lines."""

    def score(cells: list[str], header: list[str]) -> ClientScore:
        number, client, group, examples, *scores = cells
        values = [float(score) if score else math.nan for score in scores]
        named = dict(zip(header[4:], values, strict=True))
        return ClientScore(int(number), int(client), group, int(examples), named)

    return _records(path, score)


def _uplinks(path: Path) -> tuple[list[UplinkRecord], int]:
    """Uplinks that a policy chose, [] if there is none, and the number of damaged lines."""

    def uplink(cells: list[str], header: list[str]) -> UplinkRecord:
        number, client, codec, length, bits = cells
        used = UplinkRecord(int(number), int(client), codec, int(length), float(bits))
        if used.round <= 0 or used.client < 0 or used.bytes < 0 or not 0 <= used.bits < math.inf:
            raise ValueError(f"{used}: is damaged")
        return used

    return _records(path, uplink)


def _records(path: Path, parse: Callable[[list[str], list[str]], T]) -> tuple[list[T], int]:
    """Lines of a file, parsed from cells and header, and the number of those for which that raises ValueError."""
    if not path.exists():
        return [], 0
    try:
        lines = sheet(path)
    except RunError:
        return [], 1
    found = []
    for cells in lines.lines:
        with suppress(ValueError):
            found.append(parse(cells, lines.header))
    return found, lines.lost + len(lines.lines) - len(found)


def _weights(path: Path) -> tuple[list[Weights], int]:
    """Histograms, [] if there are none, and the number of damaged lines."""
    try:
        content = path.read_bytes()
    except OSError:
        return [], int(path.exists())
    lines = content.split(b"\n")
    found = [weights for line in lines if line and (weights := _histogram(line))]
    return found, sum(1 for line in lines if line) - len(found)


def _histogram(line: bytes) -> Weights | None:
    try:
        content = json.loads(line)
        low, high = float(content["low"]), float(content["high"])
        counts = [[int(n) for n in content[name]] for name in ("before", "after")]
        if not (math.isfinite(high - low) and low <= high and counts[0] and len(counts[0]) == len(counts[1])):
            return None
        return Weights(int(content["round"]), Histogram(str(content["layer"]), low, high, *counts))
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
