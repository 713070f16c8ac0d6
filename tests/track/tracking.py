"""Tracked runs, and the columns of their records."""

import csv
import io
from pathlib import Path

from fedshift.experiment.settings import Experiment
from fedshift.runs.run import Run, resume
from fedshift.track import tracked
from tests.runs import digits


def train(experiment: Experiment, out: Path, name: str, rounds: int) -> list[str]:
    """Start or resume a run, stop it after round `rounds`, and return the warnings."""
    warnings: list[str] = []
    begun = (out / "settings.toml").exists()
    run = resume(out, data=digits()) if begun else Run(experiment, out, data=digits())
    for outcome in (outcomes := tracked(run, name, tell=warnings.append)):
        if outcome.number == rounds:
            break
    outcomes.close()  # type: ignore[attr-defined]
    run.close()
    return warnings


def column(out: Path, name: str) -> list[float]:
    """Values of a column of the record."""
    lines = csv.DictReader(io.StringIO((out / "rounds.csv").read_text()))
    return [float(line[name]) for line in lines]
