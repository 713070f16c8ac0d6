"""Methods of other papers: identities, hand-worked steps, and every method on every engine."""

import copy
import subprocess
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedshift import Algorithm, Broadcast, ClientRule, Experiment, Params, Round, ServerRule, chain, resume, run
from fedshift.algorithms import Average, Plain
from fedshift.algorithms.base import defines, is_affine
from fedshift.algorithms.table import ALGORITHMS
from fedshift.core.tree import norm
from fedshift.core.types import Decoded, DecodedUpload
from fedshift.engines import Batched, Sequential, TrainingError
from fedshift.engines.client import Client
from fedshift.engines.gpu.rules import check_stackable
from fedshift.experiment.build import build
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import DivergedError, Ended, OpenRound, Ram, Training, run_rounds
from fedshift.rounds.uplink import read, split_server
from fedshift.wire.mean import Mean
from tests.federations import Normed, federation, points, processes, same, settings, train
from tests.runs import COMMAND

ARGUMENTS = {"cmfl": {"threshold": 0.5}, "signsgd": {"lr": 0.02}, "scallion": {"alpha": 0.5}}
PLAIN = {"momentum": 0.0}
ALL = {"cohort": 12}
MIXED = {"bits": "32+4", "quantizer": "stochastic", "send": "updates"}


def made(
    name: str, train: dict[str, Any] | None = None, uplink: dict[str, Any] | None = None, **args: Any
) -> Federation:
    table = {"name": name} | ARGUMENTS.get(name, {}) | args
    return federation(algorithm=table, train=train or {}, uplink=uplink or {})


def params(fed: Federation, rounds: int = 3) -> Params:
    return train(fed, rounds)[0].out.params


