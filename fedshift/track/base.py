"""Interface of trackers: description of a run, its rounds, and its end."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fedshift.experiment.toml import dotted, read
from fedshift.runs.record import SETTINGS, SWEEP

How = Literal["finished", "stopped", "failed"]  # end of a run
Rounds = Mapping[int, Mapping[str, float]]  # figures by name, by the number of the round
LONGEST = 500  # characters of a setting; some lists have an entry per client


class About(NamedTuple):
    """Description of a run for trackers."""

    folder: Path
    settings: dict[str, bool | int | float | str]
    now: int  # first round to be logged; earlier logs of it and of later rounds are obsolete

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def group(self) -> str:
        """Name of the sweep that the run belongs to, or ''."""
        return self.folder.parent.name if (self.folder.parent / SWEEP).exists() else ""


class Tracker(Protocol):
    """Log of one run in one tracker."""

    after: int  # only later rounds are logged
    kept: dict[str, Any]  # JSON values needed to resume the log

    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        """`kept` is that of the last session with `round`, the last logged round, added; {} for a new run."""

    def add(self, rounds: Rounds) -> None:
        """Log one or more rounds."""

    def end(self, how: How) -> None: ...


def about(folder: Path, now: int) -> About:
    """Read the description of a run from its folder."""
    return About(folder.resolve(), {key: _scalar(value) for key, value in dotted(read(folder / SETTINGS)).items()}, now)


def _scalar(value: Any) -> bool | int | float | str:
    """
    >>> _scalar(0.5), _scalar("32+4"), _scalar([32, 4])
    (0.5, '32+4', '[32, 4]')
    """
    text = value if isinstance(value, str) else json.dumps(value)
    cut = f"{text[: LONGEST - 4]} ..." if len(text) > LONGEST else text
    return value if isinstance(value, bool | int | float) else cut
