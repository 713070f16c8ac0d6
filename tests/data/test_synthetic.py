"""Synthetic(alpha, beta): sizes, distributions, and runs by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.data import DataError, load
from fedshift.data.shakespeare import shakespeare
from fedshift.data.synthetic import synthetic
from tests.runs import fedshift

LARGE = 24  # the client with the most examples


def test_every_client_has_50_examples_or_more_and_a_tenth_for_testing() -> None:
    data = load("synthetic")
    assert data.owner is not None
    assert data.test_owner is not None
    train, test = data.owner.bincount(), data.test_owner.bincount()
    assert (len(train), len(test), data.classes, data.shape) == (30, 30, 10, (60,))
    sizes = train + test
    assert sizes.min() >= 50
    assert sizes.max() > 80 * sizes.min()
    assert ((0.9 * sizes.double()).long() == train).all()


def test_inputs_have_the_given_spread() -> None:
    """Features of one client: deviation j^-0.6; means of clients: N(B_k, 1), where B_k is 0 for beta = 0."""
    arrays = synthetic(beta=0.0)
    x = arrays["x"][arrays["owner"] == LARGE]
    assert x.std(0) == pytest.approx(np.arange(1, 61) ** -0.6, rel=0.06)
    means = np.stack([arrays["x"][arrays["owner"] == k].mean(0) for k in range(30)])
    assert means.std() == pytest.approx(1, abs=0.05)
    assert means.mean(1).std() == pytest.approx(60**-0.5, rel=0.3)
    far = synthetic(beta=10.0)
    assert np.stack([far["x"][far["owner"] == k].mean(0) for k in range(30)]).mean(1).std() > 5


def test_the_labels_of_a_client_are_those_of_a_linear_model() -> None:
    """A perceptron of several classes separates the examples of one client."""
    arrays = synthetic(clients=3, seed=5)
    x, y = (arrays[key][arrays["owner"] == 0].astype(float) for key in "xy")
    x, y = np.c_[x - x.mean(0), np.ones(len(x))], y.astype(int)
    w = np.zeros((61, 10))
    for _ in range(3000):
        wrong = (guess := (x @ w).argmax(1)) != y
        if not wrong.any():
            break
        for i in np.flatnonzero(wrong):
            w[:, y[i]] += x[i]
            w[:, guess[i]] -= x[i]
    assert not wrong.any()


def test_the_data_depend_on_the_arguments_alone() -> None:
    assert load("synthetic").checksum == load("synthetic", {"alpha": 1, "beta": 1.0, "clients": 30, "seed": 0}).checksum
    assert len({load("synthetic", args).checksum for args in ({}, {"seed": 1}, {"clients": 29}, {"beta": 0})}) == 4


def test_alpha_changes_no_label() -> None:
    """x (W + u) + b + u = x W + b + u (sum of x + 1): the same for all classes."""
    made = [synthetic(alpha=alpha, clients=5) for alpha in (0, 1, 3)]
    assert all(np.array_equal(arrays[key], made[0][key]) for arrays in made for key in arrays)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"alpha": -1}, "args.alpha = -1: must be a number from 0 to 1000"),
        ({"beta": "1"}, "args.beta = '1': must be a number"),
        ({"clients": 0}, "args.clients = 0: must be a whole number from 1 to 10,000"),
        ({"seed": 1.5}, "args.seed = 1.5: must be a whole number"),
        ({"gamma": 1}, "synthetic: unknown argument 'gamma'; known are alpha, beta, clients, seed"),
    ],
)
def test_wrong_arguments_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("synthetic", args)


def test_other_data_sets_take_no_arguments() -> None:
    with pytest.raises(DataError, match="digits: takes no arguments, got alpha"):
        load("digits", {"alpha": 1})


SETTINGS = """
[data]
name = "synthetic"
partition = "natural"
least = 50
most = 100
args = {alpha = 1.0, beta = 1.0}

[model.args]
hidden = 8

[train]
rounds = 2
cohort = 5
epochs = 1

[engine]
name = "sequential"

[sweep]
"data.args.beta" = [0.0, 1.0]
"""


def test_a_sweep_over_arguments_of_the_data_is_run_and_reported(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(SETTINGS)
    done = fedshift("run", tmp_path / "a.toml", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    runs = sorted(path.parent for path in (tmp_path / "out").glob("*/about.json"))
    assert len(runs) == 2
    checksums = {json.loads((path / "about.json").read_text())["data"] for path in runs}
    assert len(checksums) == 2
    for path in runs:
        sizes = [int(line.split(",")[2]) for line in (path / "clients.csv").read_text().splitlines()[1:]]
        assert min(sizes) >= 50
        assert max(sizes) == 100
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("stride", [0, 1.5, True, 10**20])
def test_a_wrong_stride_of_shakespeare_is_refused(stride: Any) -> None:
    with pytest.raises(DataError, match=r"args.stride = .*: must be a whole number from 1 to 1,000,000"):
        shakespeare({}, stride)


@pytest.mark.parametrize("positions", [0, 81, 1.5, True])
def test_a_wrong_number_of_targets_per_window_is_refused(positions: Any) -> None:
    with pytest.raises(DataError, match=r"args.positions = .*: must be a whole number from 1 to 80"):
        shakespeare({}, positions=positions)


@pytest.mark.parametrize("positions", [2, 80])
def test_targets_of_a_window_are_the_characters_after_its_last_positions(positions: int) -> None:
    speech = "BOB.\n" + "the quick brown fox jumps over the lazy dog " * 9
    play = {"a": f"ACT I.\n\n{speech}\n\nBOB.\n{speech}"}
    one, several = shakespeare(play, 80), shakespeare(play, 80, positions)
    for x, y in ("x", "y"), ("test_x", "test_y"):
        assert several[y].shape == (len(one[y]), positions)
        assert several[x].tolist() == one[x].tolist()
        assert several[y][:, -1].tolist() == one[y].tolist()
        assert several[y][:, :-1].tolist() == one[x][:, 81 - positions :].tolist()
