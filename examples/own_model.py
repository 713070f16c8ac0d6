# ruff: noqa: T201
"""Your own model on your own arrays, with 4 bits per weight for half of the clients.

Any nn.Module and any arrays can be used. Output: accuracy on the test arrays, and uploaded bytes per round.
"""

import numpy as np
import torch
from torch import nn

from fedshift import Experiment, dataset, run

x = np.random.default_rng(0).normal(size=(4000, 8))
y = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)  # quadrant: four classes
data = dataset(x[:3000], y[:3000], x[3000:], y[3000:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))

experiment = Experiment(
    data={"clients": 60, "partition": "labels", "labels": 2},  # each client has two of the four classes
    train={"rounds": 40, "cohort": 10},
    uplink={"bits": {32: 0.5, 4: 0.5}},
    engine={"name": "sequential"},  # one process is enough for a model this small
)
training = run(experiment, model=model, data=data)
for outcome in training:
    if outcome.number % 10 == 0:
        print(f"round {outcome.number}: accuracy {outcome.accuracy:.3f}, {sum(outcome.bytes_up):,} bytes up")

trained = training.model  # an nn.Module, ready to use
print("the first quadrant is class", int(trained(torch.tensor([[1.0, 1.0] + [0.0] * 6])).argmax()))
