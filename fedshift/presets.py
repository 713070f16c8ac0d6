"""Experiments by name. A preset with a sweep is a grid of runs."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # what 4 bits cost on digits, and what the paper's shift and filter centring give back: fifteen runs
    "demo": {
        "name": "demo",
        "data": {"name": "digits", "clients": 100, "partition": "shards"},
        "model": {"name": "mlp"},
        "train": {"rounds": 150, "cohort": 10, "selection": "stratified", "epochs": 5, "batch": 10, "lr": 0.05},
        "uplink": {"quantizer": "kmeans"},
        "sweep": {
            "runs": [
                {"name": "32+32", "uplink": {"bits": "32+32"}, "shift": {"on": False}},
                {"name": "32+32 per filter", "uplink": {"bits": "32+32"}, "shift": {"on": True, "per": "filter"}},
                {"name": "32+4", "uplink": {"bits": "32+4"}, "shift": {"on": False}},
                {"name": "32+4 per layer", "uplink": {"bits": "32+4"}, "shift": {"on": True, "per": "layer"}},
                {"name": "32+4 per filter", "uplink": {"bits": "32+4"}, "shift": {"on": True, "per": "filter"}},
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
    # every value of the paper's main experiment, 32+4 bits with the bare rule
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
