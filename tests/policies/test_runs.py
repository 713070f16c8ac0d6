"""Runs with an uplink policy: bytes, share, memory, records, resuming, and policies that fail."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedshift import Codec, Experiment, Identity, KMeans, Params, Policy, PolicyStats, Uplink, resume, run
from fedshift.codecs.exact import EXACT
from fedshift.codecs.named import CODECS, QUANTIZERS, make_codec
from fedshift.core.files import RunError
from fedshift.engines import Batched, Sequential, TrainingError
from fedshift.engines.client import WRITERS
from fedshift.experiment.build import build
from fedshift.experiment.toml import SettingsError, merge
from fedshift.rounds.federation import Federation
from fedshift.rounds.policy import LOSS_BYTES
from fedshift.rounds.uplink_json import dumps, loads
from fedshift.runs.recorded import Recorded, recorded
from tests.federations import federation, points, processes, same, settings, train
from tests.runs import DISK, SELDOM, digits, record, resume_exactly, small, stopped

FOUR = Uplink(Codec(KMeans(4)), update=True)


@dataclass(frozen=True)
class Listed(Policy):
    """Uplinks of rounds 1, 2, ..., the same for all clients; the last one is repeated."""

    uplinks: tuple[Uplink, ...]

    def choose(
        self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats
    ) -> tuple[Sequence[Uplink], Params]:
        return [self.uplinks[min(number, len(self.uplinks)) - 1]] * len(cohort), state


@dataclass(frozen=True)
class WithLoss(Listed):
    needs: ClassVar[frozenset[str]] = frozenset({"loss"})


def with_policy(policy: Policy, **changed: Any) -> Federation:
    changed["uplink"] = {"bits": 8} | changed.get("uplink", {})
    return build(settings(**changed), data=points(), policy=policy)


def test_a_policy_that_changes_nothing_has_the_bytes_of_the_settings() -> None:
    reference, expected, _ = train(federation(uplink={"bits": 4, "send": "updates", "quantizer": "kmeans"}))
    fed = with_policy(Listed((FOUR,)))
    state, outcomes, _ = train(replace(fed, run=federation().run))
    assert same(state.out.params, reference.out.params)
    assert [outcome.bytes_up for outcome in outcomes] == [outcome.bytes_up for outcome in expected]
    assert {used.codec for outcome in outcomes for used in outcome.uplinks} == {"KMeans(bits=4)"}
    assert sum(used.bytes for used in outcomes[0].uplinks) == sum(outcomes[0].bytes_up)


def test_a_reported_loss_is_counted_as_four_bytes_of_side_data() -> None:
    (_, without, _), (_, reporting, _) = (
        train(with_policy(kind((FOUR,)), uplink={"bandwidth": 1e3})) for kind in (Listed, WithLoss)
    )
    for plain, outcome in zip(without, reporting, strict=True):
        codes, side, header = plain.bytes_up
        assert outcome.bytes_up == (codes, side + 5 * LOSS_BYTES, header)
        assert [used.bytes for used in outcome.uplinks] == [used.bytes + LOSS_BYTES for used in plain.uplinks]
        assert outcome.layers == plain.layers


def test_the_batched_engine_reports_the_same_losses() -> None:
    fed = with_policy(WithLoss((FOUR,)), engine={"name": "batched"})
    reference, batched = (train(fed, 2, engine)[0].policy for engine in (Sequential(fed.task), Batched(fed.task)))
    assert torch.equal(batched["reports/last"], reference["reports/last"])
    assert batched["reports/loss"].gt(0).sum() >= 5
    for name in ("reports/loss", "reports/norm", "reports/bytes"):
        assert torch.allclose(batched[name], reference[name], rtol=1e-4), name


def test_the_share_is_that_of_lossy_uploads_in_each_round() -> None:
    @dataclass(frozen=True)
    class Half(Policy):
        def choose(
            self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats
        ) -> tuple[Sequence[Uplink], Params]:
            exact = number == 2
            return [Uplink() if exact or client % 3 else FOUR for client in cohort], state

    fed = with_policy(Half(), shift={"on": True, "per": "layer"}, train={"cohort": 6})
    for engine in (Sequential(fed.task), Batched(fed.task)):
        for outcome in train(fed, 3, engine)[1]:
            clients = [used.client for used in outcome.uplinks]
            lossy = [client for client in clients if outcome.number != 2 and not client % 3]
            assert outcome.share == pytest.approx(len(lossy) / 6)
            assert [used.client for used in outcome.uplinks if used.codec != "exact"] == lossy


def test_only_clients_with_eight_bits_or_fewer_are_chosen_for() -> None:
    seen: list[int] = []

    class Watching(Listed):
        def choose(
            self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats
        ) -> tuple[Sequence[Uplink], Params]:
            seen.extend(cohort)
            assert [uplink.codec.bits for uplink in stats.uplinks] == [4] * len(cohort)
            return super().choose(state, number, cohort, stats)

    fed = with_policy(Watching((FOUR,)), uplink={"bits": "32+4"})
    for outcome in train(fed)[1]:
        assert all((used.codec == "exact") == (used.client % 2 == 0) for used in outcome.uplinks)
    assert seen
    assert all(client % 2 for client in seen)


FED_BACK = Uplink(Codec(KMeans(1)), update=True, feedback=True)


@pytest.mark.parametrize(
    ("later", "pending"),
    [
        (Uplink(EXACT, update=True, feedback=True), False),  # sends the error exactly
        (Uplink(Codec(KMeans(1)), update=True), True),  # does not feed back: the error waits
        (FED_BACK, True),
    ],
)
def test_an_error_is_sent_once_or_waits_for_feedback(later: Uplink, pending: bool) -> None:
    fed = with_policy(Listed((FED_BACK, later)), train={"cohort": 12})
    for engine in (Sequential(fed.task), processes(fed.task, 2), Batched(fed.task)):
        (_, _, before), (_, _, after) = (train(fed, rounds, engine) for rounds in (1, 2))
        engine.close()
        assert len(before.held) == len(after.held) == 12
        for client, held in after.held.items():
            assert bool(held) == pending
            assert same(held, before.held[client]) == (pending and not later.feedback)


def test_writers_of_many_uplinks_are_not_kept_forever() -> None:
    codecs = [make_codec("step", 8, rate=0.5 + number / 1000) for number in range(WRITERS + 20)]
    fed = with_policy(Listed(tuple(Uplink(codec, update=True) for codec in codecs)), train={"cohort": 1})
    engine = Sequential(fed.task)
    train(fed, len(codecs), engine)
    assert list(engine.client.writers) == [Uplink(codec, update=True) for codec in codecs[-WRITERS:]]


CHOSEN = [{"name": "dadaquant", "phi": 2}, "adaquantfl", {"name": "deadline", "budget": 3000.0}]


@pytest.mark.parametrize("policy", CHOSEN)
@pytest.mark.parametrize("further", [{}, merge(DISK, SELDOM)])
def test_a_resumed_run_has_the_bytes_of_an_undisturbed_one(tmp_path: Path, policy: Any, further: Any) -> None:
    experiment = stopped(tmp_path / "run", {"uplink": {"policy": policy}}, further, after=5)
    assert resume_exactly(tmp_path / "run", experiment, tmp_path / "whole") == []
    files = [(tmp_path / name / "uplinks.csv").read_text() for name in ("run", "whole")]
    assert files[0] == files[1]
    assert len(files[0].splitlines()) == 1 + 8 * 4


def test_a_record_names_the_codec_and_the_bytes_of_each_client(tmp_path: Path) -> None:
    experiment = small({"uplink": {"policy": {"name": "dadaquant", "phi": 2}, "bits": "32+8"}})
    outcomes = list(run(experiment, tmp_path / "run", data=digits()))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run" / "uplinks.csv").read_text())))
    assert list(rows[0]) == ["round", "client", "codec", "bytes", "bits"]
    found = recorded(tmp_path / "run")
    assert isinstance(found, Recorded)
    assert [(u.round, u.client, u.codec, u.bytes) for u in found.uplinks] == [
        (outcome.number, used.client, used.codec, used.bytes) for outcome in outcomes for used in outcome.uplinks
    ]
    assert found.lost == {}
    sums = found.figure("bytes.codes") + found.figure("bytes.side") + found.figure("bytes.header")
    assert [sum(u.bytes for u in found.uplinks if u.round == n) for n in range(1, 9)] == sums.tolist()


def test_damaged_lines_of_the_uplinks_are_skipped_and_counted(tmp_path: Path) -> None:
    list(run(small({"uplink": {"policy": "adaquantfl"}}), tmp_path / "run", data=digits()))
    path = tmp_path / "run" / "uplinks.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "2,x,y,1,2", "3,1,exact,5,nan", *lines[5:], "8,1"]))
    found = recorded(tmp_path / "run")
    assert isinstance(found, Recorded)
    assert len(found.uplinks) == 30
    assert found.lost == {"uplinks.csv": 3}


def test_a_run_without_a_policy_has_no_file_of_uplinks_and_the_number_it_had(tmp_path: Path) -> None:
    list(run(small(), tmp_path / "run", data=digits()))
    assert not (tmp_path / "run" / "uplinks.csv").exists()
    assert "policy" not in (tmp_path / "run" / "settings.toml").read_text()
    assert "policy" not in Experiment().model_dump()["uplink"]  # the numbers of runs in frames stay the same


def test_a_policy_passed_as_an_object_must_be_passed_again(tmp_path: Path) -> None:
    experiment, policy = small(), Listed((FOUR, Uplink(Codec(KMeans(2)), update=True)))
    whole = list(run(experiment, tmp_path / "whole", data=digits(), policy=policy))
    stopped_run = run(experiment, tmp_path / "run", data=digits(), policy=policy)
    assert next(stopped_run).number == 1
    stopped_run.close()
    with pytest.raises(RunError, match=r"started in Python with its own policy; resume it there with .*policy=\.\.\."):
        resume(tmp_path / "run", data=digits())
    assert [outcome.bytes_up for outcome in resume(tmp_path / "run", data=digits(), policy=policy)] == [
        outcome.bytes_up for outcome in whole[1:]
    ]
    assert record(tmp_path / "run") == record(tmp_path / "whole")
    with pytest.raises(TypeError, match="policy=3: must be an instance of a class derived from Policy"):
        run(experiment, policy=3)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Answering(Policy):
    """Gives the same wrong answer in round 2."""

    answer: Any

    def init(self, clients: int, rounds: int) -> Params:
        return {"x": torch.zeros(2)}

    def choose(self, state: Params, number: int, cohort: Sequence[int], stats: PolicyStats) -> Any:
        if number == 1:
            return [FOUR] * len(cohort), state
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Unnumbered(KMeans):
    pass


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "choose returned NoneType instead of uplinks and state"),
        (([FOUR], {}), "choose returned 1 uplinks for 5 clients"),
        (([8] * 5, {}), r"choose returned 8, which must be an Uplink\(codec, update, feedback\)"),
        (([Uplink(Codec(Unnumbered(4)))] * 5, {}), "has no number in the wire format"),
        (([FOUR] * 5, {}), r"choose returned the state \{\}, but init returned \{'x'"),
        (([FOUR] * 5, {"x": torch.tensor([1.0, torch.nan])}), "state whose x is NaN or infinite"),
        (([FOUR] * 5, None), "choose returned a state of type NoneType instead of a dictionary of tensors"),
        (([FOUR] * 5, {"x": 1.0}), "choose returned a state whose x is not a tensor"),
        (ZeroDivisionError("no time"), "ZeroDivisionError: no time"),
    ],
)
def test_a_wrong_answer_ends_the_run_with_one_sentence(answer: Any, why: str) -> None:
    with pytest.raises(TrainingError, match=rf"^round 2, uplink policy Answering.*{why}"):
        train(with_policy(Answering(answer)))


def test_a_policy_that_cannot_begin_is_refused_before_training() -> None:
    @dataclass(frozen=True)
    class Odd(Answering):
        needs: ClassVar[frozenset[str]] = frozenset({"weather"})

    class Failing(Answering):
        def init(self, clients: int, rounds: int) -> Params:
            raise KeyError("x")

    class Number(Answering):
        def init(self, clients: int, rounds: int) -> Params:
            return {"x": 3}  # type: ignore[dict-item]

    class Listed(Answering):
        def init(self, clients: int, rounds: int) -> Params:
            return [torch.zeros(2)]  # type: ignore[return-value]

    for kind, why in (
        (Odd, "needs 'weather'; policies can need bandwidth, loss"),
        (Failing, "KeyError: 'x'"),
        (Number, "init returned a state whose x is not a tensor"),
        (Listed, "init returned a state of type list instead of a dictionary of tensors"),
    ):
        with pytest.raises(SettingsError, match=rf"^uplink\.policy: .*{why}"):
            with_policy(kind(None))
    with pytest.raises(SettingsError, match=r"^uplink\.policy: Deadline.* needs bandwidths; set uplink\.bandwidth"):
        federation(uplink={"policy": {"name": "deadline", "deadline": 1.0}})


def test_a_client_whose_loss_is_not_finite_is_left_out() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = torch.nn.functional.cross_entropy(outputs, targets)
        return value if torch.is_grad_enabled() or 0 not in targets[:1] else value / 0

    fed = build(settings(uplink={"bits": 8}), data=points(), loss=loss, policy=WithLoss((FOUR,)))
    engine = processes(fed.task, 2)
    outcomes = train(fed, 2, engine)[1]
    engine.close()
    failed = [why for outcome in outcomes for why in outcome.failed.values()]
    assert failed
    assert set(failed) == {"its loss is missing, NaN or infinite"}
    assert sum(outcome.arrived for outcome in outcomes) == 10 - len(failed)


def test_every_codec_can_be_named_in_a_message() -> None:
    named = [make() for make in CODECS.values()]
    made = [make_codec(name, 4 if name != "ternary" else 2) for name in QUANTIZERS]
    for codec in [*named, *made, EXACT, Codec(Identity()), make_codec("step", 8, rate=0.123456789)]:
        for uplink in (Uplink(codec), Uplink(codec, update=True, feedback=not codec.quantizer.expands)):
            assert loads(dumps(uplink)) == uplink


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "{}",
        '{"codec": {}, "update": true, "feedback": false}',
        "[" * 100_000,
        dumps(FOUR).replace("true", "1"),
    ],
)
def test_a_text_that_is_not_an_uplink_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not an uplink: "):
        loads(text)


def test_a_codec_that_is_not_known_here_is_named_by_its_number() -> None:
    with pytest.raises(ValueError, match="quantizer 250 is not known here; import the module that defines it"):
        loads(dumps(FOUR).replace('"number": 2', '"number": 250'))


@pytest.mark.parametrize(
    ("uplink", "why"),
    [
        ({"policy": "adaptive"}, r"uplink\.policy\.name = 'adaptive': must be one of adaquantfl, dadaquant, deadline"),
        (
            {"policy": {"name": "dadaquant", "q": 3}},
            r"uplink\.policy\.q = 3: dadaquant has no such argument; known are q_min, q_max",
        ),
        ({"policy": {"name": "dadaquant", "q_max": "8"}}, r"uplink\.policy\.q_max = '8': .* valid integer"),
        ({"policy": "deadline"}, r"uplink\.policy = 'deadline': Deadline\(\): needs a deadline"),
        ({"policy": "dadaquant", "bits": 32}, r"uplink\.policy = 'dadaquant': has no effect with bits = 32"),
        ({"policy": "dadaquant", "rate": 0.5}, r"uplink\.rate: has no effect with policy = 'dadaquant'"),
        ({"policy": "dadaquant", "codec": "sign"}, r"uplink\.codec: has no effect with policy = 'dadaquant'"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(uplink: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=f"^{why}"):
        Experiment(uplink=uplink)
