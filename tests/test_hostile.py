"""Hostile clients: a well-formed and finite upload of one of them cannot dominate the model."""

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedshift import Broadcast, Dataset, Params, Round, dataset
from fedshift.algorithms import Algorithm, ServerRule, chain
from fedshift.core.types import Decoded
from fedshift.data.partition import Partition
from fedshift.engines import Batched, Engine, Job, Sequential, Upload
from fedshift.rounds import server as server_side
from fedshift.rounds.evaluate import ClientScores, Held, Score
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import DivergedError, OpenRound, Ram, run_rounds
from fedshift.rounds.uplink import read
from fedshift.runs.packs import Seat
from fedshift.runs.run import Run, resume
from tests.federations import Normed, federation, forged, points, processes, same, train
from tests.runs import DERIVED, checkpoints, digits, small

Edit = Callable[[Upload, Federation], Upload]


class Edited:
    """An engine in which one client of each cohort sends another upload."""

    def __init__(self, engine: Engine, fed: Federation, edit: Edit, place: int = 2) -> None:
        self.engine, self.fed, self.edit, self.place = engine, fed, edit, place
        self.home = engine.home

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return [
            (self.edit(upload, self.fed) if i == self.place else upload for i, upload in enumerate(uploads))
            for uploads in self.engine.train(jobs)
        ]

    def evaluate(self, params: Params) -> Score:
        return self.engine.evaluate(params)

    def evaluate_clients(self, params: Params, held: Held) -> ClientScores:
        return self.engine.evaluate_clients(params, held)

    def close(self) -> None:
        self.engine.close()


def sends(change: Callable[[Params], Params]) -> Edit:
    """The client sends these weights, exactly."""

    def edit(upload: Upload, fed: Federation) -> Upload:
        assert isinstance(upload.frame, bytes)
        return upload._replace(frame=forged(upload.frame, change(read(upload.frame, fed.task.params))))

    return edit


def filled(names: Sequence[str], value: float) -> Callable[[Params], Params]:
    return lambda params: params | {name: torch.full_like(params[name], value) for name in names}


def absent(upload: Upload, fed: Federation) -> Upload:
    return upload._replace(failure="absent")


def everything(fed: Federation) -> list[str]:
    return [name for name, x in fed.task.params.items() if x.is_floating_point()]


def engine_of(name: str, fed: Federation) -> Engine:
    return processes(fed.task, 2) if name == "processes" else Sequential(fed.task)


