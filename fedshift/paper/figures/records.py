"""Runs for the figures: finished runs of a folder, grouped into lines (runs that differ only in seed) and panels (lines
that differ only in the shift)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.core.files import RunError
from fedshift.experiment.links import links
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, dotted
from fedshift.paper.experiments import TITLES
from fedshift.paper.figures.network import TITLES as DATA
from fedshift.paper.records import FinishedRun, without_rounds
from fedshift.runs.record import SETTINGS
from fedshift.runs.summary import apart, comparable, shown, uplink_label, words

PER_RUN = ("name", "seed", "engine.", "record.", "train.rounds")  # settings that do not separate panels
LINK = ("uplink.", "algorithm.", "shift.")  # settings in which a line may differ from full precision
ORDER = ["FedAvg", "FedPAQ", "Fed-EF", "FedProx", "FedProx with feedback", "SCAFFOLD", "SCAFFOLD with feedback"]
TITLED = ("algorithm.name", "uplink.bits", "uplink.feedback")  # settings that are part of the title


class SeedLine(NamedTuple):
    """Runs that differ only in their seed."""

    label: str
    records: list[FinishedRun]

    @property
    def experiment(self) -> Experiment:
        return self.records[0].experiment


class ShiftPanel(NamedTuple):
    """Lines that differ only in the shift, and the line of full precision for comparison."""

    algorithm: str
    bits: str
    more: str  # other settings in which panels differ
    plain: SeedLine | None
    shifted: list[SeedLine]
    exact: SeedLine | None

    @property
    def title(self) -> str:
        return f"{self.algorithm}, {self.bits}"

    @property
    def lines(self) -> list[SeedLine]:
        return [*([self.plain] if self.plain else []), *self.shifted]

    @property
    def all(self) -> list[SeedLine]:
        return [*([self.exact] if self.exact else []), *self.lines]

    @property
    def records(self) -> list[FinishedRun]:
        return [record for line in self.all for record in line.records]


class Source(NamedTuple):
    """Runs of figures 5, 7, 8 and 9."""

    panels: list[ShiftPanel]
    folder: Path
    fresh: bool = False  # True for new runs, much smaller than the paper's

    @property
    def pair(self) -> ShiftPanel:
        """Preferred panel: with and without the shift, FedPAQ, fewest bits, most runs."""
        return min(
            self.panels,
            key=lambda panel: (
                panel.plain is None or not panel.shifted,
                panel.algorithm != TITLES["fedpaq"],
                _least(panel.lines[0]),
                -len(panel.records),
            ),
        )

    def drawn(self, panels: Sequence[ShiftPanel]) -> str:
        """Number of runs, their rounds and their folder."""
        records = _distinct(panels)
        if self.fresh:
            return f"a new small run: {_data(records)}, {_rounds(records)}"
        return f"{len(records)} run{'s' * (len(records) != 1)} of {_rounds(records)} in {self.folder}"

    def about(self, panels: Sequence[ShiftPanel]) -> str:
        """Data, rounds and seeds, for the caption of a figure."""
        records = _distinct(panels)
        fresh = "A new small run: " * self.fresh
        return f"{fresh}{_data(records)}, {_rounds(records)}, {_seeds(panels)}"


def found(folder: Path) -> tuple[list[FinishedRun], list[str]]:
    """Finished runs in a folder and its subfolders, and the errors of runs that are left out.

    Of runs that differ only in their number of rounds, the longest is returned.
    """
    longest: dict[tuple[str, int], FinishedRun] = {}
    others: list[str] = []
    for path in sorted(folder.rglob(SETTINGS)):
        try:
            record = FinishedRun(path.parent)
            rounds = len(record.lines)
        except (RunError, SettingsError) as problem:  # unfinished or unreadable
            others.append(str(problem))
            continue
        key = without_rounds(record), record.experiment.seed
        if key not in longest or rounds > len(longest[key].lines):
            longest[key] = record
    return list(longest.values()), others


def panels(records: Sequence[FinishedRun]) -> list[ShiftPanel]:
    """Panels in the paper's order; full precision is a panel only if there are no others, else a line in each."""
    flat = [
        {key: x for key, x in comparable(record.experiment).items() if not key.startswith(PER_RUN)}
        for record in records
    ]
    varying = [key for key in apart([record.experiment for record in records])[0] if not key.startswith(PER_RUN)]
    grouped: dict[str, dict[str, list[FinishedRun]]] = {}
    for record, settings in zip(records, flat, strict=True):
        shift = {key: x for key, x in settings.items() if key.startswith("shift.")}
        rest = {key: x for key, x in settings.items() if key not in shift}
        grouped.setdefault(str(rest), {}).setdefault(str(shift), []).append(record)
    lines = [[SeedLine("", runs) for runs in group.values()] for group in grouped.values()]
    exact = {_without(LINK, line): line for group in lines for line in group if _full(line)}
    drawn = [group for group in lines if not all(map(_full, group))] or lines
    shifted = [line for group in drawn for line in group if line.experiment.shift.on]
    found = [_panel(group, varying, shifted, exact.get(_without(LINK, group[0]))) for group in drawn]
    return sorted(found, key=lambda panel: (panel.more, _place(panel.algorithm), len(panel.bits), panel.bits))


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _panel(
    lines: Sequence[SeedLine], varying: Sequence[str], every: Sequence[SeedLine], exact: SeedLine | None
) -> ShiftPanel:
    """One panel; labels of its shifted lines tell them apart from those of every panel."""
    settings = dotted(lines[0].experiment.model_dump())
    others = [key for key in varying if key not in TITLED and not key.startswith("shift.")]
    more = ", ".join(f"{word} {shown(settings.get(key))}" for key, word in words(others).items())
    plain = next((line for line in lines if not line.experiment.shift.on), None)
    shifted = [line for line in lines if line.experiment.shift.on]
    if exact is plain:
        exact = None
    return ShiftPanel(
        algorithm(lines[0].experiment),
        _bits(lines[0].experiment),
        more,
        plain and plain._replace(label="without shift"),
        [line._replace(label=_shift(line, every)) for line in shifted],
        exact and exact._replace(label=f"{_bits(exact.experiment)}, without shift"),
    )


