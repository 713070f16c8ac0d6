"""Partitions: hand-worked splits, and the properties of the paper's partitions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.core import rng
from fedshift.data import Partition, dirichlet, iid, labels, load, natural, shards
from fedshift.data.partition import limited, listed

KEY = rng.key(0, "partition")
CIFAR10 = torch.arange(10).repeat(5000)[iid(torch.zeros(50_000), 1, rng.key(7, "test")).order]  # like its labels
LABELS = st.lists(st.integers(0, 9), min_size=1, max_size=300).map(torch.tensor)


def held(y: Tensor, p: Partition) -> list[list[int]]:
    """The labels of every client."""
    return [sorted(set(y[p.of(i)].tolist())) for i in range(p.clients)]


def well_formed(p: Partition, n: int) -> bool:
    inside = p.start[0] == 0 and p.start[-1] == len(p.order) and bool((p.sizes >= 0).all())
    return bool(inside) and (len(p.order) == 0 or set(p.order.tolist()) <= set(range(n)))


def test_shards_are_the_papers_for_cifar10_and_100_clients() -> None:
    p = shards(CIFAR10, 100, KEY)
    assert p.sizes.tolist() == [1000] * 100
    assert p.order.bincount().tolist() == [2] * 50_000
    pairs = {tuple(sorted((c, (c + 2) % 10))) for c in range(10)}
    for i in range(100):
        counts = CIFAR10[p.of(i)].bincount(minlength=10)
        present = tuple(counts.nonzero().flatten().tolist())
        assert present in pairs
        assert counts[list(present)].tolist() == [500, 500]
        assert all(label % 2 == i % 2 for label in present)


def test_shards_by_hand() -> None:
    """10 labels, 10 clients: shard c is label c, client holdings are {c, c + 2}; examples keep their order."""
    y = torch.tensor([9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    p = shards(y, 10, KEY)
    where = {
        0: [1, 10],
        1: [2, 11],
        2: [3, 12],
        3: [4, 13],
        4: [5, 14],
        5: [6, 15],
        6: [7, 16],
        7: [8, 17],
        8: [9, 18],
        9: [0, 19],
    }
    expected = [where[c] + where[(c + 2) % 10] for c in range(10)]
    assert sorted(p.of(i).tolist() for i in range(0, 10, 2)) == sorted(expected[0::2])
    assert sorted(p.of(i).tolist() for i in range(1, 10, 2)) == sorted(expected[1::2])


def test_shards_are_shuffled_within_their_parity() -> None:
    a, b = (held(CIFAR10, shards(CIFAR10, 100, rng.key(seed, "partition"))) for seed in (0, 1))
    assert a != b
    assert sorted(map(tuple, a)) == sorted(map(tuple, b))


@given(LABELS, st.integers(2, 40))
def test_shards_assign_every_example_to_two_clients(y: Tensor, clients: int) -> None:
    if clients > len(y):
        with pytest.raises(ValueError, match=rf"clients={clients}\): {len(y)} examples make at most {len(y)} shards"):
            shards(y, clients, KEY)
        return
    p = shards(y, clients, KEY)
    assert well_formed(p, len(y))
    assert p.order.bincount(minlength=len(y)).tolist() == [2] * len(y)
    assert p.sizes.max() - p.sizes.min() <= 2


@pytest.mark.parametrize("clients", [10, 50, 100, 1000])
def test_shards_of_unequal_labels_keep_the_parity_for_most(clients: int) -> None:
    y = load("digits").y
    p = shards(y, clients, KEY)
    client = torch.arange(clients).repeat_interleave(p.sizes)
    assert (y[p.order] % 2 == client % 2).double().mean() > 0.95


@given(st.integers(0, 300), st.integers(1, 40))
def test_iid_gives_every_example_once_and_sizes_that_differ_by_one_at_most(n: int, clients: int) -> None:
    p = iid(torch.zeros(n), clients, KEY)
    assert well_formed(p, n)
    assert p.order.sort()[0].tolist() == list(range(n))
    assert p.sizes.max() - p.sizes.min() <= 1


def test_iid_mixes_the_labels() -> None:
    """Each of 100 clients has 500 of 50,000; all ten labels are about 50 each, within five standard deviations."""
    p = iid(CIFAR10, 100, KEY)
    counts = torch.stack([CIFAR10[p.of(i)].bincount(minlength=10) for i in range(100)])
    assert ((counts - 50).abs() < 5 * 45**0.5).all()


@pytest.mark.parametrize("alpha", [0.1, 0.5, 100.0])
def test_dirichlet_gives_every_example_once_and_every_client_the_least(alpha: float) -> None:
    p = dirichlet(CIFAR10, 100, alpha, KEY)
    assert well_formed(p, 50_000)
    assert p.order.sort()[0].equal(torch.arange(50_000))
    assert p.sizes.min() >= 10


def test_dirichlet_is_more_even_the_larger_alpha() -> None:
    """Mean share of a client's commonest label: one half and more at 0.1, about one tenth at 100."""
    common = []
    for alpha in (0.1, 0.5, 100.0):
        p = dirichlet(CIFAR10, 100, alpha, KEY)
        counts = torch.stack([CIFAR10[p.of(i)].bincount(minlength=10) for i in range(100)]).double()
        common.append(float((counts.amax(1) / counts.sum(1)).mean()))
    assert common[0] > 0.5 > common[1] > common[2]
    assert common[2] < 0.15


