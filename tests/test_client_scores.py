"""Evaluation on held-out examples of each client: which examples, on every engine, in the record and the report."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

from fedshift import Dataset, Experiment
from fedshift.core import rng
from fedshift.data.heldout import hold_out, of_owners
from fedshift.data.partition import Partition
from fedshift.engines import Batched, Sequential
from fedshift.experiment.build import build
from fedshift.experiment.settings import check_used, run_number
from fedshift.experiment.toml import SettingsError
from fedshift.report.charts import Curves, Report, Table
from fedshift.report.gather import gather
from fedshift.report.page import render
from fedshift.rounds.evaluate import Held, client_chunks, spread
from fedshift.rounds.federation import Federation
from fedshift.runs.record import CLIENT_SCORES
from fedshift.runs.recorded import Recorded, recorded
from fedshift.runs.run import Run
from fedshift.runs.sweep import Sweep
from tests.federations import federation, points, processes, settings
from tests.report.written import settings as written
from tests.report.written import write
from tests.runs import fedshift

HELD: dict[str, Any] = {"per_client": True, "held_out": 0.25}


def lines(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def owned(tests: int = 60) -> Dataset:
    """Points with ten owners; the last owner has no test examples."""
    data = points(tests=tests)
    return replace(data, owner=torch.arange(240) % 10, test_owner=torch.arange(tests) % 9)


def natural(data: Dataset, owners: list[int]) -> Partition:
    """One client per listed owner."""
    assert data.owner is not None
    held = [torch.nonzero(data.owner == owner)[:, 0] for owner in owners]
    return Partition(torch.cat(held), torch.tensor([0, *(len(x) for x in held)]).cumsum(0))


# which examples are held out


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_a_share_of_each_client_is_held_out(share: float) -> None:
    sizes = [0, 1, 2, 3, 10, 100]
    partition = Partition(torch.randperm(116), torch.tensor([0, *sizes]).cumsum(0))
    train, held = hold_out(partition, share, rng.key(0, "held out"))
    expected = [min(max(round(share * n), 1), n - 1) if n > 1 else 0 for n in sizes]
    assert held.sizes.tolist() == expected
    for client in range(len(sizes)):
        parts = [*train.of(client).tolist(), *held.of(client).tolist()]
        assert sorted(parts) == sorted(partition.of(client).tolist())
    again = hold_out(partition, share, rng.key(0, "held out"))[1]
    assert torch.equal(held.order, again.order)
    assert not torch.equal(held.order, hold_out(partition, share, rng.key(1, "held out"))[1].order)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_every_client_keeps_an_example_even_if_it_shares_all_of_them(share: float) -> None:
    """Client i has examples i and i + 1; the last client has one, which its neighbour has as well."""
    pairs = torch.stack([torch.arange(40), torch.arange(1, 41)], 1).flatten()
    partition = Partition(torch.cat([pairs, torch.tensor([40])]), torch.tensor([*range(0, 81, 2), 81]))
    train, held = hold_out(partition, share, rng.key(0, "held out"))
    assert int(train.sizes.min()) == 1
    assert len(held.order) > 20
    assert not {*train.order.tolist()} & {*held.order.tolist()}
    assert (train.sizes + held.sizes).tolist() == partition.sizes.tolist()


def test_an_example_of_several_clients_is_held_out_from_all_of_them() -> None:
    """The partition by shards gives every example to two clients."""
    fed = federation(data={"clients": 12, "partition": "shards"}, evaluate=HELD)
    assert fed.held is not None
    assert not {*fed.partition.order.tolist()} & {*fed.held.examples.order.tolist()}
    assert int(fed.partition.sizes.min()) > 0
    whole = federation(data={"clients": 12, "partition": "shards"}).partition
    assert (fed.partition.sizes + fed.held.examples.sizes).tolist() == whole.sizes.tolist()


def test_nothing_is_held_out_unless_it_is_requested() -> None:
    plain = federation()
    assert plain.held is None
    assert torch.equal(plain.partition.order, federation(evaluate={}).partition.order)
    assert run_number(settings()) == run_number(settings(evaluate={"per_client": True, "every": 5}))
    assert run_number(settings()) != run_number(settings(evaluate=HELD))  # clients train on other examples


def test_test_examples_are_those_of_the_owner_of_each_client() -> None:
    data = owned()
    partition = natural(data, [7, 2, 9])  # some of the owners, in another order
    fed = build(settings(data={"clients": 3}, train={"cohort": 2}, evaluate={"per_client": True}), None, data,
                partition=partition)  # fmt: skip
    assert fed.held is not None
    assert not fed.held.train
    assert fed.partition is partition
    assert data.test_owner is not None
    for client, owner in enumerate([7, 2, 9]):
        expected = torch.nonzero(data.test_owner == owner)[:, 0]
        assert fed.held.examples.of(client).tolist() == expected.tolist()
    assert fed.held.examples.sizes.tolist()[2] == 0


def test_a_client_with_examples_of_two_owners_is_refused() -> None:
    partition = Partition(torch.tensor([0, 1]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="the examples of a client have several owners"):
        of_owners(partition, torch.tensor([0, 1]), torch.tensor([0]))


@pytest.mark.parametrize(
    ("raw", "data", "sentence"),
    [
        (
            {"per_client": True},
            points(),
            "evaluate.per_client = true: the test examples of points have no owners; hold out a share of each "
            "client's training examples with evaluate.held_out, for example 0.2",
        ),
        (
            {"per_client": True},
            owned(),
            "evaluate.per_client = true: the examples of a client have several owners; use data.partition = 'natural', "
            "or evaluate.held_out",
        ),
    ],
)
def test_clients_without_examples_of_their_own_are_refused(raw: dict[str, Any], data: Dataset, sentence: str) -> None:
    with pytest.raises(SettingsError) as problem:
        build(settings(evaluate=raw), None, data)
    assert str(problem.value) == sentence


def test_no_held_out_example_at_all_is_refused() -> None:
    data = points(n=12)  # one example per client
    with pytest.raises(SettingsError, match=r"^evaluate\.per_client = true: no client has held-out examples$"):
        build(settings(evaluate=HELD), None, data)


@pytest.mark.parametrize("name", ["every", "held_out"])
def test_settings_without_an_effect_are_refused(name: str) -> None:
    value = {"every": 5, "held_out": 0.5}[name]
    with pytest.raises(SettingsError, match=f"^evaluate.{name} = {value}: has no effect without evaluate.per_client"):
        check_used([Experiment(evaluate={name: value})])
    check_used([Experiment(evaluate={name: value, "per_client": True})])


# scores


def alone(fed: Federation, client: int) -> tuple[Tensor, Tensor]:
    """Outputs and labels of the held-out examples of one client."""
    assert fed.held is not None
    data, index = fed.task.data, fed.held.examples.of(client)
    x, y = (data.x, data.y) if fed.held.train else (data.test_x, data.test_y)
    with torch.no_grad():
        return fed.task.model.eval()(x[index]), y[index]


@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_scores_are_those_of_each_client_alone_on_every_engine(held_out: float) -> None:
    """Of 4,300 test examples, or of half of the training set; a client is in several chunks of 1,024 examples."""
    data = points(n=5000, tests=4300)
    data = replace(data, owner=torch.arange(5000) % 4, test_owner=(torch.arange(4300) % 5).clamp(max=3))
    metrics = ["accuracy", "loss", "perplexity", "f1"]
    experiment = settings(
        data={"clients": 4},
        train={"cohort": 2, "metrics": metrics},
        evaluate={"per_client": True, "held_out": held_out},
    )
    fed = build(experiment, None, data, partition=natural(data, [0, 1, 2, 3]))
    assert fed.held is not None
    params = fed.task.params
    expected = Sequential(fed.task).evaluate_clients(params, fed.held)
    engine = processes(fed.task, 2)
    assert engine.evaluate_clients(params, fed.held) == expected
    engine.close()
    stacked = Batched(fed.task).evaluate_clients(params, fed.held)
    assert stacked.examples == expected.examples == tuple(fed.held.examples.sizes.tolist())
    for ours, theirs in zip(stacked.values, expected.values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    accuracy, loss, perplexity, f1 = expected.values
    for client in range(4):
        outputs, labels = alone(fed, client)
        mean = float(nn.functional.cross_entropy(outputs.double(), labels))
        assert accuracy[client] == pytest.approx(float((outputs.argmax(1) == labels).double().mean()), abs=1e-12)
        assert loss[client] == pytest.approx(mean, rel=1e-5)
        assert perplexity[client] == pytest.approx(math.exp(mean), rel=1e-5)
        assert f1[client] == pytest.approx(f1_score(labels, outputs.argmax(1), average="macro"), abs=1e-12)


def test_many_clients_are_scored_in_few_forward_passes() -> None:
    data = points(n=2600, tests=60)
    fed = federation(dataset=data, data={"clients": 1300, "partition": "iid"}, evaluate={**HELD, "held_out": 0.5})
    assert fed.held is not None
    passes: list[int] = []
    fed.task.model.register_forward_hook(lambda module, inputs, output: passes.append(len(inputs[0])))
    scores = Sequential(fed.task).evaluate_clients(fed.task.params, fed.held)
    assert scores.examples == (1,) * 1300
    assert passes == [1024, 276]
    assert sum(len(chunk.sizes) for chunk in client_chunks(data, fed.held)) == 1300


def test_the_mean_over_the_clients_of_all_examples_is_the_score_on_all_of_them() -> None:
    """The weighted mean over clients of a mean over examples is the mean over all examples."""
    data = owned(tests=63)
    held = Held(of_owners(natural(data, [*range(9)]), data.owner, data.test_owner), train=False)  # type: ignore[arg-type]
    task = federation(dataset=data).task
    engine = Sequential(task)
    scores, whole = engine.evaluate_clients(task.params, held), engine.evaluate(task.params)
    assert spread(scores.values[0], scores.examples).weighted == pytest.approx(whole.metric / whole.examples)


def test_the_worst_tenth_follows_the_goal() -> None:
    """Of 21 clients, three are the worst tenth, rounded up."""
    values, examples = [x / 20 for x in range(21)], [1] * 21
    assert spread(values, examples).worst == pytest.approx((0 + 0.05 + 0.1) / 3)
    assert spread(values, examples, lower=True).worst == pytest.approx((1 + 0.95 + 0.9) / 3)
    assert spread(values, [0] * 20 + [5]).weighted == 1.0
    assert spread([0.25, 0.75], [1, 1]) == (0.5, 0.5, 0.25, 0.25)
    assert all(map(math.isnan, spread([math.nan], [0])))


# the record


def test_scores_of_clients_are_recorded(tmp_path: Path) -> None:
    experiment = settings(
        uplink={"bits": "32+4"},
        train={"metrics": ["accuracy", "f1"], "rounds": 5},
        evaluate=HELD | {"every": 2},
    )
    outcomes = list(Run(experiment, tmp_path / "run", data=points()))
    rounds = lines(tmp_path / "run" / "rounds.csv")
    assert [bool(line["clients.mean"]) for line in rounds] == [False, True, False, True, True]
    assert [outcome.clients is not None for outcome in outcomes] == [False, True, False, True, True]
    clients = lines(tmp_path / "run" / CLIENT_SCORES)
    assert list(clients[0]) == ["round", "client", "group", "examples", "accuracy", "metric.f1"]
    assert {line["round"] for line in clients} == {"5"}
    assert [line["client"] for line in clients] == [str(client) for client in range(12)]
    assert {line["examples"] for line in clients} == {"5"}  # a quarter of 20
    last = rounds[-1]
    scores = {line["client"]: float(line["accuracy"]) for line in clients}
    assert float(last["clients.mean"]) == pytest.approx(sum(scores.values()) / 12, rel=1e-4)
    assert float(last["clients.worst"]) == pytest.approx(sum(sorted(scores.values())[:2]) / 2, rel=1e-4, abs=1e-6)
    for group in ("32 bit", "4 bit"):
        members = [float(line["accuracy"]) for line in clients if line["group"] == group]
        assert float(last[f"clients.group.{group}"]) == pytest.approx(sum(members) / 6, rel=1e-4)
    described = {line["client"]: line["examples"] for line in lines(tmp_path / "run" / "clients.csv")}
    assert {*described.values()} == {"15"}  # examples that the clients train on


def test_equal_parts_of_the_clients_with_the_same_uplink_are_one_group(tmp_path: Path) -> None:
    list(Run(settings(uplink={"bits": "32+32"}, evaluate=HELD), tmp_path / "same", data=points()))
    assert not [name for name in lines(tmp_path / "same" / "rounds.csv")[0] if name.startswith("clients.group")]
    list(Run(settings(uplink={"bits": "32+32+4"}, evaluate=HELD), tmp_path / "mixed", data=points()))
    names = [name for name in lines(tmp_path / "mixed" / "rounds.csv")[0] if name.startswith("clients.group")]
    assert names == ["clients.group.32 bit", "clients.group.4 bit"]


def test_clients_without_held_out_examples_are_counted_and_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    data = owned()
    experiment = settings(data={"clients": 10}, evaluate={"per_client": True})
    outcomes = list(
        Run(experiment, tmp_path / "run", data=data, partition=natural(data, [*range(10)]), tell=told.append)
    )
    assert told == ["evaluate.per_client = true: 1 of 10 clients have no held-out examples"]
    assert [line["accuracy"] == "" for line in lines(tmp_path / "run" / CLIENT_SCORES)] == [False] * 9 + [True]
    scores = outcomes[-1].clients
    assert scores is not None
    assert math.isnan(scores.values[0][9])
    assert not math.isnan(float(lines(tmp_path / "run" / "rounds.csv")[-1]["clients.mean"]))


def test_a_damaged_line_of_scores_is_skipped_and_counted(tmp_path: Path) -> None:
    list(Run(settings(evaluate=HELD), tmp_path / "run", data=points()))
    path = tmp_path / "run" / CLIENT_SCORES
    content = path.read_text().split("\n")
    path.write_text("\n".join([*content[:3], "3,x,32 bit,5,0.5", *content[4:]]))
    found = recorded(tmp_path / "run")
    assert isinstance(found, Recorded)
    assert found.lost == {CLIENT_SCORES: 1}
    assert [client.client for client in found.client_scores] == [0, 1, *range(3, 12)]


def test_each_run_of_a_pack_has_its_own_held_out_examples(tmp_path: Path) -> None:
    raw: dict[str, Any] = {
        "data": {"clients": 12},
        "train": {"rounds": 2, "cohort": 4, "epochs": 1},
        "engine": {"name": "batched", "pack": 2},
        "evaluate": HELD,
        "sweep": {"seed": [0, 1]},
    }
    events = list(Sweep(raw, tmp_path / "grid").train(1, lambda: False))
    assert sum(event.kind == "done" for event in events) == 2
    for planned in Sweep(raw, tmp_path / "grid").runs:
        single = Run(planned.experiment.changed(**{"engine.name": "sequential"}))
        *_, last = single
        assert last.clients is not None
        found = [float(line["accuracy"]) for line in lines(planned.folder / CLIENT_SCORES)]
        sizes = [int(line["examples"]) for line in lines(planned.folder / CLIENT_SCORES)]
        assert tuple(sizes) == last.clients.examples
        assert found == pytest.approx(last.clients.values[0], abs=0.1)  # of about 60 examples


# the terminal and the report


def reported(folder: Path) -> Report:
    """Two settings of which one serves 4-bit clients worse; scores of four clients."""
    for bits, worst, coarse in (("32+32", 0.5, None), ("32+4", 0.25, 0.375)):
        raw = written(12, bits, False, evaluate={"per_client": True, "held_out": 0.2})
        figures: dict[str, Any] = {
            "clients.mean": 0.625,
            "clients.weighted": 0.5,
            "clients.worst": worst,
            "clients.std": 0.125,
        }
        groups = {"clients.group.32 bit": 0.875, "clients.group.4 bit": coarse} if coarse else {}
        write(folder / bits, raw, 0.625, figures=figures | groups)
        scores = [worst, 1.0, 0.5, None]
        cells = [f"12,{k},32 bit,{5 if x is not None else 0},{'' if x is None else x}" for k, x in enumerate(scores)]
        (folder / bits / CLIENT_SCORES).write_text("\n".join(["round,client,group,examples,accuracy", *cells, ""]))
    return gather([folder])


def test_the_report_says_whether_all_clients_are_served_equally(tmp_path: Path) -> None:
    report = reported(tmp_path)
    section = next(section for section in report.sections if section.name == "clients-scores")
    assert section.answer == [
        "32+32 bits: the mean accuracy of clients is 62.5 %, that of the worst tenth 50.0 %.",
        "32+4 bits: the mean accuracy of clients is 62.5 %, that of the worst tenth 25.0 %. "
        "By uplink, the worst first: 4 bit 37.5, 32 bit 87.5.",
        "Clients without a score are left out: up to 1 in a run.",
    ]
    table, ordered, by_round = section.parts
    assert isinstance(table, Table)
    assert table.columns == ["line", "mean", "weighted mean", "worst tenth", "deviation", "32 bit", "4 bit"]
    assert [row.cells for row in table.rows] == [
        ["32+32 bits", "62.5", "50.0", "50.0", "12.5", "", ""],
        ["32+4 bits", "62.5", "50.0", "25.0", "12.5", "87.5", "37.5"],
    ]
    assert isinstance(ordered, Curves)
    assert [curve.y for curve in ordered.panels[0].curves] == [[0.5, 0.5, 1], [0.25, 0.5, 1]]
    assert ordered.panels[0].curves[0].x == [0, 0.5, 1]
    assert isinstance(by_round, Curves)
    assert [panel.title for panel in by_round.panels] == ["all clients", "clients: 32 bit", "clients: 4 bit"]
    assert [curve.label for curve in by_round.panels[0].curves] == ["", "worst tenth"] * 2
    assert "Is the model equally good for all clients?" in render(report)


def test_the_terminal_shows_scores_over_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = settings(uplink={"bits": "32+4"}, evaluate=HELD, data={"clients": 12})
    (tmp_path / "small.toml").write_text(experiment.toml())
    shown = fedshift("run", "small.toml", "--out", "run")
    assert "accuracy over clients" in shown.output
    assert "worst tenth" in shown.output
    row = json.loads(fedshift("resume", "run", "--json").output.splitlines()[-1])["rows"][0]
    last = lines(tmp_path / "run" / "rounds.csv")[-1]
    assert row["clients"]["worst"] == float(last["clients.worst"])
    assert row["clients"]["group.4 bit"] == float(last["clients.group.4 bit"])


def test_runs_that_hold_out_different_shares_are_not_compared(tmp_path: Path) -> None:
    """They train on different examples."""
    from fedshift.runs.summary import task

    shares = [settings(evaluate={"per_client": True, "held_out": share}) for share in (0.1, 0.2)]
    assert task(shares[0]) != task(shares[1])
    assert task(settings(evaluate=HELD)) == task(settings(evaluate=HELD | {"every": 2}))
