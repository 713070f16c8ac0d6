"""Runs with different algorithms, quantizers and feedback in one stack: each gives the result it would give alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift.algorithms.base import ClientRule, adjusted, is_affine
from fedshift.core.types import Broadcast, Params
from fedshift.engines import Batched, Sequential
from fedshift.engines.gpu import kernels
from fedshift.engines.gpu.coding import uploads
from fedshift.engines.gpu.steps import AFFINE, PLAIN, STAGES, arrange, direction
from fedshift.rounds.engine import Upload
from fedshift.rounds.federation import Federation
from fedshift.rounds.loop import Ended, OpenRound, Ram, Training, run_rounds
from fedshift.rounds.uplink import base_of, read
from tests.federations import federation, train

LEAN: dict[str, Any] = {"rate": 0.8, "biases": True, "send": "updates", "feedback": True}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"uplink": {"bits": "32+4"}},
    "fedprox": {"algorithm": {"name": "fedprox", "mu": 0.5}},
    "scaffold": {"algorithm": {"name": "scaffold"}, "uplink": {"bits": 8}},
    "not affine": {"algorithm": {"name": "scafcom"}},
    "weaker fedprox": {"algorithm": {"name": "fedprox", "mu": 0.1}, "uplink": {"bits": 4, "quantizer": "uniform"}},
    "not affine too": {"algorithm": {"name": "scafcom", "beta": 0.5}, "uplink": {"bits": 8}},
    "feedback": {"uplink": {"bits": "4+2", "feedback": True}},
    "feddyn": {"algorithm": {"name": "feddyn", "alpha": 0.1}},
    "lean": {"uplink": LEAN},
    "fedcomgate": {"algorithm": {"name": "fedcomgate"}, "uplink": LEAN | {"rate": 0.4}},
}
EQUAL: dict[str, Any] = {}
UNEQUAL: dict[str, Any] = {"data": {"partition": "dirichlet", "alpha": 0.3, "least": 2}}
TRAINING: dict[str, dict[str, Any]] = {
    "momentum": {},
    "no momentum": {"momentum": 0.0},
    "clip and decay": {"clip": 0.5, "weight_decay": 0.05},
}


def federations(**changed: Any) -> list[Federation]:
    return [federation(**case | changed, seed=seed) for seed, case in enumerate(RUNS.values())]


def pack(feds: list[Federation], engine: Batched, rounds: int) -> list[Training]:
    """Train runs together."""
    runs = [Training(fed, engine, rounds, memory=Ram()) for fed in feds]
    for _, outcome in run_rounds(runs, engine):
        assert not isinstance(outcome, Ended), outcome
    return runs


def weights(fed: Federation, found: list[Upload]) -> list[dict[str, Tensor]]:
    """Weights, or messages, that the server decodes."""
    start = base_of(fed.algorithm.client, fed.start().out.params, fed.task.trained)
    return [read(upload.frame, start) for upload in found]


@pytest.mark.parametrize("split", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("training", TRAINING)
def test_every_run_of_a_mixed_pack_trains_as_alone(split: dict[str, Any], training: str) -> None:
    """Local weights of the first round, sent exactly, compared with one client at a time."""
    exact = {"uplink": {"bits": 32}, "train": TRAINING[training]}
    feds = federations(**split | exact)
    opened = [OpenRound(fed, fed.start(), Ram()) for fed in feds]
    jobs = [one.job for one in opened if one.job]
    for fed, job, together in zip(feds, jobs, Batched(feds[0].task).train(jobs), strict=True):
        expected = weights(fed, list(Sequential(fed.task).train([job])[0]))
        for ours, theirs in zip(weights(fed, list(together)), expected, strict=True):
            for name, x in theirs.items():
                torch.testing.assert_close(ours[name], x, rtol=0, atol=1e-4, msg=f"{job.rule} {name}")


def test_adam_steps_every_run_of_a_mixed_pack_as_alone() -> None:
    steady = {"optimizer": {"name": "adamw", "eps": 1e-4}, "momentum": 0.0, "lr": 0.01, "weight_decay": 0.1}
    cases = [RUNS[name] for name in ("fedavg", "fedprox", "feddyn")]
    feds = [federation(**case | UNEQUAL | {"train": steady, "uplink": {"bits": 32}}) for case in cases]
    for run in pack(feds, Batched(feds[0].task), 1):
        for name, x in train(run.fed, 1)[0].out.params.items():
            torch.testing.assert_close(run.state.out.params[name], x, rtol=0, atol=1e-4)


def test_rounds_of_a_mixed_pack_are_those_of_each_run_alone() -> None:
    """Three rounds, with memory; a code at a border may differ, and with it a weight by one level."""
    feds = federations()
    engine = Batched(feds[0].task)
    for case, run in zip(RUNS, pack(feds, engine, 3), strict=True):
        alone, _, memory = train(run.fed, engine=Batched(run.fed.task))
        atol = 1e-4 if "uplink" not in RUNS[case] else 2e-3
        for name, x in alone.out.params.items():
            torch.testing.assert_close(run.state.out.params[name], x, rtol=0, atol=atol, msg=case)
        assert isinstance(run.memory, Ram)
        assert run.memory.held.keys() == memory.held.keys()
        assert all(kept.keys() == memory.held[client].keys() for client, kept in run.memory.held.items())
    assert [rule.beta for rule in engine.steps.rules] == [0.2, 0.5]  # type: ignore[attr-defined]


def test_equal_weights_have_equal_codes_in_a_mixed_pack() -> None:
    feds = federations()
    engine = Batched(feds[0].task)
    opened = [OpenRound(fed, fed.start(), Ram()) for fed in feds]
    with torch.no_grad():
        trained = engine._train([one.job for one in opened if one.job])
        together, alone = uploads(engine.task, trained), [uploads(engine.task, [job])[0] for job in trained]
    for fed, ours, theirs in zip(feds, together, alone, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert all(torch.equal(x, read(b.frame, {})[name]) for name, x in read(a.frame, {}).items())
            assert len(a.frame) == len(b.frame)
            assert a.memory.keys() == b.memory.keys()
            assert all(torch.equal(x, b.memory[name]) for name, x in a.memory.items()), fed.algorithm


def test_plain_rows_have_neither_a_pull_nor_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each call of the kernel, which is replaced by torch; all runs have five clients."""
    called: list[tuple[int, bool, bool]] = []

    def sgd(
        w: Tensor,
        v: Tensor,
        g: Tensor,
        lr: Tensor,
        momentum: float,
        shadow: Tensor | None,
        pull: Tensor | None,
        offset: Tensor | None,
    ) -> None:
        called.append((len(w), pull is not None, offset is not None))
        assert all(x.is_contiguous() for x in (w, v, g))
        assert offset is None or offset.shape == w.shape
        v.mul_(momentum).add_(direction(g, w, pull, offset))
        w.sub_(v * lr.view(-1, *[1] * (w.ndim - 1)))

    monkeypatch.setattr(kernels, "sgd", sgd)
    feds = federations()
    engine, expected = Batched(feds[0].task), pack(feds, Batched(feds[0].task), 1)
    engine.steps.fused = True
    for run, reference in zip(pack(feds, engine, 1), expected, strict=True):
        for name, x in reference.state.out.params.items():
            torch.testing.assert_close(run.state.out.params[name], x, rtol=0, atol=1e-6)
    tensors = len(feds[0].task.trained)
    kinds = [(15, False, False), (25, True, True), (5, False, False), (5, False, False)]
    assert called[: 4 * tensors] == [kind for kind in kinds for _ in range(tensors)]
    buffers = engine.steps.buffers
    assert buffers is not None
    assert {len(x) for x in buffers.offset.values()} == {25}
    assert {len(x) for part in buffers.rules.values() for stack in part for x in stack.values()} == {5}