def test_a_client_at_the_mean_size_gets_nothing_more() -> None:
    """Two labels of 50, two clients, the mean is 50: a share near one fills a client, and the other takes the rest."""
    y = torch.arange(2).repeat_interleave(50)
    p = dirichlet(y, 2, 1e-6, KEY)
    assert sorted(held(y, p)) == [[0], [1]]


def test_labels_are_balanced_over_clients_and_examples_over_holders() -> None:
    """100 clients of 2 labels: each label has 20 holders with 250 of its 5,000 examples."""
    p = labels(CIFAR10, 100, 2, KEY)
    assert p.order.sort()[0].equal(torch.arange(50_000))
    counts = torch.stack([CIFAR10[p.of(i)].bincount(minlength=10) for i in range(100)])
    assert set(counts.flatten().tolist()) == {0, 250}
    assert (counts > 0).sum(0).tolist() == [20] * 10
    assert (counts > 0).sum(1).tolist() == [2] * 100
    assert len({tuple(row) for row in (counts > 0).int().tolist()}) > 20  # not the same few pairs


@given(LABELS, st.integers(1, 40), st.data())
def test_labels_hold_for_any_counts(y: Tensor, clients: int, data: st.DataObject) -> None:
    many = len(set(y.tolist()))
    per_client = data.draw(st.integers(1, many))
    p = labels(y, clients, per_client, KEY)
    assert well_formed(p, len(y))
    assert len(set(p.order.tolist())) == len(p.order)
    assert all(len(h) <= per_client for h in held(y, p))
    if clients * per_client >= many:
        assert len(p.order) == len(y)


def test_clients_without_examples_are_allowed() -> None:
    y = torch.arange(3)
    assert iid(y, 5, KEY).sizes.sum() == 3
    assert sorted(labels(y, 5, 1, KEY).sizes.tolist()) == [0, 0, 1, 1, 1]


def test_labels_without_clients_are_left_out() -> None:
    y = torch.arange(10).repeat_interleave(3)
    p = labels(y, 2, 2, KEY)
    assert p.sizes.tolist() == [6, 6]
    assert len(set(y[p.order].tolist())) == 4


def test_the_key_decides() -> None:
    y = CIFAR10[:2000]
    splits: list[Callable[[Tensor], Partition]] = [
        lambda key: iid(y, 10, key),
        lambda key: shards(y, 100, key),
        lambda key: dirichlet(y, 10, 0.5, key),
        lambda key: labels(y, 10, 2, key),
    ]
    for split in splits:
        a, b, c = split(KEY), split(rng.key(0, "partition")), split(rng.key(1, "partition"))
        assert torch.equal(a.order, b.order)
        assert torch.equal(a.start, b.start)
        assert not (torch.equal(a.order, c.order) and torch.equal(a.start, c.start))


def test_labels_may_be_any_whole_numbers() -> None:
    y = torch.tensor([-7, 100, 40, 100, -7, 40] * 10)
    assert labels(y, 3, 1, KEY).sizes.tolist() == [20, 20, 20]
    assert dirichlet(y, 2, 1.0, KEY).sizes.sum() == 60


