"""Who trains in a round, on which examples, in which order, at what rate.

All of it is drawn from (seed, purpose, round, client), so no draw depends on who else trains, on the
engine, or on where a run was resumed; and a draw costs the cohort, not the population.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.augment import draws
from fedshift.data.partition import Partition

SHUFFLE, STEP, AUGMENT, ROUNDING = range(4)  # what keys are folded with


class Plan(NamedTuple):
    """The local steps of K clients, or of one without the leading axis; one with fewer than S keeps none at its end."""

    batches: Tensor  # (K, S, B) int64: examples, the kept ones of a batch first
    keep: Tensor  # (K, S, B) bool
    lr: Tensor  # (K, S)
    key: Tensor  # (K, S) int64: one for each step


Rate = Callable[[int, Tensor], Tensor]  # (round, step (K, S) counted over all rounds) -> learning rate (K, S)


def constant(lr: float) -> Rate:
    return lambda number, tau: torch.full(tau.shape, lr)


def decayed(lr: float, decay: float) -> Rate:
    """lr * decay^(t - 1) in round t"""
    return lambda number, tau: torch.full(tau.shape, lr * decay ** (number - 1))


def strongly_convex(mu: float, gamma: float) -> Rate:
    """2 / (mu (gamma + tau)) at the tau-th local step, the schedule of Theorem 1"""
    return lambda number, tau: (2 / (mu * (gamma + tau.double()))).float()


def travel(plan: Plan, momentum: float) -> Tensor:
    """sum_j lr_j (1 - m^j) / (1 - m), how far a client moves under a unit gradient: (K,), or () for one client.

    >>> plan = Plan(torch.zeros(2, 1), torch.ones(2, 1).bool(), torch.tensor([0.1, 0.1]), torch.zeros(2))
    >>> travel(plan, 0.0), travel(plan, 0.9)  # 0.1 + 0.1;  0.1 + 0.19
    (tensor(0.2000), tensor(0.2900))
    """
    speed = torch.cumsum(momentum ** torch.arange(plan.lr.shape[-1]).double(), 0).to(plan.lr.device)
    return (plan.lr * speed * plan.keep[..., 0]).sum(-1).float()


def moves(key: Tensor, batch: int) -> Tensor:
    """How each of so many images of every step is cropped and flipped: keys of steps (...) -> int64 (..., B, 3)."""
    return draws(rng.fold(rng.fold(key, AUGMENT)[..., None], torch.arange(batch, device=key.device)))


def draw_plan(
    partition: Partition, clients: Sequence[int], *, seed: int, number: int, epochs: int, batch: int, rate: Rate
) -> Plan:
    """Epochs of reshuffled batches for each client, drawn where the partition is; the short last batch is kept."""
    here = partition.order.device
    k = torch.tensor(clients)
    key = rng.key(seed, "client", number, k)  # (K,)
    start, sizes = partition.start[k], partition.start[k + 1] - partition.start[k]
    most = int(sizes.max())
    batch = min(batch, most)
    # one shuffle for each client and epoch: positions beyond the client's size are sorted to the end
    shuffles = rng.fold(rng.fold(key, SHUFFLE)[:, None], torch.arange(epochs)).to(here)  # (K, E)
    size = sizes.to(here)[:, None, None]
    order = rng.uniform(shuffles.flatten(), most).view(len(k), epochs, most)
    order = order.masked_fill(torch.arange(most, device=here) >= size, 2.0).argsort(dim=-1, stable=True)
    each = (sizes + batch - 1) // batch  # (K,) steps an epoch
    steps = torch.arange(epochs * int(each.max()))  # (S,)
    epoch = (steps // each[:, None]).clamp(max=epochs - 1).to(here)  # (K, S)
    place = (steps % each[:, None]).to(here)[:, :, None] * batch + torch.arange(batch, device=here)  # (K, S, B)
    keep = (place < size) & (steps < epochs * each[:, None]).to(here)[:, :, None]
    place = torch.minimum(place, size - 1)
    shuffled = order[torch.arange(len(k), device=here)[:, None, None], epoch[:, :, None], place]
    batches = partition.order[start.to(here)[:, None, None] + shuffled]
    tau = (number - 1) * (epochs * each)[:, None] + steps
    return Plan(batches, keep, rate(number, tau).to(here), rng.fold(rng.fold(key, STEP)[:, None], steps).to(here))


@dataclass(frozen=True, eq=False)
class Cohorts:
    """K clients a round, drawn without replacement among those that hold data.

    One stratum draws uniformly. Several are drawn from in proportion to their sizes, the paper's
    5 + 5: every round then has the same mix.
    """

    strata: tuple[Tensor, ...]  # int64 client ids, each in rising order
    counts: tuple[int, ...]  # drawn of each
    seed: int
    dropout: float = 0.0  # the probability that a drawn client is lost before it uploads

    def draw(self, number: int) -> tuple[list[int], list[int]]:
        """Clients that train in this round, in rising order, and those that were drawn but dropped out."""
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
    return _cohorts([torch.nonzero(partition.sizes)[:, 0]], cohort, seed, dropout)


def stratified(partition: Partition, group: Tensor, cohort: int, seed: int, dropout: float = 0.0) -> Cohorts:
    """group (N,): which stratum each client is in."""
    held = partition.sizes > 0
    strata = [torch.nonzero(held & (group == g))[:, 0] for g in range(int(group.max()) + 1)]
    return _cohorts([ids for ids in strata if len(ids)], cohort, seed, dropout)


def _cohorts(strata: list[Tensor], cohort: int, seed: int, dropout: float) -> Cohorts:
    able = sum(map(len, strata))
    if cohort > able:
        raise ValueError(f"cohort={cohort}: only {able} clients hold data")
    return Cohorts(tuple(strata), tuple(apportion([len(ids) for ids in strata], cohort)), seed, dropout)


def apportion(sizes: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the sizes that add up to the total: the largest remainders round up.

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
    """k of 0 .. n - 1 without replacement, in k draws (Floyd's algorithm)."""
    chosen: set[int] = set()
    for j, u in zip(range(n - k, n), rng.uniform(key[None], k)[0].double().tolist(), strict=True):
        guess = int(u * (j + 1))
        chosen.add(j if guess in chosen else guess)
    return sorted(chosen)
