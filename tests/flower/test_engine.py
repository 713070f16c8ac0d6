"""Experiments on Flower's grid: the same bytes as in one process, for any number of nodes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedshift import Codec, KMeans, Uplink
from fedshift.algorithms.table import ALGORITHMS
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, read
from fedshift.flower.app.apps import begin, client_app, experiment_of, server_app
from fedshift.flower.app.channel import Channel
from fedshift.flower.app.engine import ROUND
from fedshift.flower.testing import LocalGrid
from fedshift.runs.run import Run
from tests.algorithms.test_methods import ARGUMENTS
from tests.engines.test_engines import CASES
from tests.federations import Normed, same, settings
from tests.flower.experiments import DATA, grid_of, in_process, objects, on_flower, plain
from tests.policies.test_runs import Listed
from tests.runs import FEEDBACK, record, small

UNEVEN = {"data": {"partition": "dirichlet", "least": 2}, "train": {"momentum": 0.9}}
MORE: dict[str, dict[str, Any]] = CASES | {
    "scaffold, uneven": UNEVEN | {"algorithm": {"name": "scaffold"}, "uplink": {"bits": "32+4", "feedback": True}},
    "scaffold sent, uneven": UNEVEN | {"algorithm": {"name": "scaffold", "control": "sent"}},
}


@pytest.mark.parametrize("name", MORE)
def test_bytes_and_figures_are_those_of_one_process(name: str) -> None:
    model = None if "partition" in MORE[name].get("data", {}) else Normed()  # batch norm takes no batch of one
    experiment = settings(**MORE[name]).changed(**{"train.rounds": 5, "record.histograms": 2})
    warned = list[str]()  # of a budget that cannot be met
    reference = in_process(experiment, model=model, tell=warned.append)
    expected = plain(list(reference))
    for nodes in (12, 5, 1):
        grid, messages = grid_of(experiment, nodes, model), list[str]()
        run = on_flower(experiment, grid, model=model, tell=messages.append)
        assert plain(list(run)) == expected
        assert (messages, grid.errors) == (warned, [])
        assert same(run.params, reference.params)
        assert same(run.state.out.control, reference.state.out.control)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("fedavg", "fedprox", "scaffold")])
def test_every_method_has_the_bytes_of_one_process(name: str) -> None:
    uplink = {"bits": "32+4", "quantizer": "stochastic", "send": "updates"}
    experiment = settings(algorithm={"name": name} | ARGUMENTS.get(name, {}), uplink=uplink)
    reference = in_process(experiment)
    expected = plain(list(reference))
    grid = grid_of(experiment, nodes=5)
    run = on_flower(experiment, grid)
    assert plain(list(run)) == expected
    assert grid.errors == []
    assert same(run.params, reference.params)
    assert same(run.state.server, reference.state.server)


def test_an_optimizer_that_is_passed_as_an_object_has_the_bytes_of_one_process() -> None:
    experiment = settings(train={"momentum": 0.0, "lr": 0.01})
    given: dict[str, Any] = objects() | {"optimizer": torch.optim.RMSprop}
    reference = Run(experiment, **given)
    expected = plain(list(reference))
    grid = LocalGrid(client_app(experiment, **given), nodes=3)
    run = begin(experiment, None, grid, given)
    assert plain(list(run)) == expected
    assert grid.errors == []
    assert same(run.params, reference.params)


def test_the_codec_of_an_example_has_the_bytes_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is imported by its name, on nodes and on the server."""
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.syspath_prepend(examples)
    experiment = settings(uplink=read(examples / "own_codec.toml")["uplink"])
    reference = in_process(experiment)
    expected = plain(list(reference))
    grid = LocalGrid(client_app(data=DATA), 5, {"experiment": experiment.toml()})
    run = on_flower(experiment, grid)
    assert plain(list(run)) == expected
    assert grid.errors == []
    assert same(run.params, reference.params)


def test_a_policy_passed_as_an_object_has_the_bytes_of_one_process(tmp_path: Path) -> None:
    """Nodes are told their uplinks by the server, and keep errors that wait for feedback."""
    lossy = Uplink(Codec(KMeans(2)), update=True, feedback=True)
    policy = Listed((lossy, Uplink(Codec(KMeans(3))), lossy, Uplink(update=True, feedback=True)))
    experiment = settings(train={"rounds": 5, "cohort": 12}, uplink={"bits": 8})
    reference = Run(experiment, policy=policy, **objects())
    expected = plain(list(reference))
    grid = LocalGrid(client_app(experiment, **objects(), policy=policy), 5)
    run = begin(experiment, tmp_path / "run", grid, objects() | {"policy": policy})
    assert plain(list(run)) == expected
    assert grid.errors == []
    assert same(run.params, reference.params)
    assert same(run.state.policy, reference.state.policy)
    assert (tmp_path / "run" / "uplinks.csv").read_text().count("KMeans(bits=3)") == 12


