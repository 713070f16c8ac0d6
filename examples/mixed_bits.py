# ruff: noqa: T201
"""Clients with good, fair and poor links in one federation: 32, 8 and 4 bits per weight.

Half of the clients upload exact weights, a quarter 8-bit codes, a quarter 4-bit codes; all runs draw the same ten
clients in a round. Output: the size of an upload in each group, then bytes and accuracy of the mix compared with
32 bits for all. The loss of accuracy is small if clients send updates, which are smaller than weights.
"""

from fedshift import Experiment, Run, run, size

MIXED = {32: 0.5, 8: 0.25, 4: 0.25}


def train(bits: int | dict[int, float], send: str) -> tuple[Run, int, float]:
    """Return the run, the uploaded bytes, and the mean accuracy of the last ten rounds."""
    training = run(
        Experiment(
            data={"name": "digits", "clients": 100},
            train={"rounds": 40, "epochs": 5, "batch": 15, "lr": 0.1},
            uplink={"bits": bits, "send": send},
        )
    )
    outcomes = list(training)
    return training, sum(sum(o.bytes_up) for o in outcomes), sum(o.accuracy or 0.0 for o in outcomes[-10:]) / 10


def main() -> None:
    exact, weights, updates = train(32, "weights"), train(MIXED, "weights"), train(MIXED, "updates")
    for group in weights[0].fed.groups:
        print(f"{group.name}: {size(group.uplink.codec, weights[0].params):,} bytes an upload")
    for name, (_, sent, accuracy) in {"all 32 bit": exact, "mixed weights": weights, "mixed updates": updates}.items():
        print(f"{name:<13}: {sent:,} bytes up ({sent / exact[1]:.0%}), accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
