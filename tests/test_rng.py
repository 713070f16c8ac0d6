"""Draws depend on key and position alone."""

import torch

from fedshift.core import rng


def test_splitmix64_matches_its_reference() -> None:
    """SplitMix64 seeded with 0 begins e220a8397b1dcdaf 6e789e6aa1b965f4 06c45d188009454f (Vigna's splitmix64.c)."""
    drawn = [int(rng.fold(torch.tensor(0), i)) & (1 << 64) - 1 for i in range(3)]
    assert [f"{word:016x}" for word in drawn] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]


def test_a_stack_draws_what_its_rows_draw_alone() -> None:
    keys = rng.key(3, "upload", 5, torch.arange(4))
    stacked = rng.uniform(keys, 100)
    assert all(torch.equal(stacked[i], rng.uniform(keys[i : i + 1], 100)[0]) for i in range(4))


def test_a_draw_in_pieces_is_the_draw() -> None:
    key = rng.key(1, "x")[None]
    assert torch.equal(rng.uniform(key, 10), torch.cat([rng.uniform(key, 4), rng.uniform(key, 6, start=4)], dim=1))


def test_keys_differ_by_seed_purpose_round_and_client() -> None:
    keys = [
        rng.key(0, "a", 1, 2),
        rng.key(1, "a", 1, 2),
        rng.key(0, "b", 1, 2),
        rng.key(0, "a", 2, 1),
        rng.key(0, "a", 1),
    ]
    assert len({int(k) for k in keys}) == 5


def test_fold_leaves_its_key_alone() -> None:
    key = torch.tensor(5)
    rng.fold(key, 1)
    assert int(key) == 5


def test_draws_are_uniform() -> None:
    u = rng.uniform(rng.key(0, "uniform", torch.arange(10)), 100_000)
    assert 0 <= float(u.min()) <= float(u.max()) < 1
    counts = torch.histc(u.double().flatten(), 100, 0, 1)
    chi2 = float(((counts - 10_000) ** 2 / 10_000).sum())  # 99 degrees of freedom: 148 has probability 0.001
    assert chi2 < 148