def test_the_memory_of_clients_stays_on_their_nodes() -> None:
    experiment = settings(uplink={"bits": 4, "feedback": True})
    grid, sizes = grid_of(experiment, nodes=5), list[int]()

    def look(reply: Message) -> Message:
        sizes.extend(len(array.data) for record in reply.content.array_records.values() for array in record.values())
        return reply

    grid.tamper = look
    run = on_flower(experiment, grid)
    outcomes = list(run)
    assert sum(sizes) == sum(sum(outcome.bytes_up) for outcome in outcomes)  # nothing but frames came back
    for client in range(12):
        kept = run.memory.get(client)
        memories = [
            key for key in grid.contexts[grid.node_of(client % 5)].state if key.startswith(f"fedshift/client-{client}/")
        ]
        assert set(kept) == ({ROUND} if memories else set())
        if memories:
            assert str(int(kept[ROUND])) in {key.rpartition("/")[2] for key in memories}
            assert len(memories) <= 2  # of the last round, and one the server may resume from


def test_requests_share_their_arrays_and_contain_no_memory() -> None:
    experiment = settings(algorithm={"name": "scaffold"})
    seen: list[RecordDict] = []

    class Watched(LocalGrid):
        def push_messages(self, messages: Any) -> list[str]:
            seen.extend(message.content for message in messages if message.metadata.message_type == "train")
            return super().push_messages(messages)

    list(on_flower(experiment, Watched(client_app(experiment, **objects()), 12)))
    assert {tuple(content) for content in seen} == {("arrays", "fedshift.control", "config")}
    assert len({id(content["arrays"]) for content in seen}) == experiment.train.rounds


def context(**config: Any) -> Context:
    return Context(1, 1, {}, RecordDict(), config)


def test_a_server_app_records_reports_and_stops_like_a_run(tmp_path: Path) -> None:
    experiment = small(FEEDBACK)
    list(Run(experiment, tmp_path / "here"))
    (tmp_path / "desk").mkdir()
    path = tmp_path / "a.toml"
    path.write_text(experiment.toml())
    config = {"experiment": str(path), "out": str(tmp_path / "there"), "desk": str(tmp_path / "desk")}
    grid = LocalGrid(client_app(), 12, {"experiment": experiment.toml()})
    channel = Channel(tmp_path / "desk")
    channel.request_stop()
    server_app()(grid, context(**config))
    assert [event.kind for event in channel.receive()] == ["round", "stopped"]
    channel.stop_file.unlink()
    server_app()(grid, context(**config))
    assert [(event.kind, event.number) for event in channel.receive()] == [
        *(("round", i) for i in range(2, 9)),
        ("done", 0),
    ]
    here, there = record(tmp_path / "here"), record(tmp_path / "there")
    settings_there = there.pop("settings.toml")
    assert settings_there == here.pop("settings.toml").replace('"sequential"', '"flower"')
    assert here == there


def test_errors_of_a_server_app_have_a_message(tmp_path: Path) -> None:
    grid = LocalGrid(client_app(), 12)
    with pytest.raises(SettingsError, match="run config: 'experiment' is missing"):
        server_app()(grid, context())
    with pytest.raises(SettingsError, match="run config: experiment: not TOML"):
        experiment_of({"experiment": "a = = 2"})
    with pytest.raises(SettingsError, match=r"missing\.toml: cannot be read"):
        experiment_of({"experiment": "missing.toml"})
    with pytest.raises(SettingsError, match=r"engine\.name = 'flower': use the command"):
        Run(Experiment(engine={"name": "flower"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingsError, match="no such model"):
        server_app()(grid, context(experiment="model.name = 'x'", desk=str(tmp_path)))
    assert json.loads((tmp_path / "events.jsonl").read_text())[:2] == [
        "failed",
        "SettingsError: model.name = 'x': no such model; known are mlp, paper-cnn, small-paper-cnn, logistic, cnn, "
        "resnet8, resnet18, char-lstm, char-transformer, and module:function",
    ]


def test_a_folder_with_other_settings_or_a_finished_run_is_refused(tmp_path: Path) -> None:
    experiment = settings()
    next(run := on_flower(experiment, out=tmp_path / "run"))
    run.close()
    with pytest.raises(RuntimeError, match="contains a run with other settings"):
        on_flower(experiment.changed(seed=1), out=tmp_path / "run")
    list(on_flower(experiment, out=tmp_path / "run"))
    with pytest.raises(RuntimeError, match="this run is finished"):
        on_flower(experiment, out=tmp_path / "run")


def test_a_node_with_other_settings_is_refused() -> None:
    experiment = settings(train={"patience": 2})
    grid = LocalGrid(client_app(experiment.changed(seed=1), data=DATA), 12)
    with pytest.raises(RuntimeError, match="the settings of this node differ from those of the server"):
        list(on_flower(experiment, grid))


def test_clients_are_evaluated_on_the_server_of_an_app() -> None:
    """Nodes train without the held-out examples, on which the server evaluates."""
    experiment = settings(
        uplink={"bits": "32+4"}, train={"metrics": ["accuracy", "f1"]}, evaluate={"per_client": True, "held_out": 0.25}
    )
    expected, outcomes = list(in_process(experiment)), list(on_flower(experiment))
    assert plain(outcomes) == plain(expected)
    assert all(outcome.clients is not None for outcome in outcomes)
