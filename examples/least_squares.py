# ruff: noqa: T201
"""Federated least squares with the shrinking steps of Theorem 1: FedAvg and FedShift both converge as 1/T.

    F(w) - F* = |w - w*|^2 / D for w of shape (D, D), mean(w*) = c;    step tau has length 2 / (mu (gamma + tau))

Output: the gap F - F* over tau has slope -1 on log-log axes, with and without the shift, if the mean weight c of
the optimum is zero. `theorem1.py` shows the effect of the shift for other values of c.
"""

import torch
from torch import Tensor, nn

from fedshift import Experiment, dataset, run
from fedshift.data.partition import Partition

K, N, D, STEPS = 4, 40, 32, 2  # clients, all in every round; examples, inputs and local steps per client
SQUARES = {"loss": "torch.nn.functional:mse_loss", "metric": "torch.nn.functional:pairwise_distance", "goal": "min"}
SHRINKING = {"schedule": "strongly-convex", "convexity": 2 / D, "gamma": 7}  # mu = L = 2 / D, gamma = 8 L / mu - 1


class Noisy(nn.Linear):
    """w x, plus noise in training mode: gradients are unbiased but not exact."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.training * torch.randn(len(x), D)


def gap(c: float, rounds: int = 300, quantized: float = 0.5, shift: bool = True) -> Tensor:
    """Return F - F* after each round; a share `quantized` of the clients uploads 8-bit updates."""
    torch.manual_seed(0)
    best, own = torch.randn(D, D).double(), torch.randn(K, D, D).double()
    best, own = best - best.mean() + c, own - own.mean(0)  # the optimum of client k alone is best + own[k]
    x = torch.linalg.qr(torch.randn(K, N, D).double())[0] * N**0.5  # x^T x / N = 1 for every client
    x, y = x.flatten(0, 1), (x @ (best + own).mT).flatten(0, 1)
    experiment = Experiment(
        data={"clients": K, "partition": "iid"},
        train={"rounds": rounds, "cohort": K, "epochs": 1, "batch": N // STEPS, **SQUARES, **SHRINKING},
        uplink={"bits": {32: 1 - quantized, 8: quantized}, "quantizer": "uniform", "send": "updates"},
        shift={"on": shift, "max_share": 1.0},
        engine={"name": "sequential"},
        record={"evaluate": rounds},
    )
    by_client = Partition(torch.arange(K * N), torch.arange(K + 1) * N)  # examples in order of clients, not shuffled
    training = run(experiment, model=Noisy(D, D, bias=False), data=dataset(x, y, x, y), partition=by_client)
    return torch.stack([(training.params["weight"] - best).square().sum() / D for _ in training])


def slope(gaps: Tensor, skip: int = 50) -> float:
    """Slope of log(F - F*) over log(tau), from round `skip` on."""
    tau = STEPS * torch.arange(1, len(gaps) + 1).double()
    points = torch.stack([tau, gaps]).log()[:, skip:]
    return float(torch.cov(points)[0, 1] / points[0].var())


def main() -> None:
    for name, shift in ("FedAvg", False), ("FedShift", True):
        gaps = gap(0.0, shift=shift)
        print(
            f"{name:<8}: gap {gaps[49]:.4f} after 50 rounds, {gaps[-1]:.5f} after {len(gaps)}: slope {slope(gaps):.2f}"
        )


if __name__ == "__main__":
    main()