@pytest.mark.parametrize("engine", ["sequential", "processes"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_an_upload_of_huge_numbers_is_left_out_as_if_it_had_not_arrived(engine: str, algorithm: str) -> None:
    fed = federation(train={"cohort": 10}, algorithm={"name": algorithm}, uplink={"bits": "32+4"})
    hostile = Edited(engine_of(engine, fed), fed, sends(filled(everything(fed), 3e38)))
    expected, honest, remembered = train(fed, 2, Edited(Sequential(fed.task), fed, absent))
    state, outcomes, memory = train(fed, 2, hostile)
    hostile.close()
    for outcome, other in zip(outcomes, honest, strict=True):
        assert list(outcome.failed) == list(other.failed)
        (why,) = outcome.failed.values()
        assert why.startswith("update norm ")
        assert why.endswith("at most 50 times is allowed")
        assert (outcome.arrived, outcome.bytes_up, outcome.layers) == (9, other.bytes_up, other.layers)
    assert same(state.out.params, expected.out.params)
    assert same(state.out.control, expected.out.control)
    assert memory.held.keys() == remembered.held.keys()
    assert all(same(memory.held[client], kept) for client, kept in remembered.held.items())


def test_the_bound_can_be_switched_off() -> None:
    """One of ten sends 3e38 everywhere, and the mean is 3e37."""
    fed = federation(train={"cohort": 10}, bounds={"norm": 0})
    state, (outcome,), _ = train(fed, 1, Edited(Sequential(fed.task), fed, sends(filled(everything(fed), 3e38))))
    assert not outcome.failed
    assert all(torch.allclose(x, torch.tensor(3e37)) for x in state.out.params.values())


def loud(huge: float = 1e12) -> Dataset:
    """Points of which only those of client 0 make the update of a linear model huge, but finite."""
    data = points()
    x = data.x.clone()
    x[federation().partition.of(0)] = huge
    return dataset(x, data.y, data.test_x, data.test_y)


@pytest.mark.parametrize("engine", ["sequential", "processes", "batched"])
@pytest.mark.parametrize(
    "uplink", [{}, {"bits": 4}, {"bits": 4, "send": "updates", "feedback": True}], ids=["exact", "4 bits", "updates"]
)
def test_a_client_whose_update_is_huge_is_left_out_on_every_engine(engine: str, uplink: dict[str, Any]) -> None:
    fed = federation(nn.Linear(6, 4), loud(), train={"cohort": 12}, uplink=uplink)
    using = Batched(fed.task) if engine == "batched" else engine_of(engine, fed)
    state, outcomes, memory = train(fed, 2, using)
    using.close()
    for outcome in outcomes:
        assert list(outcome.failed) == [0]
        assert outcome.failed[0].startswith("update norm ")
        assert outcome.arrived == 11
    assert 0 not in memory.held
    assert all(float(x.abs().max()) < 100 for x in state.out.params.values())


def test_a_hostile_second_upload_is_left_out() -> None:
    fed = federation(algorithm={"name": "scaffold", "control": "sent"})
    huge = {name: torch.full_like(x, 1e20) for name, x in fed.start().out.control.items()}
    expected, _, remembered = train(fed, 2, Edited(Sequential(fed.task), fed, absent))
    state, outcomes, memory = train(
        fed, 2, Edited(Sequential(fed.task), fed, lambda upload, _: upload._replace(second=forged(upload.second, huge)))
    )
    assert all("second upload norm" in why for outcome in outcomes for why in outcome.failed.values())
    assert [len(outcome.failed) for outcome in outcomes] == [1, 1]
    assert same(state.out.params, expected.out.params)
    assert same(state.out.control, expected.out.control)
    assert memory.held.keys() == remembered.held.keys()


def test_buffers_of_a_batch_norm_are_bounded_too() -> None:
    fed = federation(Normed())
    expected, _, _ = train(fed, 2, Edited(Sequential(fed.task), fed, absent))
    hostile = Edited(Sequential(fed.task), fed, sends(filled(["norm.running_var"], 1e38)))
    state, outcomes, _ = train(fed, 2, hostile)
    assert all("buffer update norm" in why for outcome in outcomes for why in outcome.failed.values())
    assert [len(outcome.failed) for outcome in outcomes] == [1, 1]
    assert same(state.out.params, expected.out.params)


@pytest.mark.parametrize("uplink", [{}, {"bits": 4, "send": "updates"}], ids=["weights", "updates"])
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_one_negative_variance_does_not_reach_the_mean(
    uplink: dict[str, Any], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-30 is within the bound, and would make the mean of ten variances near 1 negative and the loss NaN."""
    if not small:
        monkeypatch.setattr(server_side, "SMALL", 0)
    fed = federation(Normed(), train={"cohort": 10}, uplink=uplink)

    def negative(upload: Upload, fed: Federation) -> Upload:
        assert isinstance(upload.frame, bytes)
        w = read(upload.frame, fed.task.params) | {"norm.running_var": torch.full((8,), -30.0)}
        change = {name: x - fed.task.params[name] if x.is_floating_point() else x for name, x in w.items()}
        return upload._replace(frame=forged(upload.frame, change if uplink else w))

    state, (outcome,), _ = train(fed, 1, Edited(Sequential(fed.task), fed, negative))
    assert list(outcome.failed.values()) == ["norm.running_var: contains a negative variance"]
    assert outcome.arrived == 9
    assert bool((state.out.params["norm.running_var"] > 0).all())


class Counting(nn.Module):
    """A linear model with an integer and a boolean buffer, which every client changes."""

    steps: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += torch.tensor([1, 2])
            self.seen[0] = True
        logits: Tensor = self.linear(x)
        return logits


@pytest.mark.parametrize("place", [0, 2, 4])
def test_integers_and_booleans_are_medians(place: int) -> None:
    """Twenty examples in batches of eight, twice: six steps."""
    fed = federation(Counting())

    def lie(params: Params) -> Params:
        return params | {"steps": torch.tensor([9 * 10**17, -(10**17)]), "seen": torch.tensor([False, True])}

    state, (outcome,), _ = train(fed, 1, Edited(Sequential(fed.task), fed, sends(lie), place))
    assert not outcome.failed
    assert state.out.params["steps"].tolist() == [6, 12]
    assert state.out.params["seen"].tolist() == [True, False]


def test_hand_worked_cap_of_a_weight() -> None:
    """Values 1, 2, 3, 4 of weights 1, 1, 1 and 10^15, capped at ten: (1 + 2 + 3 + 10 * 4) / 13."""
    for cap, expected in ((10, 46 / 13), (0, 4.0)):
        fed = federation(train={"cohort": 4}, algorithm={"weights": "examples"}, bounds={"weight": cap, "norm": 0})
        opened = OpenRound(fed, fed.start(), Ram())
        assert opened.job is not None
        opened.job = opened.job._replace(examples=[1, 1, 1, 10**15])
        uploads = Sequential(fed.task).train([opened.job])[0]
        opened.take(sends(filled(everything(fed), i + 1.0))(upload, fed) for i, upload in enumerate(uploads))
        state, outcome = opened.end(None)
        assert outcome.capped == bool(cap)
        for x in state.out.params.values():
            assert torch.allclose(x, torch.full_like(x, expected))


def test_capped_weights_are_recorded(tmp_path: Path) -> None:
    """A client with 205 of 240 examples, and seven with five each."""
    changes = {"algorithm": {"weights": "examples"}, "data": {"clients": 8, "partition": "iid"}}
    run = Run(small(changes, {"train": {"rounds": 1, "cohort": 8}}), tmp_path / "run", data=points())
    start = torch.tensor([0, 205, 210, 215, 220, 225, 230, 235, 240])
    run.fed = replace(run.fed, partition=Partition(run.fed.partition.order, start))
    (outcome,) = run
    assert outcome.capped == 1
    with open(tmp_path / "run" / "rounds.csv", newline="") as file:
        assert [line["capped"] for line in csv.DictReader(file)] == ["1"]


def test_with_two_uploads_there_is_no_majority_and_no_bound() -> None:
    fed = federation(train={"cohort": 2})
    hostile = Edited(Sequential(fed.task), fed, sends(filled(everything(fed), 1e6)), place=1)
    _, (outcome,), _ = train(fed, 1, hostile)
    assert not outcome.failed


def test_if_most_clients_do_not_move_the_norm_of_the_model_is_the_reference() -> None:
    fed = federation(train={"lr": 1e-30})
    start = fed.start().out.params
    state, (outcome,), _ = train(fed, 1, Edited(Sequential(fed.task), fed, sends(filled(everything(fed), 1e6))))
    assert ["update norm" in why for why in outcome.failed.values()] == [True]
    assert same(state.out.params, start)
    near = Edited(Sequential(fed.task), fed, sends(lambda params: {name: x * 1.1 for name, x in params.items()}))
    assert not train(fed, 1, near)[1][0].failed


HONEST: dict[str, dict[str, Any]] = {
    "fedavg": {"uplink": {"bits": "32+4"}},
    "one bit": {"uplink": {"bits": "32+1"}},
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 1.0}},
    "scaffold": {"algorithm": {"name": "scaffold"}, "uplink": {"bits": 4}},
    "scaffold, sent": {"algorithm": {"name": "scaffold", "control": "sent"}, "uplink": {"bits": "32+4"}},
    "tiny steps": {"uplink": {"bits": "32+1", "quantizer": "stochastic"}, "train": {"lr": 1e-4}},
    "feedback": {"uplink": {"bits": 2, "send": "updates", "feedback": True}},
    "unequal": {"data": {"partition": "dirichlet", "alpha": 0.1, "least": 1}, "train": {"batch": 2}},
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("engine", [Sequential, Batched])
def test_honest_runs_are_the_same_with_and_without_bounds(name: str, engine: type[Sequential | Batched]) -> None:
    ended = []
    for bounds in ({}, {"norm": 0, "weight": 0}):
        fed = federation(**HONEST[name], bounds=bounds)
        state, outcomes, _ = train(fed, 4, engine(fed.task))
        assert not any(outcome.failed for outcome in outcomes)
        ended.append(state.out)
    assert same(ended[0].params, ended[1].params)
    assert same(ended[0].control, ended[1].control)


def unequal(fed: Federation, first: int) -> Federation:
    """Client 0 has `first` of 240 examples, and the other eleven share the rest."""
    rest = (240 - first) // 11
    start = torch.tensor([0, *(240 - rest * k for k in range(11, -1, -1))])
    return replace(fed, partition=Partition(fed.partition.order, start))


def test_an_honest_client_with_far_more_steps_than_the_others_is_not_left_out() -> None:
    """A linear model from zero: one client takes 2290 steps and the others ten each, with a large learning rate."""
    model = nn.Linear(6, 4)
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})
    long = {"cohort": 12, "epochs": 10, "batch": 1, "lr": 3.0, "momentum": 0.0}
    fed = unequal(federation(model, train=long), first=229)
    _, outcomes, _ = train(fed, 5)  # the others have little left to learn, and hardly move
    assert [outcome.arrived for outcome in outcomes] == [12] * 5
    hostile = Edited(Sequential(fed.task), fed, sends(filled(everything(fed), 1e6)))
    assert [list(outcome.failed) for outcome in train(fed, 2, hostile)[1]] == [[2], [2]]


SIZES = [2, 1300, 3, 12, 2000, 5, 3, 8, 40, 2, 700, 15, 4, 100, 6, 300, 5, 20, 8, 10]  # like those of roles in plays


def roles(model: nn.Module | None = None, **changed: Any) -> Federation:
    """Natural clients with two to two thousand examples of digits."""
    data = digits()
    chosen = torch.randint(0, len(data.y), (sum(SIZES),), generator=torch.Generator().manual_seed(0))
    owner = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    owned = dataset(data.x[chosen], data.y[chosen], data.test_x, data.test_y, owner=owner)
    natural = {"clients": 0, "partition": "natural", "least": 2}
    return federation(model, owned, data=natural, **changed | {"train": {"cohort": 20, "epochs": 3, "batch": 10}})


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize("start", ["zero", "drawn"])
def test_natural_clients_of_very_unequal_sizes_are_never_left_out(start: str, algorithm: str) -> None:
    model = nn.Linear(64, 10)
    if start == "zero":  # so that no update is shorter than the model
        model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})
    fed = roles(model, algorithm={"name": algorithm, "control": "sent"}, uplink={"bits": "32+4"})
    _, outcomes, _ = train(fed, 3)
    assert [(outcome.arrived, outcome.failed) for outcome in outcomes] == [(20, {})] * 3


@pytest.mark.parametrize(("place", "times"), [(0, 100.0), (11, 100.0), (4, 100.0)])
def test_a_natural_client_that_multiplies_its_update_is_left_out(place: int, times: float) -> None:
    """Clients 0 and 11 have 2 and 15 examples; client 4 has 2,000, two hundred times as many as most."""
    model = nn.Linear(64, 10)
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})
    fed = roles(model)
    multiply = sends(lambda params: {name: times * x for name, x in params.items()})  # updates of a model that is zero
    _, (outcome,), _ = train(fed, 1, Edited(Sequential(fed.task), fed, multiply, place))
    assert list(outcome.failed) == [place]


def test_a_quantization_error_is_not_an_outlier() -> None:
    """No client moves: exact clients send w, and those with one bit per weight Q(w)."""
    fed = federation(uplink={"bits": "32+1", "quantizer": "stochastic"}, train={"lr": 1e-30, "cohort": 12})
    _, (outcome,), _ = train(fed, 1)
    assert not outcome.failed
    assert outcome.arrived == 12
    hostile = Edited(Sequential(fed.task), fed, sends(filled(everything(fed), 1e3)), place=1)
    assert len(train(fed, 1, hostile)[1][0].failed) == 1


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_honest_clients_with_batch_norm_are_never_left_out(scale: float) -> None:
    """For any scale of the inputs, which running means and variances adopt in the first round."""
    data = points()
    scaled = dataset(scale * data.x, data.y, scale * data.test_x, data.test_y)
    fed = federation(Normed(), scaled, data={"partition": "labels", "labels": 1, "clients": 12}, train={"cohort": 12})
    _, outcomes, _ = train(fed, 6)
    assert not any(outcome.failed for outcome in outcomes)


@pytest.mark.parametrize("name", ["fedavg", "scaffold, sent", "feedback"])
def test_frames_that_are_opened_twice_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for large models, whose decoded uploads are not stored."""
    fed = federation(**HONEST[name])
    small_ones, _, _ = train(fed)
    monkeypatch.setattr(server_side, "SMALL", 0)
    opened = OpenRound(fed, fed.start(), Ram())
    assert opened.job is not None
    for i, upload in enumerate(Sequential(fed.task).train([opened.job])[0]):
        opened.uploads.take(upload, opened.job, i)
    assert all(upload.frame is None and upload.second is None for upload in opened.uploads.waiting)
    large_ones, _, _ = train(fed)
    assert same(small_ones.out.params, large_ones.out.params)
    assert same(small_ones.out.control, large_ones.out.control)


def test_decoded_uploads_without_norms_are_measured() -> None:
    fed = federation(train={"cohort": 10})

    def huge(upload: Upload, fed: Federation) -> Upload:
        assert isinstance(upload.frame, Decoded)
        params = filled(everything(fed), 3e37)(upload.frame.params)
        return upload._replace(frame=replace(upload.frame, params=params, norms=None))

    _, (outcome,), _ = train(fed, 1, Edited(Batched(fed.task), fed, huge))
    assert ["update norm" in why for why in outcome.failed.values()] == [True]


@dataclass(frozen=True)
class Overflowing(ServerRule):
    """A server rule that makes a tensor infinite in some rounds; tensors that were infinite before may stay so."""

    what: str
    rounds: tuple[int, ...]

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        counts = {"steps": torch.zeros(()), "best": torch.tensor(-torch.inf)}
        return {}, counts if self.what.startswith("server state") else {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        times = torch.inf if rnd.number in self.rounds else 1.0
        if state:
            return out, state | {"steps": times * (state["steps"] + 1)}
        if self.what.startswith("control "):
            name = self.what.removeprefix("control ")
            return out._replace(control=out.control | {name: times * out.control[name]}), state
        return out._replace(params=out.params | {self.what: times * out.params[self.what]}), state


def overflowing(fed: Federation, what: str, *rounds: int) -> Federation:
    client, rule = fed.algorithm
    rules = rule.rules if hasattr(rule, "rules") else (rule,)
    return replace(fed, algorithm=Algorithm(client, chain(*rules[:1], Overflowing(what, rounds), *rules[1:])))


@pytest.mark.parametrize("what", ["fc1.bias", "control fc2.weight", "server state 1/steps"])
def test_a_round_that_the_servers_rules_make_infinite_is_skipped(what: str) -> None:
    fed = overflowing(federation(algorithm={"name": "scaffold"}), what, 2)
    first, _, remembered = train(fed, 1)
    second, outcomes, memory = train(fed, 2)
    assert (second.number, second.skipped) == (2, 1)
    assert same(second.out.params, first.out.params)
    assert same(second.out.control, first.out.control)
    assert same(second.server, first.server)
    assert all(same(memory.held[client], kept) for client, kept in remembered.held.items())
    assert memory.held.keys() == remembered.held.keys()
    assert (outcomes[1].arrived, outcomes[1].layers, len(outcomes[1].failed)) == (0, {}, 5)
    assert set(outcomes[1].failed.values()) == {f"the round is skipped: the server's rules made {what} NaN or infinite"}
    third, (*_, last), _ = train(fed, 3)
    assert (third.skipped, last.arrived) == (0, 5)


def test_patience_counts_rounds_with_infinite_results() -> None:
    fed = overflowing(federation(train={"patience": 3}), "fc1.bias", 1, 2, 3)
    with pytest.raises(DivergedError, match=r"round 3: no usable upload in 3 rounds .* made fc1.bias NaN or infinite"):
        train(fed)


def test_a_skipped_round_is_never_saved_and_the_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    experiment = small(DERIVED, {"train": {"rounds": 5}})
    lines: list[str] = []
    whole = Run(experiment, data=digits(), tell=lines.append)
    whole.fed = overflowing(whole.fed, "fc1.bias", 3)
    assert [outcome.arrived for outcome in whole] == [4, 4, 0, 4, 4]
    assert sum("round 3: client" in line and "made fc1.bias NaN" in line for line in lines) == 4
    stopped = Run(experiment, tmp_path / "run", data=digits())
    stopped.fed = overflowing(stopped.fed, "fc1.bias", 3)
    assert [next(stopped).arrived for _ in range(3)] == [4, 4, 0]
    stopped.close()
    for path in checkpoints(tmp_path / "run"):
        assert all(bool(x.isfinite().all()) for x in load_file(path).values())
    again = resume(tmp_path / "run", data=digits())
    assert (again.state.number, again.state.skipped) == (3, 1)
    again.fed = overflowing(again.fed, "fc1.bias", 3)
    list(again)
    assert same(again.params, whole.params)
    with open(tmp_path / "run" / "rounds.csv", newline="") as file:
        assert [len(line["failed"].split()) for line in csv.DictReader(file)] == [0, 0, 4, 0, 0]


def test_in_a_pack_only_the_run_with_an_infinite_result_skips_the_round() -> None:
    experiment = small({"engine": {"name": "batched"}, "train": {"rounds": 3}})
    broken = Run(experiment, data=digits())
    other = Run(experiment.changed(seed=1), data=digits(), on=lambda _: Seat(broken.engine))
    broken.fed = overflowing(broken.fed, "fc1.bias", 2)
    arrived: list[list[int]] = [[], []]
    for place, outcome in run_rounds([broken, other], broken.engine):
        arrived[place].append(outcome.arrived)  # type: ignore[union-attr]
    assert arrived == [[4, 0, 4], [4, 4, 4]]
