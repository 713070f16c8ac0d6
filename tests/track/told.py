"""Runs that trackers hear of, and what a record says of them."""

import csv
import io
from pathlib import Path

from fedshift.experiment.settings import Experiment
from fedshift.runs.run import Run, resume
from fedshift.track import tracked
from tests.runs import digits


def train(experiment: Experiment, out: Path, name: str, rounds: int) -> list[str]:
    """Go on with a run, or start it, and leave it after so many rounds; what is told of trouble."""
    told: list[str] = []
    begun = (out / "settings.toml").exists()
    run = resume(out, data=digits()) if begun else Run(experiment, out, data=digits())
    for outcome in (rounds_heard := tracked(run, name, tell=told.append)):
        if outcome.number == rounds:
            break
    rounds_heard.close()  # type: ignore[attr-defined]
    run.close()
    return told


def column(out: Path, name: str) -> list[float]:
    """A column of the record."""
    lines = csv.DictReader(io.StringIO((out / "rounds.csv").read_text()))
    return [float(line[name]) for line in lines]
