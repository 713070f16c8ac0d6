"""What a tracker is: it gets to know a run, is told of rounds, and of the end."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from fedshift.experiment.toml import dotted, read
from fedshift.runs.record import SETTINGS, SWEEP

How = Literal["finished", "stopped", "failed"]
Rounds = Mapping[int, Mapping[str, float]]  # figures by name, by the number of the round
LONGEST = 500  # characters of a setting: some lists have an entry for each client


class About(NamedTuple):
    """A run, as a tracker gets to know it."""

    folder: Path
    settings: dict[str, bool | int | float | str]
    now: int  # the round that is the first to be told of; what is known of it and of later ones no longer counts

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def group(self) -> str:
        """The name of the sweep that the run belongs to, '' for none."""
        return self.folder.parent.name if (self.folder.parent / SWEEP).exists() else ""


class Tracker(Protocol):
    """One run in one tracker."""

    after: int  # it wants to hear of rounds after this one
    kept: dict[str, Any]  # what it needs to know to go on with the run, as JSON has it

    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        """`kept` is what it kept the last time, and `round`, the last one it heard of; {} for an unknown run."""

    def add(self, rounds: Rounds) -> None:
        """A round, or several where it is behind."""

    def end(self, how: How) -> None: ...


def about(folder: Path, now: int) -> About:
    """Read a run's folder."""
    return About(folder.resolve(), {key: _scalar(value) for key, value in dotted(read(folder / SETTINGS)).items()}, now)


def _scalar(value: Any) -> bool | int | float | str:
    """
    >>> _scalar(0.5), _scalar("32+4"), _scalar([32, 4])
    (0.5, '32+4', '[32, 4]')
    """
    text = value if isinstance(value, str) else json.dumps(value)
    cut = f"{text[: LONGEST - 4]} ..." if len(text) > LONGEST else text
    return value if isinstance(value, bool | int | float) else cut
