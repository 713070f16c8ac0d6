"""Statistics of a server before a round, for tests of policies."""

from typing import Any

import torch
from torch import Tensor

from fedshift import PolicyStats


def known(clients: int, **given: Any) -> PolicyStats:
    """Statistics of a population; what is not given is zero, and weights are equal."""
    zeros = torch.zeros(clients, dtype=torch.float64)
    values: dict[str, Any] = {
        "rounds": 100,
        "values": 1000,
        "weights": torch.ones(clients, dtype=torch.float64),
        "examples": torch.ones(clients, dtype=torch.int64),
        "bandwidth": None,
        "uplinks": [],
        "overhead": lambda uplink: 0,
        "last": torch.zeros(clients, dtype=torch.int64),
        "loss": zeros,
        "norm": zeros,
        "error": zeros,
        "bytes": zeros,
    }
    return PolicyStats(**values | given)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