def close(a: Params, b: Params, rtol: float = 1e-5) -> None:
    for name, x in a.items():
        torch.testing.assert_close(x, b[name], rtol=rtol, atol=rtol * float(b[name].abs().max()), msg=name)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_trains_alike_on_every_engine(name: str) -> None:
    """Workers make the same bits; a stack differs by rounding, which signs, masks and thresholds can enlarge."""
    fed = made(name, uplink=MIXED)
    one, outcomes, memory = train(fed)
    assert all(torch.isfinite(x).all() for x in one.out.params.values())
    assert not any(outcome.failed for outcome in outcomes)
    engine = processes(fed.task, 2)
    try:
        two, _, other = train(fed, engine=engine)
    finally:
        engine.close()
    assert same(one.out.params, two.out.params)
    assert same(one.out.control, two.out.control)
    assert same(one.server, two.server)
    assert memory.held.keys() == other.held.keys()
    assert all(same(kept, other.held[client]) for client, kept in memory.held.items())
    exact = made(name)
    check_stackable(exact.algorithm.client, exact.task, exact.start().out.control)
    stacked = train(exact, 1, Batched(exact.task, "fp32"))[0].out.params
    close(stacked, params(exact, 1), 1e-2 if name == "signsgd" else 1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    table = {"name": name} | ARGUMENTS.get(name, {})
    experiment = settings(algorithm=table, uplink=MIXED | {"feedback": True}, train={"rounds": 4}, shift={"on": True})
    whole, stopped = (run(experiment, tmp_path / name, data=points()) for name in ("whole", "stopped"))
    for training, rounds in ((whole, 3), (stopped, 2)):
        for _ in range(rounds):
            next(training)
    stopped.close()
    resumed = resume(tmp_path / "stopped", data=points())
    next(resumed)
    assert same(whole.params, resumed.params)
    assert same(whole.state.out.control, resumed.state.out.control)
    assert same(whole.state.server, resumed.state.server)
    for client in range(12):
        assert same(whole.memory.get(client), resumed.memory.get(client))
    for training in (whole, resumed):
        training.close()


def test_fedvarp_with_all_clients_is_fedavg() -> None:
    close(params(made("fedvarp", ALL)), params(made("fedavg", ALL)))
    assert not same(params(made("fedvarp")), params(made("fedavg")))


def test_lossless_ef21_with_all_clients_is_fedavg() -> None:
    close(params(made("ef21", ALL)), params(made("fedavg", ALL)))


def test_lossless_fedwsq_is_fedavg() -> None:
    ours, theirs = params(made("fedwsq")), params(made("fedavg"))
    assert norm(x - theirs[name] for name, x in ours.items()) <= 1e-6 * norm(theirs.values())


def test_lossless_scallion_is_scaffold() -> None:
    """Within 1e-6 of the norm; clients have equally many examples, and so the same travel."""
    (scallion, *_), (scaffold, *_) = train(made("scallion", alpha=1.0)), train(made("scaffold"))
    for ours, theirs in ((scallion.out.params, scaffold.out.params), (scallion.out.control, scaffold.out.control)):
        apart = norm(x - theirs[name] for name, x in ours.items())
        assert apart <= 1e-6 * norm(theirs.values())


@pytest.mark.parametrize("name", ["scallion", "scafcom"])
def test_the_control_is_the_mean_of_all_controls_for_lossy_uploads(name: str) -> None:
    state, _, memory = train(made(name, uplink={"bits": 4, "quantizer": "uniform"}), 4)
    for tensor, c in state.out.control.items():
        mean = torch.stack([kept[tensor] for kept in memory.held.values()]).sum(0) / 12
        torch.testing.assert_close(c, mean, rtol=1e-4, atol=1e-6)


def test_fedavgm_without_momentum_and_fedcom_are_fedavg() -> None:
    close(params(made("fedavgm", momentum=0.0)), params(made("fedavg")))
    close(params(made("fedcom")), params(made("fedavg")))


def test_fedadam_with_a_constant_second_moment_is_scaled_fedavg() -> None:
    """beta1 = 0 and beta2 = 1 keep v = tau^2, so w = w_t + lr d / (2 tau)."""
    adam = made("fedadam", lr=0.02, beta1=0.0, beta2=1.0, tau=0.01)
    close(params(adam), params(made("fedavg")))


def test_feddyn_has_the_mean_of_the_clients_gradients() -> None:
    state, _, memory = train(made("feddyn", alpha=0.1, uplink=MIXED), 4)
    for tensor in (key.removeprefix("1/") for key in state.server):
        mean = torch.stack([kept[tensor] for kept in memory.held.values()]).sum(0) / 12
        torch.testing.assert_close(state.server[f"1/{tensor}"], mean, rtol=1e-4, atol=1e-6)


def test_hand_worked_two_rounds_of_feddyn() -> None:
    """One client, loss (w - 1)^2 / 2, one step of lr 0.5, alpha 0.5, from w = 0.

    Round 1: g = -1, w_1 = 0.5; h_1 = h = -0.25; w = 0.5 + 0.5 = 1.
    Round 2: g = 0, minus h_1: 0.25, so w_1 = 1 - 0.125 = 0.875; h = -0.25 + 0.0625 = -0.1875; w = 0.875 + 0.375 = 1.25.
    """
    client, server = ALGORITHMS["feddyn"](alpha=0.5)
    w, memory, state = (
        {"w": torch.zeros(1)},
        client.init({"w": torch.zeros(1)}),
        server.init({"w": torch.zeros(1)}, ["w"])[1],
    )
    seen = []
    for number in (1, 2):
        sent = Broadcast(w, {})
        step = client.adjust({"w": w["w"] - 1}, w, sent, memory)
        w_1 = {"w": w["w"] - 0.5 * step["w"]}
        memory = client.remember(w_1, w_1, sent, memory, torch.tensor(0.5))
        state, _ = server.take(upload(w_1), sent, state, {})
        out, state = server.apply(sent, state, Round(number, 1, 1, sent, w_1, 0.0, model=w))
        w = out.params
        seen.append((w["w"].item(), memory["w"].item(), state["1/w"].item()))
    assert seen == [(1.0, -0.25, -0.25), (1.25, -0.1875, -0.1875)]


def upload(decoded: Params, **fields: Any) -> DecodedUpload:
    base: dict[str, Any] = {"client": 0, "second": {}, "travel": torch.tensor(1.0), "examples": 1, "lossy": False}
    return DecodedUpload(**base | {"decoded": decoded, "error": 0.0} | fields)


def test_fedhq_with_equal_errors_is_fedavg_and_prefers_exact_uploads() -> None:
    assert same(params(made("fedhq")), params(made("fedavg")))
    mixed = {"bits": "32+1", "quantizer": "uniform"}
    fed, plain = made("fedhq", uplink=mixed), made("fedavg", uplink=mixed)
    shares = [train(each, 1)[1][0].share for each in (fed, plain)]
    assert 0 < shares[0] < shares[1]


def test_fedhq_relates_the_error_of_weights_to_the_update() -> None:
    """Weights from [3, 0] to [3, 4], error 0.8 of |w| = 5: it is 4, as long as the update, so p = 1 / (1 + 1).

    Sent as an update, the same relative error has p = 1 / (1 + 0.64); full precision has p = 1.
    """
    rule, sent = ALGORITHMS["fedhq"]().server, Broadcast({"w": torch.tensor([3.0, 0.0])}, {})
    sent_weights = upload({"w": torch.tensor([3.0, 4.0])}, lossy=True, error=0.8, update=False)
    assert rule.weigh(sent_weights, sent) == pytest.approx(0.5)
    assert rule.weigh(sent_weights._replace(update=True), sent) == pytest.approx(1 / 1.64)
    assert rule.weigh(sent_weights._replace(error=0.0), sent) == 1.0
    unmoved = sent_weights._replace(decoded=sent.params)
    assert rule.weigh(unmoved, sent) == pytest.approx(1 / 1.64)


class Kept(ServerRule):
    """Keeps the uploads of the last round."""

    needs: ClassVar[frozenset[str]] = frozenset({"uploads"})

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        self.uploads, self.sent = rnd.uploads, rnd.start.params
        return out, state


@pytest.mark.parametrize("send", ["weights", "updates"])
def test_fedhq_has_the_same_weights_on_one_client_and_on_a_stack(send: str) -> None:
    """p_k = 1 / (1 + (e_k |u_k| / |w_k - w_t|)^2) with the reported error e_k and decoded u_k, w_k."""
    fed = made(
        "fedhq", {"cohort": 6, "selection": "stratified"}, {"bits": "32+4", "quantizer": "uniform", "send": send}
    )
    results = []
    for engine in (Sequential(fed.task), Batched(fed.task, "fp32")):
        kept = Kept()
        both = replace(fed, algorithm=Algorithm(Plain(), chain(fed.algorithm.server, kept)))
        state, (outcome,), _ = train(both, 1, engine)
        assert [upload.update for upload in kept.uploads] == [send == "updates"] * 6
        p = []
        for upload in kept.uploads:
            moved = norm(x - kept.sent[name] for name, x in upload.decoded.items())
            whole = moved if upload.update else norm(upload.decoded.values())
            p.append(1 / (1 + (upload.error * whole / moved) ** 2))
        lossy = sum(x for x, upload in zip(p, kept.uploads, strict=True) if upload.lossy)
        assert 0 < lossy < 3  # of three quantized uploads
        assert outcome.share == pytest.approx(lossy / (3 + lossy))
        shares = torch.tensor(p, dtype=torch.float32) / sum(p)
        stacked = {name: torch.stack([upload.decoded[name] for upload in kept.uploads]) for name in kept.sent}
        mean = {name: torch.tensordot(shares, x, 1) for name, x in stacked.items()}
        close(state.out.params, mean)
        results.append(state.out.params)
    close(results[1], results[0], 1e-4)


def test_an_upload_with_an_invalid_weight_is_left_out() -> None:
    """As of a client that reports an infinite quantization error to FedHQ."""

    class Distrusting(ServerRule):
        def weigh(self, upload: DecodedUpload, sent: Broadcast) -> float:
            return 0.0 if upload.client % 2 else 1.0

    given = Algorithm(Plain(), chain(Distrusting(), Average()))
    (outcome,) = run(settings(train={"rounds": 1} | ALL), data=points(), algorithm=given)
    assert outcome.arrived == 6
    assert {client % 2 for client in outcome.failed} == {1}
    assert all(why.startswith("its weight is multiplied by 0") for why in outcome.failed.values())


def test_fedhq_gives_a_huge_error_no_weight() -> None:
    """A client may report any error; its square must not overflow."""
    assert ALGORITHMS["fedhq"]().server.weigh(upload({}, error=1e200), Broadcast({}, {})) == 0.0


def test_clients_that_diverge_are_failures_of_cmfl_and_not_silent() -> None:
    fed = made("cmfl", {"lr": 1e30, "patience": 3}, threshold=0.9)
    with pytest.raises(DivergedError, match="no usable upload in 3 rounds in a row"):
        train(fed, 5)


def test_server_rates_above_one_leave_running_variances_positive() -> None:
    fed = federation(Normed(), algorithm={"name": "fedcom", "lr": 3.0})
    state, outcomes, _ = train(fed, 4)
    assert not any(outcome.failed for outcome in outcomes)
    assert float(state.out.params["norm.running_var"].min()) > 0


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_models_keep_their_precision(name: str, engine: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    table = {"name": name} | ARGUMENTS.get(name, {})
    for kind in (model, copy.deepcopy(model).half()):
        experiment = settings(algorithm=table, uplink=MIXED, engine={"name": engine}, train={"lr": 0.01})
        training = run(experiment, data=points(), model=kind)
        assert not any(outcome.failed for outcome in training)
        dtypes = {x.dtype for part in training.state.out for x in part.values()}
        assert dtypes == {next(kind.parameters()).dtype}


def test_an_error_in_a_server_rule_ends_one_run_of_a_pack_alone() -> None:
    class Broken(ServerRule):
        def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
            raise KeyError("nowhere")

    feds = [federation(), federation()]
    feds[0] = replace(feds[0], algorithm=Algorithm(Plain(), chain(Average(), Broken())))
    engine = Sequential(feds[0].task)
    runs = [Training(fed, engine, 2) for fed in feds]
    ended = list(run_rounds(runs, engine))
    assert [(place, isinstance(outcome, Ended)) for place, outcome in ended] == [(0, True), (1, False), (1, False)]


def test_cmfl_with_threshold_0_sends_everything_and_with_1_nothing_after_the_first_round() -> None:
    assert same(params(made("cmfl", threshold=0.0)), params(made("fedavg")))
    state, outcomes, _ = train(made("cmfl", threshold=1.0), 7)  # more silent rounds than train.patience
    assert [outcome.arrived for outcome in outcomes] == [5, 0, 0, 0, 0, 0, 0]
    assert not any(outcome.failed for outcome in outcomes)
    assert sum(outcomes[1].bytes_up) == 0
    assert outcomes[1].bytes_down == outcomes[0].bytes_down
    assert state.skipped == 0


def test_ldawa_weighs_each_tensor() -> None:
    """Two clients, cosines 1 and 0.6: (1 * w + 0.6 * [5, 0]) / 1.6."""
    mean = Mean(like={"w": torch.zeros(2), "b": torch.zeros(1)})
    for values, factors in (([3.0, 4.0], {"w": 1.0}), ([5.0, 0.0], {"w": 0.6})):
        decoded = {"w": torch.tensor(values), "b": torch.tensor([values[0]])}
        mean.take(Decoded(decoded, 0, {"w": 5.0, "b": 5.0}), 1.0, factors)
    result = mean.result()
    torch.testing.assert_close(result["w"], torch.tensor([6.0, 4.0]) / 1.6)
    torch.testing.assert_close(result["b"], torch.tensor([4.0]))


def test_frames_with_factors_have_the_mean_of_decoded_uploads() -> None:
    fed = made("ldawa", uplink={"bits": "32+8", "quantizer": "uniform", "send": "updates"})
    frames = params(fed, 1)
    close(train(fed, 1, Batched(fed.task, "fp32"))[0].out.params, frames, 1e-4)


def test_grouped_means_of_equal_groups_are_fedavg() -> None:
    both = {"bits": "32+8", "quantizer": "uniform"}
    even = {"cohort": 6, "selection": "stratified"}
    close(params(made("grouped", even, both)), params(made("fedavg", even, both)))


def test_the_server_remembers_clients_on_disk_and_in_ram(tmp_path: Path) -> None:
    table = {"name": "fedvarp"}
    kept = []
    for where in ("ram", "disk"):
        experiment = settings(algorithm=table, record={"memory": where})
        training = run(experiment, tmp_path / where, data=points())
        next(training), next(training)
        kept.append([split_server(training.memory.get(client))[1] for client in range(12)])
        training.close()
    assert any(kept[0])
    assert all(same(a, b) for a, b in zip(*kept, strict=True))


@dataclass(frozen=True)
class Median(ServerRule):
    """Coordinate-wise median of all uploads."""

    needs: ClassVar[frozenset[str]] = frozenset({"uploads"})

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        w = {name: torch.stack([u.decoded[name] for u in rnd.uploads]).median(0).values for name in out.params}
        return out._replace(params=w), state


def test_a_users_rule_gets_all_uploads() -> None:
    training = run(settings(train={"rounds": 1}), data=points(), algorithm=Algorithm(Plain(), Median()))
    (outcome,) = training
    assert outcome.arrived == 5
    assert not same(training.params, params(federation(), 1))


@dataclass(frozen=True)
class ByLoss(ServerRule):
    """p_k proportional to the loss of the received model on the client's examples."""

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def weigh(self, upload: DecodedUpload, sent: Broadcast) -> float:
        assert upload.loss is not None
        return upload.loss


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_users_rule_weighs_uploads_by_the_loss_that_clients_send(engine: str) -> None:
    """The mean of two uploads with weights F_1 and F_2; a loss takes 4 bytes of side data."""
    fixed = settings(train={"rounds": 1, "cohort": 2}, engine={"name": engine})
    plain = run(fixed, data=points())
    weighted = run(fixed, data=points(), algorithm=Algorithm(Plain(), chain(Average(), ByLoss())))
    before, after = next(plain), next(weighted)
    assert after.bytes_up[1] == before.bytes_up[1] + 2 * 4
    job = OpenRound(plain.fed, plain.fed.start(), Ram()).job
    assert job is not None
    uploads = [read(upload.frame, job.sent.params) for upload in Sequential(plain.fed.task).train([job])[0]]
    client = Client(plain.fed.task)
    losses = [client.local_loss(job.sent.params, plain.fed.partition.of(k)) for k in job.clients]
    assert losses[0] != losses[1]
    for name, w in weighted.params.items():
        mean = torch.stack([p * upload[name] for p, upload in zip(losses, uploads, strict=True)]).sum(0) / sum(losses)
        assert torch.allclose(w, mean, atol=1e-5)


def test_a_server_rule_with_a_memory_must_say_so() -> None:
    class Forgetful(ServerRule):
        def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
            return state, {"seen": torch.ones(())}

    with pytest.raises(TypeError, match="take returned a memory; a rule with one must have 'memory' in its needs"):
        next(run(settings(), data=points(), algorithm=Algorithm(Plain(), chain(Average(), Forgetful()))))


@dataclass(frozen=True)
class Stateful(ClientRule):
    """A rule with a memory but without a second upload or control."""

    def init(self, params: Params) -> Params:
        return {"rounds": torch.zeros(())}

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return {"rounds": memory["rounds"] + 1}


def test_memory_needs_neither_control_nor_second_upload() -> None:
    training = run(settings(train=ALL | {"rounds": 3}), data=points(), algorithm=Algorithm(Stateful(), Average()))
    list(training)
    assert training.state.out.control == {}
    assert [int(training.memory.get(client)["rounds"]) for client in range(12)] == [3] * 12


def test_an_algorithm_object_must_be_passed_again_to_resume(tmp_path: Path) -> None:
    stopped = run(settings(), tmp_path / "run", data=points(), algorithm=Algorithm(Stateful(), Average()))
    next(stopped)
    stopped.close()
    with pytest.raises(Exception, match=r"its own data and algorithm; resume it there with .*algorithm=\.\.\."):
        resume(tmp_path / "run")
    resumed = resume(tmp_path / "run", data=points(), algorithm=Algorithm(Stateful(), Average()))
    assert [outcome.number for outcome in resumed] == [2, 3]


class Unstackable(ClientRule):
    """Uses the norm over all weights, which mixes stacked clients."""

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return {name: g / g.norm() for name, g in grad.items()}


def test_a_rule_that_cannot_be_stacked_says_so_before_training() -> None:
    given = Algorithm(Unstackable(), Average())
    with pytest.raises(SettingsError, match=r"Unstackable\.adjust has another result for clients that are stacked"):
        run(settings(engine={"name": "batched"}), data=points(), algorithm=given)
    list(run(settings(train={"rounds": 1}), data=points(), algorithm=given))


AFFINE_RULES = {"fedprox", "scaffold", "feddyn", "fedcomgate", "scallion"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_affine_is_adjust(name: str) -> None:
    """For one client, random tensors and a control; rules that define only one of both are those listed."""
    fed = made(name)
    rule, g = fed.algorithm.client, torch.Generator().manual_seed(0)

    def drawn(like: Params) -> Params:
        return {name: torch.randn(x.shape, generator=g, dtype=torch.float64) for name, x in like.items()}

    params = fed.task.params
    sent = Broadcast(drawn(params), drawn(fed.start().out.control))
    grad, w, memory = drawn(params), drawn(params), drawn(rule.init(params))
    assert is_affine(rule) == (name != "scafcom")
    assert (is_affine(rule) and defines(rule, "affine")) == (name in AFFINE_RULES)
    if is_affine(rule):
        a, b = rule.affine(sent, memory)
        for key, direction in rule.adjust(grad, w, sent, memory).items():
            torch.testing.assert_close(direction, grad[key] + a * w[key] + (b[key] if b else 0.0))


@dataclass(frozen=True)
class Decay(ClientRule):
    """grad + w / 2, without an offset."""

    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        return 0.5, {}


@dataclass(frozen=True)
class Pulled(Decay):
    """grad + w / 2 - w_t, so `adjust` of the base class is wrong for it."""

    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        return 0.5, {name: -x for name, x in sent.params.items()}


@dataclass(frozen=True)
class Contradicting(Pulled):
    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        return 1.0, {}

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return {name: g + 1.5 * w[name] for name, g in grad.items()}


@dataclass(frozen=True)
class Overridden(Pulled):
    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return {name: 2.0 * g for name, g in grad.items()}


@pytest.mark.parametrize("rule", [Decay(), Pulled(), Overridden()])
def test_a_rule_may_define_affine_alone_and_a_subclass_adjust_alone(rule: ClientRule) -> None:
    fed = build(settings(), data=points(), algorithm=Algorithm(rule, Average()))
    assert is_affine(rule) == (rule != Overridden())
    check_stackable(rule, fed.task, {})
    close(train(fed, 1, Batched(fed.task, "fp32"))[0].out.params, params(fed, 1), 1e-4)


def test_default_directions_are_worked_by_hand() -> None:
    """3 + 4 / 2 = 5, and with w_t = 1: 5 - 1 = 4."""
    grad, w, start = ({"w": torch.tensor([x])} for x in (3.0, 4.0, 1.0))
    assert Decay().adjust(grad, w, Broadcast(start, {}), {})["w"].item() == 5.0
    assert Pulled().adjust(grad, w, Broadcast(start, {}), {})["w"].item() == 4.0
    assert Plain().adjust(grad, w, Broadcast(start, {}), {}) is grad


def test_an_affine_that_contradicts_adjust_is_refused_before_training() -> None:
    given = Algorithm(Contradicting(), Average())
    with pytest.raises(SettingsError, match=r"Contradicting\.adjust does not return grad \+ a w \+ b"):
        run(settings(engine={"name": "batched"}), data=points(), algorithm=given)


def test_two_rules_cannot_both_weigh_uploads_or_send_one_control() -> None:
    weighing = chain(ALGORITHMS["fedhq"]().server, ALGORITHMS["ldawa"]().server)
    with pytest.raises(SettingsError, match="ByError and ByAngle both weigh uploads"):
        run(settings(), data=points(), algorithm=Algorithm(Plain(), weighing))
    controls = chain(ALGORITHMS["scaffold"]().server, ALGORITHMS["scallion"]().server)
    with pytest.raises(SettingsError, match="two server rules of the algorithm send a control named fc1"):
        run(settings(), data=points(), algorithm=Algorithm(Plain(), controls))


@pytest.mark.parametrize("method", ["remember", "second", "message", "receive"])
@pytest.mark.parametrize("problem", [KeyError, ValueError])
def test_an_error_in_a_users_rule_ends_the_run_and_names_it(method: str, problem: type[Exception]) -> None:
    def broken(self: ClientRule, *args: object) -> Params:
        raise problem("nowhere")

    rule = type("Broken", (ClientRule,), {method: broken})()
    with pytest.raises((TrainingError, SettingsError), match=f"{problem.__name__}: .*nowhere"):
        next(run(settings(), data=points(), algorithm=Algorithm(rule, Average())))


def with_mu(mu: float = 5.0) -> Algorithm:
    return ALGORITHMS["fedprox"](mu)


def test_a_users_function_keeps_its_own_defaults() -> None:
    experiment = settings(algorithm={"name": "tests.algorithms.test_methods:with_mu"})
    for again in (experiment, Experiment(**tomllib.loads(experiment.toml()))):
        assert run(again, data=points()).fed.algorithm.client.mu == 5.0  # type: ignore[attr-defined]
    changed = experiment.changed(**{"algorithm.mu": 0.5})
    assert run(changed, data=points()).fed.algorithm.client.mu == 0.5  # type: ignore[attr-defined]


BAD = {
    "unknown": ({"name": "fedavgg"}, "algorithm.name = 'fedavgg': must be one of fedavg, fedprox"),
    "argument": (
        {"name": "fedavg", "alpha": 0.1},
        "algorithm.alpha = 0.1: has no effect with algorithm",
    ),
    "value": ({"name": "feddyn", "alpha": -1}, "feddyn(alpha=-1): alpha must be positive"),
    "no module": ({"name": "nowhere:rule"}, "algorithm.name = 'nowhere:rule': no module 'nowhere'"),
    "no algorithm": ({"name": "fedshift:Experiment"}, "returns Experiment; it must be an Algorithm(client, server)"),
    "too many": ({"name": "fedshift:fedprox", "nu": 1.0}, "unexpected keyword argument 'nu'"),
}


@pytest.mark.parametrize(("table", "message"), BAD.values(), ids=BAD)
def test_bad_algorithms_are_refused_in_a_sentence(table: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        run(settings(algorithm=table), data=points())
    assert message in str(refused.value)


def test_settings_record_all_arguments_and_read_them_back() -> None:
    experiment = settings(algorithm={"name": "fedadam", "lr": 0.5})
    table = tomllib.loads(experiment.toml())["algorithm"]
    assert (table["lr"], table["beta1"], table["tau"]) == (0.5, 0.9, 1e-3)
    assert Experiment(**tomllib.loads(experiment.toml())).toml() == experiment.toml()


RULE = """
from dataclasses import dataclass
import torch
from fedshift import Algorithm, ClientRule
from fedshift.algorithms import Average

@dataclass(frozen=True)
class Counting(ClientRule):
    def init(self, params):
        return {"rounds": torch.zeros(SHAPE)}

    def remember(self, decoded, w, sent, memory, travel):
        return {"rounds": memory["rounds"] + 1}

def counting():
    return Algorithm(Counting(), Average())
"""


def test_a_run_is_not_resumed_without_its_code_or_with_another_memory(tmp_path: Path) -> None:
    """In processes of their own, because a module is imported once."""
    code, settings_file = tmp_path / "counted.py", tmp_path / "run.toml"
    settings_file.write_text('algorithm = {name = "counted:counting"}\ntrain = {rounds = 40}\n')
    code.write_text(RULE.replace("SHAPE", "1"))
    started = fedshift("run", settings_file, "--out", "out", "--minutes", "0", cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("[!.]*") if path.is_file()}
    code.write_text(RULE.replace("SHAPE", "2"))
    changed = fedshift("resume", "out", cwd=tmp_path)
    assert "has rounds (1,), but that of the algorithm has rounds (2,); restore the code" in changed.stderr
    code.rename(tmp_path / "elsewhere.py")
    missing = fedshift("resume", "out", cwd=tmp_path)
    assert missing.stderr.startswith("fedshift: algorithm.name = 'counted:counting': no module 'counted'")
    assert (changed.returncode, missing.returncode) == (2, 2)
    assert before == {path: path.read_bytes() for path in before}
    (tmp_path / "elsewhere.py").rename(code)
    code.write_text(RULE.replace("SHAPE", "1"))
    assert fedshift("resume", "out", cwd=tmp_path).returncode == 0


def fedshift(*arguments: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([COMMAND, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
