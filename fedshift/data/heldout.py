"""Held-out examples of each client: a share of its training examples, or test examples of its owner."""

from dataclasses import replace

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.partition import Partition


def hold_out(partition: Partition, share: float, key: Tensor) -> tuple[Partition, Partition]:
    """Split a partition into training examples and held-out ones.

    From each client with two examples or more, round(share * n) examples are held out, at least one, and at least one
    is left. An example that several clients have is held out from all of them, or from none if one of them would have
    no other left.

    >>> partition = Partition(torch.arange(12), torch.tensor([0, 10, 11, 12]))
    >>> train, held = hold_out(partition, 0.2, rng.key(0, "held out"))
    >>> train.sizes.tolist(), held.sizes.tolist(), sorted([*train.order.tolist(), *held.order.tolist()])
    ([8, 1, 1], [2, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    """
    order, sizes = partition.order, partition.sizes
    count = int(order.max()) + 1 if len(order) else 0
    client = torch.repeat_interleave(torch.arange(partition.clients), sizes)
    draw = rng.uniform(key.view(1), count)[0][order]
    wanted = (share * sizes).round().long().clamp(min=1).minimum(sizes - 1).clamp(min=0)
    by_draw = draw.argsort(stable=True)
    ordered = by_draw[client[by_draw].argsort(stable=True)]  # places by client, and by draw within a client
    rank = torch.empty_like(ordered)
    rank[ordered] = torch.arange(len(ordered)) - partition.start[client[ordered]]
    held = torch.zeros(count, dtype=torch.bool)
    held[order[rank < wanted[client]]] = True
    bare = (client[~held[order]].bincount(minlength=partition.clients) == 0) & (sizes > 0)
    held[order[ordered[partition.start[1:][bare] - 1]]] = False  # the last drawn example of these clients
    train, out = (_part(order, client, chosen, partition.clients) for chosen in (~held[order], held[order]))
    return replace(train, owners=partition.owners, left_out=partition.left_out), out


def of_owners(partition: Partition, owner: Tensor, test_owner: Tensor) -> Partition:
    """Test examples of the owner of each client; ValueError if the examples of a client have several owners.

    >>> partition = Partition(torch.tensor([2, 3, 0]), torch.tensor([0, 2, 3, 3]))
    >>> found = of_owners(partition, torch.tensor([5, 5, 7, 7]), torch.tensor([5, 7, 6, 5]))
    >>> [found.of(client).tolist() for client in range(3)]
    [[1], [0, 3], []]
    """
    owners = owner.cpu()[partition.order]
    first = partition.start[:-1].clamp(max=max(0, len(owners) - 1))
    client_owner = torch.where(partition.sizes > 0, owners[first], -1)  # (N,)
    client = torch.repeat_interleave(torch.arange(partition.clients), partition.sizes)
    if bool((owners != client_owner[client]).any()):
        raise ValueError("the examples of a client have several owners")
    by_owner = test_owner.cpu().argsort(stable=True)
    ordered = test_owner.cpu()[by_owner]
    low, high = torch.searchsorted(ordered, client_owner), torch.searchsorted(ordered, client_owner, right=True)
    found = [by_owner[a:b] for a, b in zip(low.tolist(), high.tolist(), strict=True)]
    return Partition(torch.cat(found), torch.cat([torch.zeros(1, dtype=torch.int64), (high - low).cumsum(0)]))


def _part(order: Tensor, client: Tensor, chosen: Tensor, clients: int) -> Partition:
    """Partition of the chosen examples."""
    sizes = client[chosen].bincount(minlength=clients)
    return Partition(order[chosen], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
