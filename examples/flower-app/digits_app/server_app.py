"""Drives the experiment, scores its model, and records everything in the run config's `out`."""

from digits_app import EXPERIMENT
from fedshift.flower import server_app

app = server_app(EXPERIMENT)
