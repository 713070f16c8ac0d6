"""Finished runs, read from run directories or published records, grouped by cell."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fedshift.core.files import RunError
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import dotted, merge, read
from fedshift.paper.experiments import BASE, Cell, settings
from fedshift.runs.columns import column
from fedshift.runs.record import ROUNDS, SETTINGS, about
from fedshift.runs.sheet import PARTS, Sheet, Uploaded, sheet
from fedshift.runs.summary import WINDOW


class FinishedRun:
    """Finished run: its settings, its machine, and one line per round."""

    def __init__(self, folder: Path, rounds: int | None = None) -> None:
        """`rounds`: number of rounds to read from the start (default: all)."""
        self.folder, self.rounds = folder, rounds
        self.experiment = Experiment(**read(folder / SETTINGS))
        self._columns: dict[str, list[float]] = {}

    @cached_property
    def _sheet(self) -> Sheet:
        found = sheet(self.folder / ROUNDS)
        if len(found.lines) != self.experiment.train.rounds:
            raise RunError(
                f"{self.folder}: contains {len(found.lines)} of {self.experiment.train.rounds} rounds; "
                "the run is not finished"
            )
        return found._replace(lines=found.lines[: self.rounds])

    @property
    def lines(self) -> list[dict[str, str]]:
        return [dict(zip(self.header, cells, strict=True)) for cells in self._sheet.lines]

    @property
    def about(self) -> dict[str, Any]:
        return about(self.folder)

    @property
    def header(self) -> list[str]:
        return self._sheet.header

    def column(self, name: str) -> list[float]:
        """Measured values in order of rounds; rounds without a value are left out."""
        if name not in self._columns:
            self._columns[name] = self._sheet.column(name)
        return self._columns[name]

    def series(self, name: str) -> dict[int, float]:
        """Measured values by round; rounds without a value are left out."""
        return self._sheet.by_round(name)

    @property
    def uploaded(self) -> Uploaded:
        """Bytes uploaded in each round; estimates are corrected."""
        return self._sheet.uploaded()

    def layers(self, figure: str) -> list[str]:
        """Layers for which a figure is recorded."""
        return self._sheet.layers(figure)

    @property
    def scores(self) -> list[float]:
        """Accuracy in percent, per evaluated round."""
        return [100 * score for score in self.column(column(self.experiment))]

    @property
    def last(self) -> float:
        return self.scores[-1]

    @property
    def score(self) -> float:
        """Mean of the last ten evaluated rounds."""
        return statistics.fmean(self.scores[-WINDOW:])


class Results:
    """Records by cell and seed. A cell that was not run has none.

    `short` are runs with fewer rounds than their cell, each with the first rounds of the full run.
    """

    def __init__(
        self,
        records: Mapping[str, Mapping[int, FinishedRun]],
        short: Sequence[tuple[FinishedRun, FinishedRun]] = (),
    ) -> None:
        self.records, self.short = records, short

    def of(self, cell: Cell) -> dict[int, FinishedRun]:
        return dict(self.records.get(cell.name, {}))

    def scores(self, cell: Cell) -> dict[int, float]:
        """Scores by seed."""
        return {seed: record.score for seed, record in sorted(self.of(cell).items())}

    def mean(self, cell: Cell) -> float | None:
        scores = self.scores(cell).values()
        return statistics.fmean(scores) if scores else None

    @property
    def all(self) -> list[FinishedRun]:
        return [record for seeds in self.records.values() for record in seeds.values()]


def published(
    folder: Path, cells: Iterable[Cell], base: Mapping[str, Any] = BASE, rounds: int | None = None
) -> tuple[Results, list[str]]:
    """Results in a folder of published records, and the names of records that belong to none of the cells."""
    known = {identity(Experiment(**merge(base, settings(cell, 0, rounds)))): cell for cell in cells}
    found: dict[str, dict[int, FinishedRun]] = {}
    others: list[FinishedRun] = []
    for path in sorted(folder.glob(f"*/{SETTINGS}")):
        record = FinishedRun(path.parent)
        cell = known.get(identity(record.experiment))
        if cell is None:
            others.append(record)
            continue
        seeds = found.setdefault(cell.name, {})
        if (seed := record.experiment.seed) in seeds:
            raise RunError(f"{path.parent}: is the same run as {seeds[seed].folder}; remove one of them")
        seeds[seed] = record
    full = {(without_rounds(run), run.experiment.seed): run for seeds in found.values() for run in seeds.values()}
    pairs = [(run, full.get((without_rounds(run), run.experiment.seed))) for run in others]
    short = [(run, FinishedRun(other.folder, run.experiment.train.rounds)) for run, other in pairs if other]
    return Results(found, short), [run.folder.name for run, other in pairs if not other]


def bytes_per_upload(runs: Iterable[FinishedRun]) -> list[float]:
    """Mean bytes of an upload in codes, side data and header, over rounds and runs; zeros without runs.

    Records from before these columns are left out.
    """
    known = [run for run in runs if set(PARTS) <= set(run.header)]
    sent = [[statistics.fmean(run.column(part)) / run.experiment.train.cohort for part in PARTS] for run in known]
    return [statistics.fmean(part) for part in zip(*sent, strict=True)] if sent else [0.0] * len(PARTS)


def merged(first: Results, second: Results) -> Results:
    """Records of both; for a run in both, the record of the second."""
    names = [*first.records, *(name for name in second.records if name not in first.records)]
    records = {name: {**first.records.get(name, {}), **second.records.get(name, {})} for name in names}
    return Results(records, first.short)


def without_rounds(record: FinishedRun) -> str:
    """Identity of a run without its seed and its number of rounds."""
    return identity(record.experiment.changed(**{"train.rounds": 1}))


def finished_runs(runs: Sequence[tuple[Cell, int, Path]]) -> Results:
    """Results of finished runs."""
    found: dict[str, dict[int, FinishedRun]] = {}
    for cell, seed, folder in runs:
        found.setdefault(cell.name, {})[seed] = FinishedRun(folder)
    return Results(found)


def identity(experiment: Experiment) -> str:
    """Settings that affect results, except the seed; name, engine and recording are left out.

    Arguments of the algorithm are complete, as in a record.
    """
    flat = dotted(experiment.model_dump() | {"algorithm": experiment.algorithm.complete.model_dump()})
    kept = {key: value for key, value in flat.items() if not key.startswith(("name", "seed", "engine.", "record."))}
    return str(sorted(kept.items()))
