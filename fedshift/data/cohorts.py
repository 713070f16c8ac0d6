"""Clients of a round, and the order and learning rates of their local steps.

All draws depend on (seed, purpose, round, client) only, not on the other clients, the engine, or the round in
which a run was resumed; their cost depends on the size of the cohort, not of the population.
"""

import math
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


# (round, step of the round (S,), counted from 0, steps of each client per round (K, 1)) -> learning rate (K, S)
Rate = Callable[[int, Tensor, Tensor], Tensor]


def constant(lr: float) -> Rate:
    """lr in every round."""
    return lambda number, step, count: torch.full((len(count), len(step)), lr)


def decayed(lr: float, decay: float) -> Rate:
    """lr * decay^(t - 1) in round t."""
    return lambda number, step, count: constant(lr * decay ** (number - 1))(number, step, count)


def stepped(lr: float, factor: float, milestones: Sequence[int]) -> Rate:
    """lr * factor^m in a round that follows m milestones; the milestone 30 is the end of round 30."""

    def rate(number: int, step: Tensor, count: Tensor) -> Tensor:
        passed = sum(milestone < number for milestone in milestones)
        return constant(lr * factor**passed)(number, step, count)

    return rate


def cosine(lr: float, final: float, rounds: int) -> Rate:
    """lr * (final + (1 - final) (1 + cos(pi (t - 1) / T)) / 2) in round t of T."""

    def rate(number: int, step: Tensor, count: Tensor) -> Tensor:
        factor = final + (1 - final) * (1 + math.cos(math.pi * (number - 1) / rounds)) / 2
        return constant(lr * factor)(number, step, count)

    return rate


def strongly_convex(mu: float, gamma: float) -> Rate:
    """2 / (mu (gamma + tau)) at the tau-th local step, counted over all rounds: the schedule of Theorem 1."""
    return lambda number, step, count: (2 / (mu * (gamma + ((number - 1) * count + step).double()))).float()


def warmed_up(rate: Rate, rounds: int) -> Rate:
    """rate * t / (W + 1) in the first W rounds, then rate."""
    return lambda number, step, count: rate(number, step, count) * min(1.0, number / (rounds + 1))


def annealed(rate: Rate, factor: Callable[[Tensor], Tensor]) -> Rate:
    """rate * factor(j / S) at step j of the S steps of a client in a round."""
    return lambda number, step, count: rate(number, step, count) * factor((step / count).clamp(max=1.0))


# factor of the learning rate at the part x of a round, 0 <= x < 1
LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + torch.cos(math.pi * x)) / 2,
}


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
    partition: Partition,
    clients: Sequence[int],
    *,
    seed: int,
    number: int,
    epochs: int,
    batch: int,
    rate: Rate,
    steps: int | None = None,
) -> Plan:
    """Draw the batches of each client from a new shuffle per pass over its data, on the device of the partition.

    A pass of a client with n examples is one epoch: ceil(n / batch) steps, of which the last may be short. With `steps`
    instead of epochs, every step has min(batch, n) examples: a pass is floor(n / that) steps, and the rest of the
    shuffle is not used.
    """
    device = partition.order.device
    k = torch.tensor(clients)
    key = rng.key(seed, "client", number, k)  # (K,)
    sizes = partition.start[k + 1] - partition.start[k]
    width = sizes.clamp(max=batch)  # (K,) examples per step
    per_pass = (sizes + width - 1) // width if steps is None else sizes // width  # (K,) steps
    passes = torch.full_like(sizes, epochs) if steps is None else (steps + per_pass - 1) // per_pass
    count = passes * per_pass if steps is None else torch.full_like(sizes, steps)  # (K,) steps per round
    # examples of pass p of client k: order[first[k] + p n_k:][:n_k]
    order, first = _shuffled(rng.fold(key, SHUFFLE), passes, sizes, device)
    step = torch.arange(int(count.max()))  # (S,)
    n, begin = sizes[:, None], (step % per_pass[:, None]) * width[:, None]
    left = torch.where(step < count[:, None], torch.minimum(n - begin, width[:, None]), 0)  # (K, S) examples
    start = first[:, None] + torch.minimum(step // per_pass[:, None], passes[:, None] - 1) * n
    within = torch.arange(int(width.max()), device=device)  # (B,)
    keep = within < left.to(device)[:, :, None]
    place = torch.minimum(begin.to(device)[:, :, None] + within, (n - 1).to(device)[:, :, None])
    shuffled = order[start.to(device)[:, :, None] + place]
    batches = partition.order[partition.start[k].to(device)[:, None, None] + shuffled]
    lr = rate(number, step, count[:, None])
    return Plan(batches, keep, lr.to(device), rng.fold(rng.fold(key, STEP)[:, None], step).to(device))


def _shuffled(key: Tensor, passes: Tensor, sizes: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Shuffle 0 .. n_k - 1 for each pass of each client: all shuffles in one row, and the first place of each client.

    key, passes, sizes (K,) -> (sum_k passes_k n_k,), (K,)
    """
    lengths = torch.repeat_interleave(sizes, passes)  # (P,) of all passes
    ends = lengths.cumsum(0)
    first = ends - lengths
    client = torch.repeat_interleave(torch.arange(len(sizes)), passes)
    of_client = (passes.cumsum(0) - passes)[client]  # number of the client's first pass
    keys = rng.fold(key[client], torch.arange(len(client)) - of_client)
    total = int(ends[-1])
    row = torch.repeat_interleave(torch.arange(len(client)), lengths, output_size=total).to(device)
    place = torch.arange(total, device=device) - first.to(device)[row]
    # sorted by the number of the pass, then by a draw of 24 bits
    order = (row << 24 | rng.bits(keys.to(device)[row], place)).argsort(stable=True)
    return place[order], first[passes.cumsum(0) - passes]


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