def test_impossible_arguments_are_refused() -> None:
    y = torch.arange(10).repeat(10)
    wishes: list[tuple[str, Callable[[], Partition]]] = [
        (r"dirichlet\(alpha=0\): alpha must be above 0", lambda: dirichlet(y, 5, 0.0, KEY)),
        (r"dirichlet\(alpha=-1\): alpha must be above 0", lambda: dirichlet(y, 5, -1.0, KEY)),
        (r"dirichlet\(alpha=nan\): alpha must be above 0", lambda: dirichlet(y, 5, float("nan"), KEY)),
        (r"dirichlet\(clients=11, least=10\): 100 examples are too few", lambda: dirichlet(y, 11, 1.0, KEY)),
        (r"dirichlet\(clients=20, alpha=0.001, least=5\): none of 1000 draws", lambda: dirichlet(y, 20, 0.001, KEY, 5)),
        (r"labels\(per_client=11\): must be between 1 and 10", lambda: labels(y, 5, 11, KEY)),
        (r"labels\(per_client=0\): must be between 1 and 10", lambda: labels(y, 5, 0, KEY)),
        (r"iid\(clients=0\): clients must be 1 or more", lambda: iid(y, 0, KEY)),
        (r"shards\(clients=1\): clients must be 2 or more", lambda: shards(y, 1, KEY)),
        (r"shards: needs one integer label per example, got torch.float32", lambda: shards(y.float(), 5, KEY)),
        (r"labels: needs one integer label .* of shape \(10, 10\)", lambda: labels(y.view(10, 10), 5, 1, KEY)),
    ]
    for match, split in wishes:
        with pytest.raises(ValueError, match=match):
            split()


def test_an_unknown_client_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Partition.of\(client=3\): clients are 0 to 2"):
        iid(torch.zeros(9), 3, KEY).of(3)


def test_a_natural_partition_has_a_client_per_owner_with_enough_examples() -> None:
    owner = torch.tensor([3, 0, 3, 1, 3, 0, 5])  # owners 2 and 4 have no training example
    p = natural(owner, 0, KEY, least=2)
    assert p.owners is not None
    assert (p.owners.tolist(), p.left_out) == ([0, 3], 4)
    assert [p.of(i).tolist() for i in range(2)] == [[1, 5], [0, 2, 4]]
    assert natural(owner, 0, KEY, least=0).sizes.tolist() == [2, 1, 3, 1]


def test_fewer_natural_clients_are_drawn_by_the_key_and_keep_their_order() -> None:
    owner = torch.arange(50).repeat_interleave(3)[torch.randperm(150)]
    drawn = {tuple(some_of(owner, 10, seed)) for seed in range(5)}
    assert len(drawn) == 5
    for chosen in drawn:
        assert list(chosen) == sorted(set(chosen))
        assert len(chosen) == 10
    assert some_of(owner, 50, 3) == some_of(owner, 0, 3) == list(range(50))


def some_of(owner: Tensor, clients: int, seed: int) -> list[int]:
    p = natural(owner, clients, rng.key(seed, "partition"))
    assert p.owners is not None
    assert all((owner[p.of(i)] == number).all() for i, number in enumerate(p.owners.tolist()))
    return p.owners.tolist()


def test_more_natural_clients_than_owners_are_refused() -> None:
    with pytest.raises(ValueError, match=r"clients=3, least=2\): 2 of 3 owners have 2 examples or more"):
        natural(torch.tensor([0, 0, 1, 2, 2]), 3, KEY, least=2)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any), st.integers(1, 12), st.integers(0, 99))
def test_a_limit_keeps_a_random_part_of_larger_clients(counts: list[int], most: int, seed: int) -> None:
    start = torch.tensor([0, *counts]).cumsum(0)
    whole = Partition(torch.randperm(sum(counts)), start, owners=torch.arange(len(counts)), left_out=2)
    p = limited(whole, most, rng.key(seed, "most"))
    assert p.sizes.tolist() == [min(n, most) for n in counts]
    assert p.owners is whole.owners
    assert p.left_out == 2
    for i in range(p.clients):
        kept = set(p.of(i).tolist())
        assert [x for x in whole.of(i).tolist() if x in kept] == p.of(i).tolist()


def test_the_examples_that_a_limit_keeps_do_not_depend_on_other_clients() -> None:
    order = torch.arange(60)
    p, alone = (limited(Partition(order[:n], torch.tensor([0, 30, n])), 5, KEY) for n in (60, 31))
    assert p.of(0).tolist() == alone.of(0).tolist()
    assert (
        p.of(0).tolist() != limited(Partition(order, torch.tensor([0, 30, 60])), 5, rng.key(1, "most")).of(0).tolist()
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], [5]], "client 1 has example 5; examples are 0 to 4"),
        ([[0, -1]], "client 0 has example -1"),
        ([[0.5]], "client 0 has torch.float32 of shape"),
        ([[[0]]], "client 0 has torch.int64 of shape \\(1, 1\\)"),
        ([[], []], "none of the 2 clients has examples"),
        ([], "there are no clients"),
    ],
)
def test_invalid_lists_of_examples_are_refused(parts: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        listed(parts, 5)


def test_lists_of_examples_are_a_partition() -> None:
    p = listed([torch.tensor([3, 1]), [], np.array([1], np.int32)], 4)
    assert [p.of(i).tolist() for i in range(3)] == [[3, 1], [], [1]]
