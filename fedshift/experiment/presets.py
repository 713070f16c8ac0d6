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
    # the tasks below upload exact weights without a shift, as published; options add an uplink or a shift
    "fashion": {
        "name": "fashion",
        "data": {"name": "fashion-mnist", "clients": 100, "partition": "labels", "labels": 2},
        "model": {"name": "cnn"},
        "shift": {"on": False},
        "train": {"rounds": 100, "cohort": 10, "epochs": 1, "batch": 20, "lr": 0.05},
        "record": {"evaluate": 2},  # evaluating costs as much time as training
    },
    # Synthetic(1, 1) of FedProx (Li et al., MLSys 2020), with its settings; of draws 0 to 19, the number of examples of
    # draw 9 is nearest to its 9,600
    "synthetic": {
        "name": "synthetic",
        "data": {"name": "synthetic", "args": {"alpha": 1.0, "beta": 1.0, "seed": 9}, "partition": "natural"},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedprox", "mu": 1.0, "weights": "examples"},
        "shift": {"on": False},
        "bounds": {"weight": 0.0},  # sizes of clients differ a hundredfold
        "train": {"rounds": 200, "cohort": 10, "epochs": 20, "batch": 10, "lr": 0.01},
        "record": {"evaluate": 5},
    },
    # the text and the clients of LEAF (Caldas et al., 2018), with a target at every position of a window, as in McMahan
    # et al. (AISTATS 2017): with one target per window, a step costs as much but has one target instead of 80
    "shakespeare": {
        "name": "shakespeare",
        "data": {
            "name": "shakespeare",
            "args": {"stride": 80, "positions": 80},
            "partition": "natural",
            "least": 10,
        },
        "model": {"name": "char-lstm", "args": {"classes": 80, "positions": 80}},
        "algorithm": {"name": "fedavg", "weights": "examples"},
        "shift": {"on": False},
        "bounds": {"weight": 0.0},  # sizes of clients differ sixtyfold
        "train": {
            "rounds": 50,
            "cohort": 10,
            "epochs": 5,
            "batch": 10,
            "lr": 8.0,
            "clip": 1.0,
            "schedule": "cosine",
            "final": 0.1,
        },
    },
    # the same clients and windows with a transformer
    "transformer": {
        "name": "transformer",
        "data": {
            "name": "shakespeare",
            "args": {"stride": 80, "positions": 80},
            "partition": "natural",
            "least": 10,
        },
        "model": {"name": "char-transformer", "args": {"classes": 80, "positions": 80}},
        "algorithm": {"name": "fedavg", "weights": "examples"},
        "shift": {"on": False},
        "bounds": {"weight": 0.0},
        "train": {
            "rounds": 50,
            "cohort": 10,
            "epochs": 5,
            "batch": 10,
            "optimizer": "adam",
            "lr": 0.003,
            "clip": 1.0,
            "schedule": "cosine",
            "final": 0.1,
        },
    },
    "resnet": {
        "name": "resnet",
        "data": {"name": "cifar10", "clients": 100, "partition": "dirichlet", "alpha": 0.5, "augment": True},
        "model": {"name": "resnet8"},
        "shift": {"on": False},
        "train": {"rounds": 500, "cohort": 10, "epochs": 5, "batch": 50, "lr": 0.1},
    },
}