def test_a_pack_whose_runs_end_and_whose_cohorts_vary_keeps_its_buffers() -> None:
    """Clients drop out, so that numbers of clients of each kind rise and fall between rounds."""
    feds = federations(train={"dropout": 0.4})
    engine = Batched(feds[0].task)
    runs = [Training(fed, engine, 2 + place % 4, memory=Ram()) for place, fed in enumerate(feds)]
    for _, outcome in run_rounds(runs, engine):
        assert not isinstance(outcome, Ended), outcome
    for case, run in zip(RUNS, runs, strict=True):
        if "uplink" not in RUNS[case]:
            alone = train(run.fed, run.rounds)[0].out.params
            for name, x in alone.items():
                torch.testing.assert_close(run.state.out.params[name], x, rtol=0, atol=1e-4)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=60))
def test_a_layout_trains_every_client_until_its_last_step(clients: list[tuple[int, int]]) -> None:
    counts, kinds = [n for n, _ in clients], [kind for _, kind in clients]
    layout = arrange(counts, kinds)
    assert sorted(layout.rows) == list(range(len(clients)))
    assert len(layout.steps) == max(counts)
    for step, segments in enumerate(layout.steps):
        assert segments[0].first == 0
        assert all(a.last == b.first and a.kind != b.kind for a, b in pairwise(segments))
        assert all(row < segments[-1].last for n, row in zip(counts, layout.rows, strict=True) if n > step)
        for kind, row, place in zip(kinds, layout.rows, layout.kind_places, strict=True):
            for segment in segments:
                if segment.first <= row < segment.last:
                    assert kind == segment.kind
                    assert place == segment.kind_first + row - segment.first
    assert all(b[-1].last <= a[-1].last for a, b in pairwise(layout.steps))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.randoms())
