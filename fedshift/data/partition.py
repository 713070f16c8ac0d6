"""Partitions: assign the examples of a training set to N clients, by their labels or by their owners."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift.core import rng

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes of indices
DRAWS = 1000  # of Dirichlet shares, before a minimum size is reported as unreachable


@dataclass(frozen=True, eq=False)
class Partition:
    """Client i has examples order[start[i] : start[i + 1]].

    >>> p = Partition(torch.tensor([4, 2, 0]), torch.tensor([0, 1, 1, 3]))
    >>> p.clients, p.sizes.tolist(), p.of(2).tolist()
    (3, [1, 0, 2], [2, 0])
    """

    order: Tensor  # int64: indices of examples, client by client
    start: Tensor  # int64 (N + 1,)
    owners: Tensor | None = None  # int64 (N,): owner of the examples of each client, in a natural partition
    left_out: int = 0  # owners with too few examples, in a natural partition
    _elsewhere: dict[torch.device, "Partition"] = field(default_factory=dict, init=False, repr=False)

    @property
    def clients(self) -> int:
        return len(self.start) - 1

    @property
    def sizes(self) -> Tensor:
        """Number of examples per client (N,)."""
        return self.start.diff()

    def at(self, device: torch.device) -> "Partition":
        """Partition with the indices of examples on a device, where draws are made."""
        if device == self.order.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(self, order=self.order.to(device))
        return self._elsewhere[device]

    def of(self, client: int) -> Tensor:
        """Indices of the examples of a client."""
        if not 0 <= client < self.clients:
            raise ValueError(f"Partition.of(client={client}): clients are 0 to {self.clients - 1}")
        return self.order[self.start[client] : self.start[client + 1]]


def iid(y: Tensor, clients: int, key: Tensor) -> Partition:
    """Shuffle the examples and cut them into N parts whose sizes differ by at most one.

    >>> iid(torch.zeros(7), 3, rng.key(0, "partition")).sizes.tolist()
    [2, 2, 3]
    """
    _check("iid", clients)
    return Partition(_shuffle(len(y), key), _cuts(len(y), clients))


def shards(y: Tensor, clients: int, key: Tensor) -> Partition:
    """The paper's main partition: two labels of one parity per client, even labels for even ids.

    The examples are sorted by label (examples of one label keep their order) and cut into N shards of
    nearly equal size. With C labels, a distance of two labels is a distance of 2N/C shards, so for i = 0 .. N - 1

        holding i = shard i + shard (i + d mod N),    d = 2N/C rounded, at least 1,

    and every example is in two holdings. The half of the holdings with the smallest share of odd labels is
    shuffled over the even client ids, the other half over the odd ids.

    For CIFAR-10 and 100 clients: shards of 500 images, d = 20, 1,000 images of two labels of the id's parity
    each. If shards and labels have different boundaries (unequal counts, N/C not an integer), a shard contains two
    labels, and if the number of labels is odd, the last two are combined with the first two: parity then holds
    for most examples, not for all.

    >>> y = torch.arange(10).repeat_interleave(4)
    >>> p = shards(y, 20, rng.key(0, "partition"))
    >>> [sorted(set(y[p.of(i)].tolist())) for i in range(4)]
    [[0, 8], [1, 9], [2, 4], [7, 9]]
    """
    _check("shards", clients, least=2)
    label, classes = _labels("shards", y)
    n = len(label)
    if clients > n:
        raise ValueError(f"shards(clients={clients}): {n} examples make at most {n} shards")
    d = max(1, round(2 * clients / classes)) % clients or 1
    by_label, cut, shard = label.argsort(stable=True), _cuts(n, clients), torch.arange(clients)
    odd = torch.cat([torch.zeros(1, dtype=torch.int64), (y.cpu().long()[by_label] % 2).cumsum(0)])[cut].diff()  # (N,)
    share = (odd + odd.roll(-d)) / (cut.diff() + cut.diff().roll(-d))
    rank = share.argsort(stable=True)
    half = (clients + 1) // 2
    first = torch.empty_like(shard)  # (N,) the shard i of each client id
    first[0::2] = rank[:half][_shuffle(half, rng.fold(key, 0))]
    first[1::2] = rank[half:][_shuffle(clients - half, rng.fold(key, 1))]
    held = torch.stack([first, (first + d) % clients], dim=1).view(-1)  # (2N,) shards, client after client
    size = cut.diff()[held]
    order = by_label[_ranges(cut[held], size)]
    return Partition(order, _starts(size.view(clients, 2).sum(1)))


def dirichlet(y: Tensor, clients: int, alpha: float, key: Tensor, least: int = 10) -> Partition:
    """For every label, p ~ Dirichlet(alpha), and client i gets the share p_i of its examples.

    For clients that already have n/N examples or more, p_i is set to zero and the rest is scaled up; everything
    is redrawn until every client has at least `least` examples. Small alphas give a client few labels, large ones
    the same mix to all. As in the paper (and after Li et al. 2022, NIID-Bench).

    >>> y = torch.arange(10).repeat_interleave(100)
    >>> p = dirichlet(y, 5, 0.5, rng.key(0, "partition"))
    >>> bool(p.sizes.min() >= 10), p.order.sort()[0].equal(torch.arange(1000))
    (True, True)
    """
    _check("dirichlet", clients)
    if not 0 < alpha <= 1e12:
        raise ValueError(f"dirichlet(alpha={alpha:g}): alpha must be above 0 and at most 1e12")
    label, classes = _labels("dirichlet", y)
    n = len(label)
    if least * clients > n:
        raise ValueError(f"dirichlet(clients={clients}, least={least}): {n} examples are too few")
    of_label = label.bincount(minlength=classes).tolist()
    generator = np.random.default_rng(int(key) & (1 << 64) - 1)  # counter-based draws do not support gamma variates
    for _ in range(DRAWS):
        p = generator.dirichlet(np.full(clients, alpha), size=classes)  # (C, N)
        if (counts := _counts(p, of_label)) is not None and counts.sum(0).min() >= least:
            return _deal(label, torch.from_numpy(counts), key)
    raise ValueError(
        f"dirichlet(clients={clients}, alpha={alpha:g}, least={least}): none of {DRAWS} draws gave every client "
        f"{least} examples; try a larger alpha, fewer clients or a smaller least"
    )


def _counts(p: NDArray[np.float64], of_label: list[int]) -> NDArray[np.int64] | None:
    """Numbers of examples from shares (C, N); None if a label has shares only for full clients."""
    held, mean = np.zeros(p.shape[1], np.int64), sum(of_label) / p.shape[1]
    counts = np.empty(p.shape, np.int64)
    for c, total in enumerate(of_label):
        p_c = p[c] * (held < mean)
        if not p_c.sum() > 0:
            return None
        cut = (p_c.cumsum() / p_c.sum() * total).astype(np.int64)
        cut[np.flatnonzero(p_c)[-1] :] = total  # the rest from rounding goes to the last client with a share
        counts[c] = np.diff(cut, prepend=0)
        held += counts[c]
    return counts


def labels(y: Tensor, clients: int, per_client: int, key: Tensor) -> Partition:
    """Every client has `per_client` labels, and the examples of a label are split evenly among its clients.

    Clients choose in turn, at random among the labels chosen least often before, so the numbers of clients per
    label differ by at most one. No example is assigned twice; labels that no client has, if N * per_client is less
    than the number of labels, are left out.

    >>> y = torch.arange(10).repeat_interleave(100)
    >>> p = labels(y, 20, 2, rng.key(0, "partition"))
    >>> {len(y[p.of(i)].unique()) for i in range(20)}, p.sizes.unique().tolist()
    ({2}, [50])
    """
    _check("labels", clients)
    label, classes = _labels("labels", y)
    if not 1 <= per_client <= classes:
        raise ValueError(f"labels(per_client={per_client}): must be between 1 and {classes}, the number of labels")
    tie = rng.uniform(rng.fold(key, torch.arange(clients)), classes).double().numpy()  # (N, C), below 1
    holds = np.zeros((clients, classes), bool)
    chosen = np.zeros(classes)
    for i in range(clients):
        picks = (chosen + tie[i]).argsort(kind="stable")[:per_client]
        holds[i, picks] = True
        chosen[picks] += 1
    held = torch.from_numpy(holds.T)  # (C, N)
    holders = held.sum(1, keepdim=True).clamp_(min=1)
    total = label.bincount(minlength=classes)[:, None]
    turn = held.cumsum(1)  # 1 .. holders
    counts = (turn * total // holders - (turn - 1) * total // holders) * held
    return _deal(label, counts, key)


def natural(owner: Tensor, clients: int, key: Tensor, least: int = 1, owners: int = 0) -> Partition:
    """One client per owner with at least `least` examples; of these, `clients` drawn at random, or all with 0.

    Clients are in the order of their owners, and examples of a client keep their order. There are at least `owners`
    owners: those without examples are counted among those that are left out.

    >>> p = natural(torch.tensor([2, 0, 2, 1, 2, 0]), 0, rng.key(0, "partition"), least=2)
    >>> p.owners.tolist(), p.left_out, [p.of(i).tolist() for i in range(p.clients)]
    ([0, 2], 1, [[1, 5], [0, 2, 4]])
    """
    if owner.dim() != 1 or owner.dtype not in INTEGERS or (len(owner) and int(owner.min()) < 0):
        raise ValueError(f"owner has {owner.dtype} of shape {tuple(owner.shape)}; needs whole numbers from 0")
    sizes = owner.bincount(minlength=owners)
    enough = torch.nonzero(sizes >= max(least, 1))[:, 0]
    if clients > len(enough) or not len(enough):
        have = f"{len(enough)} of {len(sizes)} owners have {max(least, 1)} examples or more"
        lower = "data.least or data.clients" if clients and len(enough) else "data.least"
        raise ValueError(f"natural(clients={clients}, least={least}): {have}; lower {lower}")
    left_out = len(sizes) - len(enough)
    if clients:
        enough = enough[_shuffle(len(enough), key)[:clients]].sort().values
    order = owner.argsort(stable=True)[_ranges(_starts(sizes)[enough], sizes[enough])]
    return Partition(order, _starts(sizes[enough]), enough, left_out)


def limited(partition: Partition, most: int, key: Tensor) -> Partition:
    """The same with at most `most` examples per client, drawn at random; the kept ones keep their order.

    >>> p = limited(Partition(torch.arange(5), torch.tensor([0, 1, 5])), 2, rng.key(0, "most"))
    >>> p.sizes.tolist()
    [1, 2]
    """
    if int(partition.sizes.max()) <= most:
        return partition
    client = torch.arange(partition.clients).repeat_interleave(partition.sizes)
    draws = rng.uniform(key.view(1), int(partition.order.max()) + 1)[0][partition.order]  # one per example
    drawn = draws.argsort(stable=True)
    drawn = drawn[client[drawn].argsort(stable=True)]  # by client, then by draw
    rank = torch.arange(len(drawn)) - partition.start[:-1].repeat_interleave(partition.sizes)
    kept = drawn[rank < most].sort().values
    return replace(partition, order=partition.order[kept], start=_starts(partition.sizes.clamp(max=most)))


def listed(parts: Sequence[Any], examples: int) -> Partition:
    """Partition from the indices of each client's examples, after a check that they are below `examples`.

    >>> listed([[0, 2], [1]], 3).sizes.tolist()
    [2, 1]
    """
    if isinstance(parts, str | bytes) or not isinstance(parts, Sequence | Tensor | np.ndarray):
        raise ValueError(
            f"returns {type(parts).__name__}; must be a Partition, or a list with the indices of each client's examples"
        )
    if not len(parts):
        raise ValueError("there are no clients; must be one or more")
    indices = []
    for i, part in enumerate(parts):
        try:
            indices.append(torch.as_tensor(part))
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"client {i} has {type(part).__name__}; needs a list of indices") from None
    for i, part in enumerate(indices):
        if part.dim() != 1 or (len(part) and part.dtype not in INTEGERS):
            raise ValueError(f"client {i} has {part.dtype} of shape {tuple(part.shape)}; needs a list of indices")
        if wrong := [x for x in (part.min().item(), part.max().item()) if not 0 <= x < examples] if len(part) else []:
            raise ValueError(f"client {i} has example {wrong[0]}; examples are 0 to {examples - 1}")
    if not any(map(len, indices)):
        raise ValueError(f"none of the {len(indices)} clients has examples; at least one client must have some")
    order = torch.cat([part.long().cpu() for part in indices])
    return Partition(order, _starts(torch.tensor([len(part) for part in indices])))


def checked(partition: Partition, examples: int) -> Partition:
    """The partition with int64 indices on the CPU; ValueError if it is not one of `examples` examples.

    >>> checked(Partition(torch.tensor([0, 2]), torch.tensor([0, 1, 2])), 3).sizes.tolist()
    [1, 1]
    """
    for name, x in (("order", partition.order), ("start", partition.start)):
        if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in INTEGERS:
            seen = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} has {seen}; needs a tensor of whole numbers, in one dimension")
    order, start = partition.order.long().cpu(), partition.start.long().cpu()
    if len(start) < 2 or start[0] != 0 or start[-1] != len(order) or bool((start.diff() < 0).any()):
        raise ValueError(f"start must ascend from 0 to {len(order)}, the number of indices")
    if not len(order):
        raise ValueError(f"none of the {len(start) - 1} clients has examples; at least one client must have some")
    if wrong := [x for x in (int(order.min()), int(order.max())) if not 0 <= x < examples]:
        client = int(torch.searchsorted(start, int((order == wrong[0]).nonzero()[0]), right=True)) - 1
        raise ValueError(f"client {client} has example {wrong[0]}; examples are 0 to {examples - 1}")
    same = order is partition.order and start is partition.start
    return partition if same else replace(partition, order=order, start=start)


def _deal(label: Tensor, counts: Tensor, key: Tensor) -> Partition:
    """Assign counts[c, i] random examples of label c to client i; the remaining examples are left out."""
    classes, clients = counts.shape
    shuffled = _shuffle(len(label), key)
    by_label = shuffled[label[shuffled].argsort(stable=True)]
    rest = label.bincount(minlength=classes) - counts.sum(1)
    counts = torch.cat([counts, rest[:, None]], dim=1)  # for one more client, which is dropped
    owner = torch.arange(clients + 1).repeat(classes).repeat_interleave(counts.view(-1))
    start = _starts(counts.sum(0)[:-1])
    return Partition(by_label[owner.argsort(stable=True)][: int(start[-1])], start)


def _shuffle(n: int, key: Tensor) -> Tensor:
    return rng.uniform(key.view(1).cpu(), n)[0].argsort(stable=True)


def _cuts(n: int, parts: int) -> Tensor:
    """(parts + 1,): boundaries of n examples cut into parts whose sizes differ by at most one."""
    return torch.arange(parts + 1) * n // parts


def _starts(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _ranges(start: Tensor, size: Tensor) -> Tensor:
    """Concatenated ranges start[i] .. start[i] + size[i] - 1."""
    return torch.arange(int(size.sum())) + (start - _starts(size)[:-1]).repeat_interleave(size)


def _labels(where: str, y: Tensor) -> tuple[Tensor, int]:
    """y as consecutive labels 0 .. C - 1, in the order of its C labels."""
    if y.dim() != 1 or not len(y) or y.is_floating_point() or y.is_complex():
        raise ValueError(f"{where}: needs one integer label per example, got {y.dtype} of shape {tuple(y.shape)}")
    values, label = np.unique(y.cpu().numpy(), return_inverse=True)
    return torch.from_numpy(label), len(values)


def _check(where: str, clients: int, least: int = 1) -> None:
    if clients < least:
        raise ValueError(f"{where}(clients={clients}): clients must be {least} or more")
