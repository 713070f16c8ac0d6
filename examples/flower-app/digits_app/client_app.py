"""ClientApp that trains the clients of its node: of n nodes, node i trains clients i, i + n, i + 2n, ..."""

from digits_app import EXPERIMENT
from fedshift.flower import client_app

app = client_app(EXPERIMENT)
