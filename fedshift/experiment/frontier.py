"""`fedshift frontier`: one task with a grid of uplinks, from exact uploads to about 1/200 of their bytes on digits.

All clients of a run have the same uplink and all runs have the same server rule, so runs with the same seed draw the
same clients and differ only in their uploads.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.experiment import grid, overrides
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.toml import SettingsError, read
from fedshift.rounds.uplinks import UPLINKS

UPDATES: dict[str, Any] = {"send": "updates"}  # clients keep nothing between rounds
FEEDBACK: dict[str, Any] = {"send": "updates", "feedback": True}  # clients keep the error of their last upload
ALL: dict[str, Any] = {"biases": True}  # biases are coded as well, as in lean and extreme

NEAREST = UPLINKS["lean"] | {"quantizer": "step", "feedback": True}  # lean before its codes were rounded at random

# name of the runs -> settings of [uplink]
GRID: dict[str, dict[str, Any]] = {
    "exact": UPLINKS["exact"],
    "uniform-8": {"bits": 8, "quantizer": "uniform"},
    "random-4": {"bits": 4, "quantizer": "kmeans-random"},
    "random-4-updates": {"bits": 4, "quantizer": "kmeans-random"} | UPDATES,
    "random-2-updates": {"bits": 2, "quantizer": "kmeans-random"} | UPDATES,
    "kmeans-2-feedback": {"bits": 2, "quantizer": "kmeans"} | FEEDBACK,
    "lean": UPLINKS["lean"],
    "step-0.8": NEAREST,
    "step-0.8-no-feedback": {"quantizer": "step", "rate": 0.8} | UPDATES | ALL,
    "extreme": UPLINKS["extreme"],
    "step-0.3": NEAREST | {"rate": 0.3},
    "random-0.15": {"quantizer": "step-random", "rate": 0.15} | UPDATES | ALL,
    "step-0.15": NEAREST | {"rate": 0.15},
    "ternary-0.05": {"quantizer": "ternary", "keep": 0.05} | FEEDBACK | ALL,
    "ternary-0.02": {"quantizer": "ternary", "keep": 0.02} | FEEDBACK | ALL,
    "ternary-0.01": {"quantizer": "ternary", "keep": 0.01} | FEEDBACK | ALL,
}
# exact uploads and lean without a shift, with filter centring and with the shift per layer; extreme; the paper's 32+4.
# The share of the shift per layer is that of 32+4, half of the mean: by default it is the share of coded uploads
PLAIN, CENTRED, LAYER = {"on": False}, {"on": True, "per": "filter"}, {"on": True, "per": "layer"}
BRIEF: dict[str, dict[str, Any]] = {
    "exact-no-shift": {"uplink": "exact", "shift": PLAIN},
    "lean-no-shift": {"uplink": "lean", "shift": PLAIN},
    "exact": {"uplink": "exact", "shift": CENTRED},
    "lean": {"uplink": "lean", "shift": CENTRED},
    "extreme": {"uplink": "extreme", "shift": CENTRED},
    "paper": {"uplink": "paper", "shift": LAYER},
    "exact-layer": {"uplink": "exact", "shift": LAYER | {"share": 0.5}},
    "lean-layer": {"uplink": "lean", "shift": LAYER | {"share": 0.5}},
}
# not run, but compared where there are records
EARLIER: dict[str, dict[str, Any]] = {
    "nearest-no-shift": {"uplink": NEAREST, "shift": PLAIN},
    "nearest": {"uplink": NEAREST, "shift": CENTRED},
}
# task -> preset with its settings
TASKS = {
    "digits": "demo",
    "cifar10": "paper",
    "fashion": "fashion",
    "shakespeare": "shakespeare",
    "transformer": "transformer",
    "synthetic": "synthetic",
}
PARTS = ("data", "model", "algorithm", "bounds", "train", "record")  # tables of a preset that define the task


def task(name: str) -> dict[str, Any]:
    """Settings of a task by name, or of one run in a file.

    >>> task("digits")["train"]["rounds"], sorted(task("cifar10"))
    (150, ['algorithm', 'data', 'model', 'train'])
    """
    if name in TASKS:
        return {key: value for key, value in PRESETS[TASKS[name]].items() if key in PARTS}
    if not name.endswith(".toml"):
        raise SettingsError(f"--task {name}: must be {', '.join(TASKS)} or a file of settings, FILE.toml")
    raw = read(Path(name))
    if "sweep" in raw:
        raise SettingsError(f"--task {name}: has a table named sweep; it must contain the settings of one run")
    return raw


def settings(name: str, seeds: int, assignments: Sequence[str] = (), brief: bool = False) -> dict[str, Any]:
    """Settings of a sweep over the uplinks, seed by seed; the bandwidth of the task's uplink is kept.

    `brief`: the runs of BRIEF, which also differ in the shift.

    >>> [run["name"] for run in settings("digits", 2)["sweep"]["runs"]][14:18]
    ['ternary-0.02_seed-0', 'ternary-0.01_seed-0', 'exact_seed-1', 'uniform-8_seed-1']
    """
    raw = task(name)
    where = f"--task {name}"
    with overrides.placed(where):
        grid.expand(raw)
    kept = {key: value for key, value in raw.items() if key not in ("name", "seed", "uplink")}
    links = raw.get("uplink")
    if isinstance(links, Mapping) and not isinstance(rate := links.get("bandwidth", {}), Mapping):
        kept["uplink"] = {"bandwidth": rate}
    grid_runs = BRIEF if brief else {label: {"uplink": uplink} for label, uplink in GRID.items()}
    if brief:
        kept.pop("shift", None)
    runs = [
        {"name": f"{label}_seed-{seed}", "seed": seed, **changes}
        for seed in range(seeds)
        for label, changes in grid_runs.items()
    ]
    return overrides.changed(kept | {"sweep": {"runs": runs}}, where, assignments)
