# ruff: noqa: T201
"""The shift combined with several algorithms: FedAvg, FedProx, SCAFFOLD, error feedback.

Digits, two labels per client; clients with even labels upload 32 bits, those with odd labels 4 bits. Output: the
accuracy of each algorithm (mean of the last ten rounds) without and with the shift. With one seed and thirty
rounds, differences of half a point are noise.
"""

from typing import Any

from fedshift import Experiment, run

ALGORITHMS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedProx": {"algorithm": {"name": "fedprox", "mu": 0.01}},
    "SCAFFOLD": {"algorithm": {"name": "scaffold"}},
    "error feedback": {"uplink": {"bits": {32: 0.5, 4: 0.5}, "feedback": True}},
}


def accuracy(settings: dict[str, Any], shifted: bool) -> float:
    common = {
        "train": {"rounds": 30, "selection": "stratified", "epochs": 5, "batch": 15, "lr": 0.1},
        "uplink": {"bits": {32: 0.5, 4: 0.5}},
        "shift": {"on": shifted},
    }
    last = [outcome.accuracy or 0.0 for outcome in run(Experiment(**common | settings))][-10:]
    return sum(last) / len(last)


def main() -> None:
    print(f"{'32+4 bits':<16} {'plain':>7} {'shifted':>8}")
    for name, settings in ALGORITHMS.items():
        plain, shifted = accuracy(settings, False), accuracy(settings, True)
        print(f"{name:<16} {plain:>7.3f} {shifted:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
