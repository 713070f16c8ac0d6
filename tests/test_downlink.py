"""Lossy broadcasts: hand-worked bytes, the same bits on every engine, and models that stay apart."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import Codec, Experiment, Uplink, resume, run
from fedshift.codecs.exact import EXACT
from fedshift.engines import Batched, TrainingError
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.downlink import broadcast
from fedshift.rounds.federation import SEEN, TOTAL
from fedshift.wire.writer import size, unpack
from tests.federations import federation, points, processes, same, settings, train
from tests.own_codecs import Ends

LINKS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8, "quantizer": "uniform"},
    "feedback": {"bits": 4, "feedback": True},
    "updates": {"bits": 4, "quantizer": "stochastic", "send": "updates"},
    "lean": {"rate": 0.8, "biases": True, "coder": "range", "send": "updates"},
}
UP = {"bits": "32+4", "quantizer": "stochastic", "send": "updates"}


@pytest.mark.parametrize("name", LINKS)
def test_clients_start_from_the_decoded_frame(name: str) -> None:
    fed = federation(downlink=LINKS[name])
    state = train(fed, 2)[0]
    sending = broadcast(fed, state, [0, 3])
    assert sending.frame is not None
    arrived = unpack(sending.frame, like=fed.task.params)
    for tensor, x in sending.sent.params.items():
        update = arrived[tensor] + state.down[f"held/{tensor}"] if fed.downlink.update else arrived[tensor]
        assert torch.equal(x, update)
    assert not same(sending.sent.params, state.out.params)
    assert len(sending.frame) < size(EXACT, fed.task.params)


@dataclass(frozen=True)
class Failing(Ends, number=222):
    """Fails, or decodes NaN."""

    how: str = "nan"

    def decode(self, codes: Tensor, side: Tensor) -> Tensor:
        values = super().decode(codes, side)
        if self.how == "raise":
            raise KeyError("side")
        if self.how == "exit":
            raise SystemExit(0)
        if self.how == "refuse":
            raise ValueError("odd side data")
        return values if self.how == "" else values * float("nan")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("nan", "decoded NaN or infinity for "),
        ("raise", "KeyError: 'side'"),
        ("exit", r"SystemExit\(0\): it must not end the process"),
        ("refuse", "odd side data"),
    ],
)
@pytest.mark.parametrize("update", [False, True])
def test_errors_of_the_codec_of_the_broadcast_are_sentences(how: str, sentence: str, update: bool) -> None:
    fed = replace(federation(), downlink=Uplink(Codec(Failing(how=how)), update=update))
    with pytest.raises(TrainingError, match=rf"^round 1, downlink: .*Failing.*{sentence}") as caught:
        broadcast(fed, fed.start(), [0])
    assert "\n" not in str(caught.value)


def test_hand_worked_bytes_of_clients_that_missed_rounds() -> None:
    """A client that never received gets the exact model; one that missed two frames gets those, or the model."""
    fed = federation(downlink=LINKS["updates"])
    full, state, lengths = size(EXACT, fed.task.params), fed.start(), []
    for clients, expected in (([0, 1], 2 * full), ([1], None), ([1, 2], None), ([0, 1], None)):
        sending = broadcast(fed, state, clients)
        assert sending.frame is not None
        lengths.append(len(sending.frame))
        if clients == [1]:
            expected = lengths[1]
        elif clients == [1, 2]:
            expected = lengths[2] + full
        elif expected is None:
            expected = min(sum(lengths[1:]), full) + lengths[3]
        assert sending.length == expected
        state = state._replace(number=state.number + 1, down=sending.down)
    assert int(state.down[TOTAL]) == sum(lengths)
    assert state.down[SEEN].tolist()[:4] == [sum(lengths), sum(lengths), sum(lengths[:3]), -1]


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "ef21", "fedvarp", "grouped"])
@pytest.mark.parametrize("name", LINKS)
def test_engines_agree(name: str, algorithm: str) -> None:
    fed = federation(downlink=LINKS[name], uplink=UP, algorithm={"name": algorithm})
    one, outcomes, _ = train(fed)
    engine = processes(fed.task, 2)
    try:
        two, others, _ = train(fed, engine=engine)
    finally:
        engine.close()
    assert same(one.out.params, two.out.params)
    assert same(one.down, two.down)
    assert [outcome.bytes_down for outcome in outcomes] == [outcome.bytes_down for outcome in others]
    fed = federation(downlink=LINKS[name], algorithm={"name": algorithm})
    stacked, alone = train(fed, 2, Batched(fed.task, "fp32"))[0], train(fed, 2)[0]
    for tensor, x in alone.out.params.items():
        torch.testing.assert_close(stacked.out.params[tensor], x, rtol=1e-2, atol=1e-2 * float(x.abs().max()))


def test_updates_are_added_to_the_servers_model() -> None:
    """Without training, w_k is the broadcast, and the model must not move, however coarse the broadcast is."""
    fed = federation(downlink={"bits": 1, "quantizer": "uniform"}, train={"lr": 1e-30, "momentum": 0.0})
    state, _, _ = train(fed, 3)
    for name, x in fed.task.params.items():
        torch.testing.assert_close(state.out.params[name], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LINKS)
def test_a_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    experiment = settings(downlink=LINKS[name], uplink=UP, shift={"on": True}, train={"rounds": 4})
    whole = run(experiment, tmp_path / "whole", data=points())
    list(whole)
    stopped = run(experiment, tmp_path / "stopped", data=points())
    next(stopped), next(stopped)
    stopped.close()
    resumed = resume(tmp_path / "stopped", data=points())
    list(resumed)
    assert same(whole.params, resumed.params)
    assert same(whole.state.down, resumed.state.down)


def test_eight_bits_down_are_within_noise_of_an_exact_broadcast() -> None:
    base = {"train": {"rounds": 30}, "engine": {"name": "sequential"}, "record": {"evaluate": 10}}
    scores = {}
    for name, link in (("exact", {}), ("8 bits", {"bits": 8})):
        scores[name] = [outcome.accuracy or 0.0 for outcome in run(Experiment(**base, downlink=link))][-1]
    assert abs(scores["8 bits"] - scores["exact"]) < 0.03


def test_lean_in_both_directions() -> None:
    experiment = settings(uplink="lean", downlink="lean")
    assert (experiment.downlink.quantizer, experiment.downlink.send) == ("step", "updates")
    assert Experiment(**tomllib.loads(experiment.toml())).toml() == experiment.toml()


BAD: dict[str, tuple[Any, str]] = {
    "paper": ("paper", "downlink = 'paper': must be a table, or one of exact, lean, extreme"),
    "name": ("leen", "downlink = 'leen': must be a table, or one of"),
    "feedback": ({"bits": 4, "send": "updates", "feedback": True}, "downlink.feedback = true: updates of the downlink"),
    "bits": ({"bits": 9}, "downlink.bits = 9: "),
    "groups": ({"group": {}}, "unknown setting 'downlink.group'"),
}


@pytest.mark.parametrize(("table", "message"), BAD.values(), ids=BAD)
def test_bad_settings_are_refused_in_a_sentence(table: Any, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(downlink=table)
    assert message in str(refused.value)
