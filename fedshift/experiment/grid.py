"""Runs of a grid: every combination of the settings that a file lists under `sweep`.

    [sweep]
    "uplink.bits" = [32, {32 = 0.5, 4 = 0.5}]
    "shift.on" = [false, true]
    seed = [0, 1, 2]

`runs = [{...}, {...}]` lists combinations of settings explicitly.
"""

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, dotted, merge, put


class GridRun(NamedTuple):
    """One run of a grid."""

    name: str
    experiment: Experiment
    folder: Path


def expand(raw: Mapping[str, Any]) -> list[Experiment]:
    """One experiment per combination of the settings listed under `sweep`.

    >>> grid = {"train": {"rounds": 3}, "sweep": {"seed": [0, 1], "train": {"lr": [0.1, 0.2]}}}
    >>> [(run.seed, run.train.lr, run.train.rounds) for run in expand(grid)]
    [(0, 0.1, 3), (0, 0.2, 3), (1, 0.1, 3), (1, 0.2, 3)]
    """
    base = {key: value for key, value in raw.items() if key != "sweep"}
    runs, axes = _parts(raw)
    experiments = []
    for combination in runs:
        for values in itertools.product(*axes.values()):
            settings = copy.deepcopy(merge(base, combination))
            for key, value in zip(axes, values, strict=True):
                put(settings, key, value)
            experiments.append(Experiment(**settings))
    return experiments


def keys(raw: Mapping[str, Any]) -> set[str]:
    """Names of the settings that a sweep sets per run."""
    runs, axes = _parts(raw)
    return {*axes, *(key for run in runs for key in dotted(run))} - {"name"}


def given(raw: Mapping[str, Any]) -> set[str]:
    """Dotted names of all settings in a file, including those of its sweep."""
    return {*dotted({key: value for key, value in raw.items() if key != "sweep"}), *keys(raw)}


def axes(raw: Mapping[str, Any]) -> set[str]:
    """Names of the settings of which a sweep trains every combination."""
    return {*_parts(raw)[1]}


def _parts(raw: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], dict[str, list[Any]]]:
    """Explicit combinations of settings, and the lists of which every combination is trained."""
    grid = raw.get("sweep", {})
    if not isinstance(grid, Mapping):
        raise SettingsError(f"sweep = {grid!r}: must be a table of lists")
    if "sweep" in raw and not grid:
        raise SettingsError("sweep: is empty; it must list values of one or more settings, or runs")
    runs = grid.get("runs", [{}])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, Mapping) for run in runs):
        raise SettingsError(f"sweep.runs = {runs!r}: must be a list of tables of settings")
    axes = dotted({key: value for key, value in grid.items() if key != "runs"})
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise SettingsError(f"sweep.{key} = {values!r}: must be a list of one or more values")
    return runs, axes