def _bits(experiment: Experiment) -> str:
    """Bits of all clients, including those of named groups."""
    return uplink_label(experiment) if experiment.uplink.group else f"{shown(experiment.uplink.bits)} bits"


def algorithm(experiment: Experiment) -> str:
    """Name of the algorithm in the paper."""
    name, feedback = experiment.algorithm.name, experiment.uplink.feedback
    if name != "fedavg":
        return TITLES.get(name, name) + " with feedback" * feedback
    if not any(group.uplink.lossy for group in links(experiment)[0]):
        return TITLES["fedavg"]
    return TITLES["fedef" if feedback else "fedpaq"]


def _shift(line: SeedLine, others: Sequence[SeedLine]) -> str:
    """Label of a shifted line, with the settings in which it differs from the others."""
    varying, _ = apart([other.experiment for other in others])
    differing = {key: shown(x) for key, x in comparable(line.experiment).items() if key in varying}
    rule = f" {differing.pop('shift.on')}" if "shift.on" in differing else ""
    settings = [f"{key.removeprefix('shift.')} {x}" for key, x in differing.items() if key.startswith("shift.")]
    return ", ".join([f"with shift{rule}", *settings])


def _full(line: SeedLine) -> bool:
    return algorithm(line.experiment) == TITLES["fedavg"] and not line.experiment.shift.on


def _without(prefixes: tuple[str, ...], line: SeedLine) -> str:
    flat: dict[str, Any] = dotted(line.experiment.model_dump())
    return str(sorted((key, str(x)) for key, x in flat.items() if not key.startswith(PER_RUN + prefixes)))


def _least(line: SeedLine) -> int:
    return min(group.uplink.codec.bits for group in links(line.experiment)[0])


def _distinct(panels: Iterable[ShiftPanel]) -> list[FinishedRun]:
    """Distinct records of panels."""
    return list({record.folder: record for panel in panels for record in panel.records}.values())


def _rounds(records: Sequence[FinishedRun]) -> str:
    least, most = (which(len(record.lines) for record in records) for which in (min, max))
    return f"{least} to {most} rounds" if least < most else f"{most} round{'s' * (most > 1)}"


def _seeds(panels: Iterable[ShiftPanel]) -> str:
    """Number of seeds per line."""
    counts = [len(line.records) for panel in panels for line in panel.all]
    least, most = min(counts), max(counts)
    return "one seed" if most == 1 else f"{most} seeds" if least == most else f"{least} to {most} seeds per line"


def _data(records: Sequence[FinishedRun]) -> str:
    return ", ".join(dict.fromkeys(DATA.get(name := record.experiment.data.name, name) for record in records))
