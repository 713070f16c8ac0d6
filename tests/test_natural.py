"""Natural clients and users' partitions: settings, runs, records, reports."""

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshift import Dataset, Experiment, dataset, resume, run
from fedshift.core.files import RunError
from fedshift.data.partition import Partition, checked
from fedshift.experiment.build import build, split
from fedshift.experiment.settings import check_used
from fedshift.experiment.toml import SettingsError
from fedshift.report.lines import grouped
from fedshift.report.what import section
from fedshift.runs.identity import RunIdentity
from fedshift.runs.packs import memory_needed
from fedshift.runs.recorded import Recorded, recorded
from fedshift.runs.summary import comparable
from tests.federations import points
from tests.runs import fedshift

SIZES = [2, 40, 9, 100, 10, 25, 3, 60, 31, 20]  # seven of ten have ten examples or more


def owned() -> Dataset:
    data = points(sum(SIZES), 30)
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    return dataset(data.x, data.y, data.test_x, data.test_y, name="owned", owner=owner, test_owner=owner[:30])


def settings(**changed: Any) -> Experiment:
    base: dict[str, Any] = {
        "data": {"partition": "natural"},
        "model": {"args": {"hidden": 8}},
        "train": {"rounds": 3, "cohort": 3, "epochs": 1},
        "engine": {"name": "sequential"},
        "uplink": {"bits": "32+4"},
    }
    return Experiment(**{key: base.get(key, {}) | changed.get(key, {}) for key in (*base, *changed)})


def test_the_number_of_clients_is_100_unless_it_follows_from_the_data() -> None:
    assert Experiment().data.clients == 100
    assert "clients" not in Experiment().data.model_fields_set
    assert settings().data.clients == settings(data={"partition": "my:own"}).data.clients == 0
    assert settings().changed(**{"data.partition": "iid"}).data.clients == 100
    assert comparable(settings())["data.clients"] == "all"
    with pytest.raises(SettingsError, match=r"data.clients = 0: must be 1 or more with partition = 'shards'"):
        Experiment(data={"clients": 0})


def test_all_owners_with_enough_examples_are_clients() -> None:
    fed = build(settings(), data=owned())
    assert fed.partition.sizes.tolist() == [size for size in SIZES if size >= 10]
    assert (fed.partition.left_out, len(fed.group)) == (3, 7)
    assert build(settings(data={"least": 0}), data=owned()).partition.clients == 10
    few = build(settings(data={"clients": 4, "most": 15}), data=owned()).partition
    assert few.clients == 4
    assert few.sizes.max() == 15


def test_the_cohort_is_checked_when_the_clients_are_known() -> None:
    with pytest.raises(
        SettingsError,
        match=r"train.cohort = 8: there are only 7 clients: 3 others have fewer than 10 examples \(data.least\)",
    ):
        build(settings(train={"cohort": 8}), data=owned())
    with pytest.raises(SettingsError, match=r"uplink.bits: 2 values; must be one per client \(data.clients = 7\)"):
        build(settings(uplink={"bits": [4, 4]}), data=owned())
    with pytest.raises(SettingsError, match=r"data.partition: natural\(clients=8, least=10\): 7 of 10 owners have 10"):
        build(settings(data={"clients": 8}), data=owned())
    with pytest.raises(SettingsError, match=r"0 of 10 owners have 1000 examples or more; lower data.least$"):
        build(settings(data={"least": 1000}), data=owned())
    with pytest.raises(SettingsError, match=r"data.partition = 'natural': points has no owners"):
        build(settings(), data=points())


def test_least_is_used_by_natural_partitions_and_most_by_all() -> None:
    check_used([settings(data={"least": 3, "most": 5})])
    with pytest.raises(SettingsError, match=r"without data.partition = 'dirichlet' or 'natural'"):
        check_used([Experiment(data={"least": 3})])
    p = split(settings(data={"clients": 4, "partition": "iid", "most": 7}), points())
    assert p.sizes.tolist() == [7] * 4