def test_segments_depend_only_on_the_number_of_clients_of_each_kind(kinds: list[int], random: Any) -> None:
    def stages(kinds: list[int]) -> set[Any]:
        counts = [random.randint(1, 50) for _ in kinds[1:]]
        return set(arrange([*counts, counts[0] + 1], kinds).steps)

    other = sorted(kinds, key=lambda _: random.random())
    whole = max(stages(kinds), key=lambda segments: segments[-1].last)
    assert whole in stages(other)
    assert len(stages(kinds)) <= STAGES
    equal = arrange([7] * len(kinds), kinds).steps
    assert len(set(equal)) == 1
    assert [segment.kind for segment in equal[0]] == sorted(set(kinds))


def test_the_kinds_of_the_rules() -> None:
    feds = dict(zip(RUNS, federations(), strict=True))
    steps = Batched(feds["fedavg"].task).steps
    kinds = {case: steps._kind(fed.algorithm.client) for case, fed in feds.items()}
    assert [case for case, kind in kinds.items() if kind == PLAIN] == ["fedavg", "feedback", "lean"]
    assert [case for case, kind in kinds.items() if kind > AFFINE] == ["not affine", "not affine too"]
    assert all(is_affine(feds[case].algorithm.client) for case, kind in kinds.items() if kind <= AFFINE)


class Partial(ClientRule):
    """A rule that forgets all tensors but the first."""

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return dict([*grad.items()][:1])


class Reversed(ClientRule):
    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        return dict(reversed(grad.items()))


def test_directions_need_every_tensor_and_have_the_order_of_the_gradients() -> None:
    grad = {name: torch.full((2,), x) for name, x in (("a", 1.0), ("b", 2.0))}
    nothing = Broadcast({}, {})
    assert [*adjusted(Reversed(), grad, grad, nothing, {})] == ["a", "b"]
    with pytest.raises(ValueError, match=r"^Partial.adjust must return a tensor for each of a, b; it returned a$"):
        adjusted(Partial(), grad, grad, nothing, {})
