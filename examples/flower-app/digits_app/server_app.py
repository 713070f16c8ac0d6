"""ServerApp that runs the experiment, evaluates its model, and records it in the run config's `out`."""

from digits_app import EXPERIMENT
from fedshift.flower import server_app

app = server_app(EXPERIMENT)