def test_a_natural_run_says_and_records_which_clients_were_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    with run(settings(), tmp_path / "a", data=owned()) as started:
        next(started)
    list(resume(tmp_path / "a", data=owned(), tell=told.append))
    whole = run(settings(), tmp_path / "b", data=owned())
    list(whole)
    assert "3 clients with fewer than 10 examples were left out" in told
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert models[0] == models[1]
    about = json.loads((tmp_path / "b" / "about.json").read_text())
    assert (about["clients"], about["left_out"]) == (7, 3)
    runs = [found for name in "ab" if isinstance(found := recorded(tmp_path / name), Recorded)]
    tables = {part.name: part for part in section(grouped(runs), runs, []).parts}
    assert [row.cells for row in tables["populations"].rows] == [  # type: ignore[union-attr]
        ["natural", "7", "286", "10 to 100, median 31", "3", "2"]
    ]


def test_a_run_is_not_resumed_with_other_owners(tmp_path: Path) -> None:
    with run(settings(), tmp_path, data=owned()) as started:
        next(started)
    data = owned()
    other = dataset(data.x, data.y, data.test_x, data.test_y, name="owned", owner=torch.arange(len(data.y)) // 30)
    with pytest.raises(Exception, match="the data are not those the run was started with"):
        resume(tmp_path, data=other)


OWN = """
    import torch

    def by_label(data, clients, key, labels=1):
        return [torch.nonzero((data.y // labels) == i)[:, 0] for i in range(clients or 4)]

    def wrong(data, clients, key):
        return [[0, 1000]]

    def broken(data, clients, key):
        raise KeyError("no such client")

    def nothing(data, clients, key):
        return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_partitions.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_partitions", raising=False)


@pytest.mark.usefixtures("module")
def test_a_users_partition_is_a_function_of_data_clients_and_key() -> None:
    fed = build(settings(data={"partition": "my_partitions:by_label"}), data=points())
    assert [set(points().y[fed.partition.of(i)].tolist()) for i in range(4)] == [{0}, {1}, {2}, {3}]
    config = {"partition": "my_partitions:by_label", "clients": 2, "partition_args": {"labels": 2}, "most": 100}
    p = split(settings(data=config, train={"cohort": 2}), points())
    assert (type(p), p.sizes.tolist()) == (Partition, [100, 100])


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"partition": "my_partitions:wrong"}, "data.partition = 'my_partitions:wrong': client 0 has example 1000"),
        ({"partition": "my_partitions:wrong", "partition_args": {"a": 1}}, "unexpected keyword argument 'a'"),
        ({"partition": "my_partitions:broken"}, "KeyError: 'no such client'"),
        ({"partition": "my_partitions:nothing"}, "data.partition = 'my_partitions:nothing': "),
        ({"partition": "my_partitions:absent"}, "no function 'absent' in my_partitions"),
    ],
)
def test_a_wrong_partition_of_a_user_is_one_sentence(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        build(settings(data=config), data=points())
    assert "\n" not in str(caught.value)


def test_a_users_partition_has_the_given_number_of_clients() -> None:
    with pytest.raises(SettingsError, match=r"partition_args = {'a': 1}: only a partition module:function takes them"):
        settings(data={"partition_args": {"a": 1}})
    with pytest.raises(SettingsError, match=r"returns 1 clients; data.clients is 5"):
        split(settings(data={"partition": "tests.test_natural:alone", "clients": 5}), points())


def alone(data: Dataset, clients: int, key: torch.Tensor) -> list[torch.Tensor]:
    """All examples at one client."""
    return [torch.arange(len(data.y))]


ORDER, START = torch.arange(4), torch.tensor([0, 2, 4])


@pytest.mark.parametrize(
    ("order", "start", "message"),
    [
        ([0, 1, 2, 400], START, "client 1 has example 400; examples are 0 to 299"),
        ([0, -1, 2, 3], START, "client 0 has example -1; examples are 0 to 299"),
        (ORDER, [0, 2, 9], "start must ascend from 0 to 4, the number of indices"),
        (ORDER, [0, 3, 2, 4], "start must ascend from 0 to 4"),
        (ORDER[:0], [0], "start must ascend from 0 to 0"),
        (ORDER[:0], [0, 0, 0], "none of the 2 clients has examples"),
        (ORDER.float(), START, r"order has torch.float32 of shape \(4,\); needs a tensor of whole numbers"),
        (ORDER, START.numpy(), "start has ndarray; needs a tensor of whole numbers"),
    ],
)
def test_a_partition_that_does_not_fit_the_examples_is_refused(order: Any, start: Any, message: str) -> None:
    order, start = (torch.tensor(x) if isinstance(x, list) else x for x in (order, start))
    with pytest.raises(ValueError, match=message):
        checked(Partition(order, start), 300)


def test_a_partition_passed_to_run_is_checked(tmp_path: Path) -> None:
    three = Partition(torch.tensor([0, 1, 9999]), torch.arange(4))
    with pytest.raises(SettingsError, match=r"data.partition: client 2 has example 9999; examples are 0 to"):
        run(settings(), tmp_path / "a", data=points(), partition=three)
    with pytest.raises(SettingsError, match=r"partition=\[\[0\], \[1\]\]: is of type list; must be a Partition"):
        run(settings(), tmp_path / "a", data=points(), partition=[[0], [1]])  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


def test_a_run_is_not_resumed_with_other_clients(tmp_path: Path) -> None:
    parts = [Partition(torch.arange(begin, begin + 90), torch.arange(0, 91, 30)) for begin in (0, 90)]
    with run(settings(), tmp_path, data=points(), partition=parts[0]) as started:
        next(started)
    clients = (tmp_path / "clients.csv").read_bytes()
    with pytest.raises(RunError, match="the examples of the clients are not those the run was started with"):
        resume(tmp_path, data=points(), partition=parts[1])
    assert (tmp_path / "clients.csv").read_bytes() == clients
    assert [outcome.number for outcome in resume(tmp_path, data=points(), partition=parts[0])][-1] == 3


def test_an_identity_of_an_earlier_version_has_no_partition() -> None:
    raw = RunIdentity.of(settings(), build(settings(), data=owned()), [])._asdict() | {"given": []}
    before = RunIdentity.parse({key: value for key, value in raw.items() if key != "partition"})
    assert before.partition == ""
    before.compare(RunIdentity.parse(raw), Path())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda owner: owner - 1, r"owner has torch.int64 of shape \(300,\); needs whole numbers from 0"),
        (lambda owner: owner.float(), r"owner has torch.float32 of shape \(300,\); needs whole numbers from 0"),
        (lambda owner: owner[:-1], "owned has 299 owners for 300 examples; needs one per example"),
    ],
)
def test_wrong_owners_of_a_data_set_are_refused(change: Any, message: str) -> None:
    data = owned()
    with pytest.raises(SettingsError, match=message):
        build(settings(), data=replace(data, owner=change(data.owner)))


def test_the_memory_of_a_pack_counts_natural_clients() -> None:
    config = settings(algorithm={"name": "scaffold"})
    fed = build(config, data=owned())
    p = sum(x.numel() for x in fed.task.params.values())
    more = memory_needed(config, fed.task, 0) - memory_needed(config.changed(**{"data.clients": 3}), fed.task, 0)
    assert more == 4 * 4 * p


def test_a_folder_of_clients_is_run_by_the_command(tmp_path: Path) -> None:
    data, begin = points(sum(SIZES), 30), 0
    (tmp_path / "clients").mkdir()
    for i, size in enumerate(SIZES):
        part = slice(begin, begin := begin + size)
        x, y, test_x, test_y = (
            data.x[part],
            data.y[part],
            data.test_x[3 * i : 3 * i + 3],
            data.test_y[3 * i : 3 * i + 3],
        )
        np.savez(tmp_path / "clients" / f"{i}.npz", x=x, y=y, test_x=test_x, test_y=test_y)
    text = settings(data={"partition": "natural", "name": str(tmp_path / "clients")}).toml()
    (tmp_path / "a.toml").write_text(text)
    done = fedshift("run", str(tmp_path / "a.toml"), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0
    assert "3 clients with fewer than 10 examples were left out" in done.output
