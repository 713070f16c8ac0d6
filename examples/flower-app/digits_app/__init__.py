"""Settings of the experiment; Flower sends the .toml files of an app to every machine."""

from pathlib import Path

from fedshift import Experiment
from fedshift.experiment.toml import read

EXPERIMENT = Experiment(**read(Path(__file__).parents[1] / "experiment.toml"))
