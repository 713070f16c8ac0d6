"""The experiment travels with the app: Flower packs its .toml files, so every machine finds this one."""

from pathlib import Path

from fedshift import Experiment
from fedshift.experiment.toml import read

EXPERIMENT = Experiment(**read(Path(__file__).parents[1] / "experiment.toml"))
