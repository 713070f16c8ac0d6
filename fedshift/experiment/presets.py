"""Presets: experiments by name. A preset with a sweep is a grid of runs."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # full precision without and with filter centring, the paper's 4-bit uploads with its shift, lean and extreme:
    # fifteen runs, which all draw the same clients
    "demo": {
        "name": "demo",
        "data": {"name": "digits", "clients": 100, "partition": "shards"},
        "model": {"name": "mlp"},
        "train": {"rounds": 150, "cohort": 10, "epochs": 5, "batch": 10, "lr": 0.05},
        "sweep": {
            "runs": [
                {"uplink": "exact", "shift": {"on": False}},
                {"uplink": "exact", "shift": {"on": True, "per": "filter"}},
                {"uplink": "paper", "shift": {"on": True, "per": "layer"}},
                {"uplink": "lean", "shift": {"on": True, "per": "filter"}},
                {"uplink": "extreme", "shift": {"on": True, "per": "filter"}},
            ],
            "seed": [0, 1, 2],
        },
    },
    # one small run
    "smoke": {
        "name": "smoke",
        "data": {"name": "digits", "clients": 100, "partition": "shards"},
        "train": {"rounds": 400, "cohort": 10, "selection": "stratified", "epochs": 5, "batch": 10, "lr": 0.05},
        "uplink": {"bits": "32+4"},
    },
    # all settings of the paper's main experiment, 32+4 bits, share not limited
    "paper": {
        "name": "paper",
        "data": {"name": "cifar10", "clients": 100, "partition": "shards", "augment": True},
        "model": {"name": "paper-cnn"},
        "algorithm": {"name": "fedavg", "mu": 0.01, "control": "sent", "weights": "equal"},
        "shift": {"on": True, "per": "layer", "max_share": 1.0},
        "train": {
            "rounds": 800,
            "cohort": 10,
            "selection": "stratified",
            "epochs": 10,
            "batch": 50,
            "lr": 0.005,
            "momentum": 0.9,
        },
        "uplink": {"bits": "32+4", "quantizer": "kmeans", "coder": "bitpack", "send": "weights"},
    },
}
