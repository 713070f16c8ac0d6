"""Clients of a round, and the order and learning rates of their local steps.

All draws depend on (seed, purpose, round, client) only, not on the other clients, the engine, or the round in
which a run was resumed; their cost depends on the size of the cohort, not of the population.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.augment import draws
from fedshift.data.partition import Partition

SHUFFLE, STEP, AUGMENT, ROUNDING = range(4)  # numbers that are folded into keys


class Plan(NamedTuple):
    """Local steps of K clients, or of one without the leading axis; unused steps at the end keep no examples."""

    batches: Tensor  # (K, S, B) int64: examples; kept ones come first in a batch
    keep: Tensor  # (K, S, B) bool
    lr: Tensor  # (K, S)
    key: Tensor  # (K, S) int64: one per step


Rate = Callable[[int, Tensor], Tensor]  # (round, step (K, S) counted over all rounds) -> learning rate (K, S)


def constant(lr: float) -> Rate:
    """lr in every round."""
    return lambda number, tau: torch.full(tau.shape, lr)


def decayed(lr: float, decay: float) -> Rate:
    """lr * decay^(t - 1) in round t."""
    return lambda number, tau: torch.full(tau.shape, lr * decay ** (number - 1))


def strongly_convex(mu: float, gamma: float) -> Rate:
    """2 / (mu (gamma + tau)) at the tau-th local step, the schedule of Theorem 1."""
    return lambda number, tau: (2 / (mu * (gamma + tau.double()))).float()


def travel(plan: Plan, momentum: float) -> Tensor:
    """sum_j lr_j (1 - m^j) / (1 - m), the distance a client moves under a unit gradient: (K,), or () for one client.

    >>> plan = Plan(torch.zeros(2, 1), torch.ones(2, 1).bool(), torch.tensor([0.1, 0.1]), torch.zeros(2))
    >>> travel(plan, 0.0), travel(plan, 0.9)  # 0.1 + 0.1;  0.1 + 0.19
    (tensor(0.2000), tensor(0.2900))
    """
    speed = torch.cumsum(momentum ** torch.arange(plan.lr.shape[-1]).double(), 0).to(plan.lr.device)
    return (plan.lr * speed * plan.keep[..., 0]).sum(-1).float()


def moves(key: Tensor, batch: int) -> Tensor:
    """Draw crops and flips for a batch of B images per step: keys of steps (...) -> int64 (..., B, 3)."""
    return draws(rng.fold(rng.fold(key, AUGMENT)[..., None], torch.arange(batch, device=key.device)))


def draw_plan(
    partition: Partition, clients: Sequence[int], *, seed: int, number: int, epochs: int, batch: int, rate: Rate
) -> Plan:
    """Draw reshuffled batches per client and epoch, on the device of the partition; short last batches are kept."""
    device = partition.order.device
    k = torch.tensor(clients)
    key = rng.key(seed, "client", number, k)  # (K,)
    start, sizes = partition.start[k], partition.start[k + 1] - partition.start[k]
    most = int(sizes.max())
    batch = min(batch, most)
    # one shuffle per client and epoch: positions beyond the client's size are sorted to the end
    shuffles = rng.fold(rng.fold(key, SHUFFLE)[:, None], torch.arange(epochs)).to(device)  # (K, E)
    size = sizes.to(device)[:, None, None]
    order = rng.uniform(shuffles.flatten(), most).view(len(k), epochs, most)
    order = order.masked_fill(torch.arange(most, device=device) >= size, 2.0).argsort(dim=-1, stable=True)
    per_epoch = (sizes + batch - 1) // batch  # (K,) steps per epoch
    steps = torch.arange(epochs * int(per_epoch.max()))  # (S,)
    epoch = (steps // per_epoch[:, None]).clamp(max=epochs - 1).to(device)  # (K, S)
    first = (steps % per_epoch[:, None]).to(device) * batch  # (K, S)
    place = first[:, :, None] + torch.arange(batch, device=device)  # (K, S, B)
    keep = (place < size) & (steps < epochs * per_epoch[:, None]).to(device)[:, :, None]
    place = torch.minimum(place, size - 1)
    shuffled = order[torch.arange(len(k), device=device)[:, None, None], epoch[:, :, None], place]
    batches = partition.order[start.to(device)[:, None, None] + shuffled]
    tau = (number - 1) * (epochs * per_epoch)[:, None] + steps
    return Plan(batches, keep, rate(number, tau).to(device), rng.fold(rng.fold(key, STEP)[:, None], steps).to(device))


@dataclass(frozen=True, eq=False)
class Cohorts:
    """K clients per round, drawn without replacement from those with data.

    With one stratum, clients are drawn uniformly. Several strata contribute in proportion to their sizes, like
    the paper's 5 + 5, so that every round has the same mix.
    """

    strata: tuple[Tensor, ...]  # int64 client ids, each in ascending order
    counts: tuple[int, ...]  # number drawn per stratum
    seed: int
    dropout: float = 0.0  # probability that a drawn client is lost before it uploads

    def draw(self, number: int) -> tuple[list[int], list[int]]:
        """Clients that train in this round, in ascending order, and those that were drawn but dropped out."""
        drawn: list[int] = []
        for i, (ids, count) in enumerate(zip(self.strata, self.counts, strict=True)):
            drawn += [int(ids[j]) for j in sample(rng.key(self.seed, "cohort", number, i), len(ids), count)]
        drawn.sort()
        if not self.dropout:
            return drawn, []
        lost = rng.uniform(rng.key(self.seed, "dropout", number, torch.tensor(drawn)), 1)[:, 0] < self.dropout
        return [k for k, gone in zip(drawn, lost, strict=True) if not gone], [
            k for k, gone in zip(drawn, lost, strict=True) if gone
        ]


def uniform(partition: Partition, cohort: int, seed: int, dropout: float = 0.0) -> Cohorts:
    """Cohorts drawn uniformly from all clients with data."""
    return _cohorts([torch.nonzero(partition.sizes)[:, 0]], cohort, seed, dropout)


def stratified(partition: Partition, group: Tensor, cohort: int, seed: int, dropout: float = 0.0) -> Cohorts:
    """Cohorts drawn by strata; group (N,): the stratum of each client."""
    nonempty = partition.sizes > 0
    strata = [torch.nonzero(nonempty & (group == g))[:, 0] for g in range(int(group.max()) + 1)]
    return _cohorts([ids for ids in strata if len(ids)], cohort, seed, dropout)


def _cohorts(strata: list[Tensor], cohort: int, seed: int, dropout: float) -> Cohorts:
    available = sum(map(len, strata))
    if cohort > available:
        raise ValueError(f"cohort={cohort}: only {available} clients have data")
    return Cohorts(tuple(strata), tuple(apportion([len(ids) for ids in strata], cohort)), seed, dropout)


def apportion(sizes: Sequence[float], total: int) -> list[int]:
    """Integers in proportion to the sizes that add up to the total; the largest remainders are rounded up.

    >>> apportion([50, 25, 25], 10), apportion([1, 1, 1], 10)
    ([5, 3, 2], [4, 3, 3])
    """
    exact = [total * size / sum(sizes) for size in sizes]
    counts = [int(x) for x in exact]
    behind = sorted(range(len(sizes)), key=lambda i: (counts[i] - exact[i], i))
    for i in behind[: total - sum(counts)]:
        counts[i] += 1
    return counts


def sample(key: Tensor, n: int, k: int) -> list[int]:
    """Draw k of 0 .. n - 1 without replacement, in k draws (Floyd's algorithm)."""
    chosen: set[int] = set()
    for j, u in zip(range(n - k, n), rng.uniform(key[None], k)[0].double().tolist(), strict=True):
        guess = int(u * (j + 1))
        chosen.add(j if guess in chosen else guess)
    return sorted(chosen)
