# ruff: noqa: T201
"""Theorem 2 on real rounds: when the shift makes the server's step from w^t to w^{t+1} shorter.

    D_FA^2 - D_FS^2 = (I P / K) ((1 + S/K) m'^2 - 2 m m')        D_FA = |w^{t+1} - w^t|, D_FS = |w_hat^{t+1} - w^t|

for a layer of P weights with means m = mean(w^t) and m' = mean(w^{t+1}), and I quantized and S exact uploads
among K. (The paper's theorem states the last term as -2 m / m'^2; its proof has the term above.) FedShift's step
is the shorter one exactly if (K + S) / 2K > m / m'.

Output: for each layer, how often each step was shorter, and the relative difference of the two sides.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedshift import Algorithm, Broadcast, Experiment, Params, Round, Run, ServerRule, chain, run
from fedshift.data.datasets import load
from fedshift.experiment.build import complete_algorithm


@dataclass(eq=False)
class Watch(ServerRule):
    """A server rule without effect at the end of the chain that stores w^t, w^{t+1} and w_hat^{t+1}."""

    seen: list[tuple[Params, Params, Params]] = field(default_factory=list)

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        self.seen.append((rnd.start.params, rnd.mean, out.params))
        return out, state


def watched(experiment: Experiment) -> tuple[Run, Watch]:
    """Return a run on digits in float64, so that rounding does not hide the identity."""
    digits = load("digits")
    digits = replace(digits, x=digits.x.double(), test_x=digits.test_x.double())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    client, server = complete_algorithm(experiment)
    watch = Watch()
    return run(experiment, model=model, data=digits, algorithm=Algorithm(client, chain(server, watch))), watch


def main() -> None:
    uplink = {"bits": {32: 0.5, 5: 0.5}, "quantizer": "uniform"}
    train = {"rounds": 30, "selection": "stratified", "epochs": 5, "batch": 15, "lr": 0.1}
    training, watch = watched(Experiment(train=train, uplink=uplink, shift={"per": "layer"}))
    outcomes, i, s, k = list(training), 5, 5, 10
    print(f"{'layer':<10} {'FedShift shorter':>16} {'FedAvg shorter':>15} {'fence right':>12} {'sides apart':>12}")
    for name in training.fed.layers:
        shorter, right, apart = 0, 0, 0.0
        for outcome, (start, mean, after) in zip(outcomes, watch.seen, strict=True):
            old, new, p = float(start[name].mean()), float(mean[name].mean()), mean[name].numel()
            gain = float((mean[name] - start[name]).square().sum() - (after[name] - start[name]).square().sum())
            expected = i * p / k * ((1 + s / k) * new**2 - 2 * old * new)
            shorter += gain > 0
            right += ((k + s) / (2 * k) > old / new) == (gain > 0) == outcome.layers[name].shorter
            apart = max(apart, abs(gain / expected - 1))
        print(f"{name:<10} {shorter:>16} {len(outcomes) - shorter:>15} {right:>9}/{len(outcomes)} {apart:>12.0e}")


if __name__ == "__main__":
    main()
