"""Limits on the influence of one node with well-formed uploads."""

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold, ScaffoldMod, correction
from fedshift.flower.addon.arrays import KEY, enclose, to_params, to_record
from fedshift.flower.testing import LocalGrid
from tests.federations import forged
from tests.flower.apps import client_app, model, moved, run, same
from tests.flower.attacks import BAD, Hostile, InOrder, edited, frame, metrics, params, survivors

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 6}


def full(value: float) -> Any:
    """A valid frame with the same value everywhere."""
    return params(lambda w: {name: torch.full_like(x, value) for name, x in w.items()})


@pytest.mark.parametrize("value", [3e38, 1e30, -1e4])
def test_an_update_far_longer_than_the_median_is_left_out_and_named_with_its_numbers(value: float, caplog: Any) -> None:
    strategy, hostile = FedShift(InOrder(fraction_evaluate=0.0)), Hostile(edited(full(value)))
    after = survivors(strategy, hostile, rounds=1)
    assert same(after, survivors(FedShift(InOrder(fraction_evaluate=0.0)), None, rounds=1))
    assert strategy.rounds[0].outliers == list(strategy.rounds[0].failed) == [hostile.node]
    norm = re.findall(rf"node {hostile.node} is left out: update norm (\S+) is", caplog.text)
    assert float(norm[0]) == pytest.approx(abs(value) * math.sqrt(8 * 5 + 8 + 3 * 8), rel=0.01)
    assert "times the round's typical norm" in caplog.text
    assert "at most 50 times is allowed" in caplog.text


def test_the_bound_is_a_multiple_of_the_median_and_can_be_changed_or_switched_off() -> None:
    def train(start: Any, client: int, context: Any) -> Any:  # changes of norm 3, 3, 3, 3, 3, and 30
        return {"w": start["w"] + (30.0 if client == BAD else 3.0)}, {"num-examples": 1}

    start = to_record({"w": torch.zeros(1, 1)})
    for bound, used in ((20, 6), (9, 5), (0, 6)):
        strategy = FedShift(FedAvg(**ALL), bound=bound)
        result = run(strategy, train=train, start=start, rounds=1)
        assert strategy.rounds[0].used == used
        assert result.arrays["w"].numpy().item() == pytest.approx(7.5 if used == 6 else 3.0)


@pytest.mark.parametrize(("length", "examples", "used"), [(60.0, 1, 5), (60.0, 100, 6), (31.0, 2, 5), (80.0, 10**9, 5)])
def test_a_node_with_more_examples_may_move_farther_by_their_square_root(
    length: float, examples: int, used: int
) -> None:
    """Up to sqrt(10): five nodes move by 1, so with 10 to 10^9 times their examples a sixth may move by 63."""

    def train(start: Any, client: int, context: Any) -> Any:
        return {"w": start["w"] + (length if client == BAD else 1.0)}, {
            "num-examples": examples if client == BAD else 1
        }

    strategy = FedShift(FedAvg(**ALL), bound=20)
    run(strategy, train=train, start=to_record({"w": torch.zeros(1, 1)}), rounds=1)
    assert strategy.rounds[0].used == used


@pytest.mark.parametrize("setting", [{"bound": 0.5}, {"max_weight": -1}, {"bound": float("nan")}])
def test_limits_below_the_median_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more, or 0 for no limit"):
        FedShift(FedAvg(), **setting)  # type: ignore[arg-type]


def test_two_uploads_are_no_majority_and_a_result_that_is_not_finite_names_the_longest(caplog: Any) -> None:
    def train(start: Any, client: int, context: Any) -> Any:
        return {name: x + (1e30 if client else 0.1) for name, x in start.items()}, {"num-examples": 1}

    strategy = FedShift(flower.FedAdam(fraction_evaluate=0.0))
    with np.errstate(over="ignore"), pytest.raises(NoUploadsError, match=r"v_t is NaN or infinite; the largest"):
        run(strategy, [QuantizeMod(32)], nodes=2, train=train, rounds=9)
    node = LocalGrid(client_app(), 2, seed=1).node_of(1)
    assert f"the largest update (norm 8.49e+30) is from node {node}; the round is skipped" in caplog.text
    assert [x.used for x in strategy.rounds] == [0] * 5


def test_quantized_weights_are_not_outliers_among_small_exact_updates() -> None:
    """One bit loses more than half of the weights' norm, which is a thousand times the exact updates."""

    def train(start: Any, client: int, context: Any) -> Any:
        return {name: x * 1.0005 for name, x in start.items()}, {"num-examples": 1}

    nodes = [{"partition-id": i, "bits": 1 if i > 3 else 32} for i in range(6)]
    strategy = FedShift(FedAvg(**ALL))
    run(strategy, [QuantizeMod()], nodes=nodes, train=train, rounds=2)
    assert [(x.used, x.lossy) for x in strategy.rounds] == [(6, 2)] * 2


def normalised() -> ArrayRecord:
    w, mean, var = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(4), torch.ones(4)
    return to_record({"w": w, "norm.running_mean": mean, "norm.running_var": var})


@pytest.mark.parametrize(("variance", "used"), [(50.0, 6), (1e38, 5)])
def test_statistics_of_other_data_are_used_and_absurd_ones_are_not(variance: float, used: int) -> None:
    def train(start: Any, client: int, context: Any) -> Any:
        trained = {"w": start["w"] * 1.01, "norm.running_mean": start["norm.running_mean"] + 0.01}
        var = start["norm.running_var"] + (variance if client == BAD else 0.01)
        return trained | {"norm.running_var": var}, {"num-examples": 1}

    strategy = FedShift(FedAvg(**ALL))
    run(strategy, [QuantizeMod(32)], start=normalised(), train=train, rounds=1)
    assert strategy.rounds[0].used == used
    assert all("buffer update norm 2e+38" in why for why in strategy.rounds[0].failed.values())


@pytest.mark.parametrize("mods", [[], [QuantizeMod(32)], [QuantizeMod(4, updates=True)]])
def test_one_negative_variance_does_not_reach_the_mean(mods: list[Any]) -> None:
    """-100 is within the bound, and would make the mean of six variances near 1 negative."""

    def train(start: Any, client: int, context: Any) -> Any:
        var = torch.full((4,), -100.0) if client == BAD else start["norm.running_var"] * 0.9
        return start | {"w": start["w"] * 1.01, "norm.running_var": var}, {"num-examples": 1}

    strategy = FedShift(FedAvg(**ALL))
    result = run(strategy, mods, start=normalised(), train=train, rounds=1)
    assert list(strategy.rounds[0].failed.values()) == ["norm.running_var: contains a negative variance"]
    assert result.arrays["norm.running_var"].numpy() == pytest.approx(np.full(4, 0.9))


def weighing(examples: Any) -> Any:
    def train(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return w, metrics | ({"num-examples": examples} if client == BAD else {"num-examples": 10 + client})

    return train


@pytest.mark.parametrize("examples", [10**18, 1e18])
def test_a_weight_counts_at_most_ten_medians(examples: float, caplog: Any) -> None:
    """Weights 10, 11, 12, 14, 15 and 1e18: the lower median is 12, so the last counts as 120."""
    strategy = FedShift(FedAvg(**ALL))
    result = run(strategy, [QuantizeMod(32)], train=weighing(examples), rounds=1)
    random.seed(3)
    assert same(result.arrays, run(FedAvg(**ALL), train=weighing(120), rounds=1).arrays)
    node = LocalGrid(client_app(), 6, seed=1).node_of(BAD)
    assert strategy.rounds[0].capped == [node]
    assert strategy.rounds[0].failed == {}
    assert f"num-examples of node {node} is lowered from 1e+18 to 120, 10 times the median" in caplog.text


def test_a_loss_that_is_a_weight_counts_at_most_ten_medians() -> None:
    """Losses of 1, 2, 3, 5, 6 and 1e18: the lower median is 3."""

    def losing(loss: float) -> Any:
        def train(start: Any, client: int, context: Any) -> Any:
            w, metrics = moved(start, client, context)
            return w, metrics | ({"train_loss": loss} if client == BAD else {})

        return train

    strategy = FedShift(flower.QFedAvg(0.1, q=1.0, **ALL))
    result = run(strategy, [QuantizeMod(32)], train=losing(1e18), rounds=1)
    random.seed(3)
    assert same(result.arrays, run(flower.QFedAvg(0.1, q=1.0, **ALL), train=losing(30.0), rounds=1).arrays)
    assert strategy.rounds[0].capped == [LocalGrid(client_app(), 6, seed=1).node_of(BAD)]


def test_a_huge_loss_among_losses_of_zero_does_not_end_the_run() -> None:
    def train(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return w, metrics | {"train_loss": 1e300 if client == BAD else 0.0}

    strategy = FedShift(flower.QFedAvg(0.1, q=2.0, **ALL), patience=1)
    run(strategy, [QuantizeMod(32)], train=train, rounds=2)
    assert [x.used for x in strategy.rounds] == [5, 5]
    assert all("must be between 0 and 1e+18" in why for why in strategy.rounds[0].failed.values())


def test_where_most_weights_are_zero_a_weight_counts_at_most_ten_medians_of_the_others() -> None:
    def train(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return w, metrics | {"num-examples": {BAD: 10**18, 4: 5, 5: 6}.get(client, 0)}

    strategy = FedShift(FedAvg(**ALL))
    run(strategy, [QuantizeMod(32)], train=train, rounds=1)
    assert strategy.rounds[0].capped == [LocalGrid(client_app(), 6, seed=1).node_of(BAD)]


def test_a_weight_is_not_lowered_without_a_limit() -> None:
    strategy = FedShift(FedAvg(**ALL), max_weight=0)
    result = run(strategy, [QuantizeMod(32)], train=weighing(10**6), rounds=1)
    random.seed(3)
    assert same(result.arrays, run(FedAvg(**ALL), train=weighing(10**6), rounds=1).arrays)
    assert strategy.rounds[0].capped == []


def test_one_node_does_not_decide_an_evaluation_by_its_weight() -> None:
    def other(reply: Message) -> Message:
        reply.content["metrics"] = metrics_of({"num-examples": 10**18, "loss": 100.0})
        return reply

    def metrics_of(values: dict[str, Any]) -> Any:
        content = RecordDict()
        metrics(values)(content)
        return content["metrics"]

    hostile = Hostile(other, "evaluate")
    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    result = FedShift(FedAvg(min_train_nodes=6, min_evaluate_nodes=6)).start(grid, model(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx((5 * 2.0 + 10 * 100.0) / 15)


def counting(start: Any, client: int, context: Any) -> Any:
    count = torch.full_like(start["count"], 9 * 10**17 if client == BAD else 5 + client)
    mask = torch.tensor([client == BAD, client != BAD, client % 2 == 0])
    return {"w": start["w"] + 0.1, "count": count, "mask": mask}, {"num-examples": 1}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("make", [FedAvg, flower.FedAdam, flower.FedMedian])
def test_one_node_cannot_set_an_integer_or_a_boolean(make: Any, dtype: torch.dtype) -> None:
    """Counts of 5, 6, 7, 9, 10 and 9e17: the lower median is 7. In int32 the last is what is left of it."""
    start = {
        "w": torch.ones(2, 2),
        "count": torch.tensor([0, 0], dtype=dtype),
        "mask": torch.tensor([True, False, True]),
    }

    def train(start: Any, client: int, context: Any) -> Any:
        trained, metrics = counting(start | {"count": start["count"].long()}, client, context)
        return trained | {"count": trained["count"].clamp(max=torch.iinfo(dtype).max).to(dtype)}, metrics

    after = to_params(
        run(FedShift(make(**ALL)), [QuantizeMod(4)], train=train, start=to_record(start), rounds=1).arrays
    )
    assert torch.equal(after["count"], torch.tensor([7, 7], dtype=dtype))
    assert torch.equal(after["mask"], torch.tensor([False, True, False]))


def test_noise_for_privacy_is_not_left_out_of_integers() -> None:
    start = to_record({"w": torch.ones(2, 2), "count": torch.tensor(0)})

    def train(start: Any, client: int, context: Any) -> Any:
        return {"w": start["w"] + 0.1, "count": start["count"] + 1000}, {"num-examples": 1}

    counts = set()
    for seed in range(4):
        np.random.seed(seed)
        private = flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(**ALL), 100.0, 10.0, 6)
        after = run(FedShift(private), [QuantizeMod(32)], start=start, train=train, rounds=1)
        counts.add(int(after.arrays["count"].numpy()))
    assert len(counts) > 1
    assert all(0 < abs(count - 1000) < 1000 for count in counts)


def test_a_control_of_a_node_that_claims_to_have_hardly_moved_is_left_out() -> None:
    """SCAFFOLD divides by what a client says it travelled."""

    def train(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return w, metrics | {"travel": 1e-9 if client == BAD else 0.5}

    scaffold = Scaffold(FedAvg(**ALL))
    strategy = FedShift(scaffold)
    run(strategy, [ScaffoldMod(32)], train=train, rounds=1)
    node = LocalGrid(client_app(), 6, seed=1).node_of(BAD)
    assert strategy.rounds[0].outliers == [node]
    assert "control update norm" in strategy.rounds[0].failed[node]
    assert scaffold.control is not None
    assert float(scaffold.control["one.weight"].abs().max()) < 10


@pytest.mark.parametrize("bound", [50, 0])
def test_a_travel_just_within_the_bound_does_not_let_one_control_lead_the_others(bound: float, caplog: Any) -> None:
    """Of an update nearly as long as the model, divided by 1/49 of the others' travel, 50 medians reach the control."""

    def train(start: Any, client: int, context: Any) -> Any:
        direction = correction(context)
        if client == BAD:
            return {name: 1.9 * w for name, w in start.items()}, {"num-examples": 1, "travel": 0.5 / 49}
        trained = {name: w - 0.5 * (0.02 * w + direction[name]) for name, w in start.items()}
        return trained, {"num-examples": 1, "travel": 0.5}

    def length(record: ArrayRecord) -> float:
        return math.sqrt(sum(float(x.square().sum()) for x in to_params(record).values()))

    strategy = FedShift(Scaffold(FedAvg(**ALL)), bound=bound)
    result = run(strategy, [ScaffoldMod(32)], train=train, rounds=2)
    assert [(x.used, x.failed) for x in strategy.rounds] == [(6, {})] * 2
    assert (length(result.arrays) < 1.5 * length(model())) == bool(bound)
    node = LocalGrid(client_app(), 6, seed=1).node_of(BAD)
    assert (f"round 1: the control update of node {node} is scaled from norm" in caplog.text) == bool(bound)


def overflowing(start: Any, client: int, context: Any) -> Any:
    """The mean of the layer is 22500; half of it off -60000 is beyond float16."""
    w = torch.full((4, 4), 50000.0, dtype=torch.float16)
    w[0] = -60000.0
    return {"w": w}, {"num-examples": 1}


def test_a_shift_that_overflows_costs_the_round_and_is_not_saved(tmp_path: Path, caplog: Any) -> None:
    start = to_record({"w": torch.zeros(4, 4, dtype=torch.float16)})
    inner = flower.FedAvgM(**ALL, server_momentum=0.9)
    strategy = FedShift(inner, tensors="w", checkpoint=tmp_path)
    result = run(strategy, [QuantizeMod(4)], start=start, train=overflowing, rounds=1)
    assert same(result.arrays, start)
    assert [(x.used, x.failed) for x in strategy.rounds] == [(0, {})]
    assert "w is NaN or infinite; the largest update" in caplog.text
    assert inner.momentum_vector is None
    saved = FedShift(flower.FedAvgM(**ALL, server_momentum=0.9), tensors="w", checkpoint=tmp_path)
    assert same(run(saved, [QuantizeMod(4)], start=start, train=overflowing, rounds=1).arrays, start)


class Twice(LocalGrid):
    """Every reply arrives twice."""

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        again = [Message(reply.content, reply_to=reply) for reply in replies]
        for copy, reply in zip(again, replies, strict=True):
            copy.metadata.__dict__.update(reply.metadata.__dict__)
        return [*replies, *again]


def test_a_reply_that_is_delivered_twice_counts_once(caplog: Any) -> None:
    results = []
    for kind in (LocalGrid, Twice):
        random.seed(3)
        strategy = FedShift(FedAvg(min_train_nodes=6, min_evaluate_nodes=6))
        results.append(strategy.start(kind(client_app([QuantizeMod(4)]), 6, seed=1), model(), num_rounds=2).arrays)
        assert [(x.used, x.failed) for x in strategy.rounds] == [(6, {})] * 2
    assert same(*results)
    assert "replied more than once; only its first reply is used" in caplog.text


def failing(*reasons: str) -> Any:
    def train(start: Any, client: int, context: Any) -> Any:
        raise ValueError(reasons[client % len(reasons)])

    return train


def test_a_first_round_in_which_all_fail_for_the_same_reason_ends_the_run_with_it() -> None:
    strategy = FedShift(FedAvg(**ALL))
    with pytest.raises(NoUploadsError, match=r"round 1: every reply failed for the same reason: .*no data here"):
        run(strategy, [QuantizeMod(4)], train=failing("no data here"))
    strategy = FedShift(FedAvg(**ALL), patience=3)
    with pytest.raises(NoUploadsError, match=r"round 3: no usable upload in 3 rounds in a row"):
        run(strategy, [QuantizeMod(4)], train=failing("no data here", "no disk"), rounds=9)


def test_later_rounds_and_nodes_that_are_not_there_are_waited_for() -> None:
    def late(start: Any, client: int, context: Any) -> Any:
        return moved(start, client, context) if not strategy.rounds else failing("no data here")(start, client, context)

    strategy = FedShift(FedAvg(**ALL), patience=2)
    with pytest.raises(NoUploadsError, match=r"round 3: no usable upload in 2 rounds in a row"):
        run(strategy, [QuantizeMod(4)], train=late, rounds=9)
    strategy = FedShift(FedAvg(**ALL), patience=2)
    with pytest.raises(NoUploadsError, match=r"round 2: .* the node did not reply"):
        run(strategy, [QuantizeMod(4)], rounds=9, tamper=lambda reply: None)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_control_characters_of_a_node_reach_neither_the_log_nor_the_record(kind: str, caplog: Any) -> None:
    text = "\x1b[2J\x00gone\r\x9b31m \u202egnp.exe\u2028 grün"

    def rude(content: RecordDict) -> None:
        if kind == "train":
            content["arrays"] = ArrayRecord({KEY: enclose(b""), text: Array(np.zeros(1))})
        else:
            content["metrics"] = content[text] = metrics_record()

    def metrics_record() -> Any:
        content = RecordDict()
        metrics({text: 1.0})(content)
        return content["metrics"]

    def raising(start: Any, client: int, context: Any) -> Any:
        if client == BAD + 1:
            raise ValueError(text)
        return moved(start, client, context)

    hostile = Hostile(edited(rude), kind)
    grid = LocalGrid(client_app([QuantizeMod(4)], raising), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    strategy = FedShift(FedAvg(min_train_nodes=6, min_evaluate_nodes=6))
    strategy.start(grid, model(), num_rounds=1)
    assert grid.node_of(BAD + 1) in strategy.rounds[0].failed
    logged = "".join(record.getMessage() for record in caplog.records) + str(strategy.rounds)
    assert not set("\x1b\x00\r\x9b\u202e\u2028") & set(logged)
    assert "grün" in logged


def plain(edit: Any) -> Any:
    """Plain arrays of a client, changed on their way."""

    def train(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return edit(w) if client == BAD else w, metrics

    return train


@pytest.mark.parametrize("mods", [[], [QuantizeMod(32)], [QuantizeMod(32, updates=True)]])
def test_a_reply_in_float64_is_cast_to_the_models_dtype(mods: Any) -> None:
    strategy = FedShift(FedAvg(**ALL))
    wide = run(strategy, mods, train=plain(lambda w: {n: x.double() for n, x in w.items()}), rounds=2)
    random.seed(3)
    narrow = run(FedShift(FedAvg(**ALL)), mods, rounds=2)
    assert [x.used for x in strategy.rounds] == [6, 6]
    for name, x in to_params(wide.arrays).items():
        assert x.dtype == torch.float32
        assert torch.allclose(x, to_params(narrow.arrays)[name], atol=1e-6)
    assert mods[1:] or same(wide.arrays, narrow.arrays) or mods[0].updates


@pytest.mark.parametrize("mods", [[], [QuantizeMod(32)], [QuantizeMod(4, updates=True)]])
def test_what_a_reply_leaves_out_stays_as_it_was_sent(mods: Any) -> None:
    """All nodes train the first layer only."""

    def train(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return {"one.weight": w["one.weight"]}, metrics

    strategy = FedShift(FedAvg(**ALL))
    after = to_params(run(strategy, mods, train=train, rounds=2).arrays)
    assert [(x.used, x.failed) for x in strategy.rounds] == [(6, {})] * 2
    assert list(after) == list(model())
    assert torch.allclose(after["one.bias"], to_params(model())["one.bias"], atol=1e-6)
    assert not torch.allclose(after["one.weight"], to_params(model())["one.weight"])


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda w: w | {"one.bias": torch.full((8,), 1e300, dtype=torch.float64)}, "one.bias: .*too large for"),
        (lambda w: w | {"one.bias": torch.zeros(8, dtype=torch.int32)}, "one.bias: .*int32"),
        (lambda w: w | {"more": torch.zeros(1)}, r"unexpected \['more'\]|4 tensors, the model has 3"),
        (lambda w: {"more": torch.zeros(1)}, r"unexpected \['more'\]"),
        (lambda w: {}, "there are no tensors"),
    ],
)
@pytest.mark.parametrize("framed", [False, True])
def test_what_cannot_be_cast_or_is_not_the_models_is_still_left_out(framed: bool, edit: Any, why: str) -> None:
    def change(content: RecordDict) -> None:
        w = edit(to_params(model()))
        if framed:
            frame(lambda data: forged(data, w, described=True))(content)
        else:
            content["arrays"] = to_record(w)

    strategy, hostile = FedShift(InOrder(fraction_evaluate=0.0)), Hostile(edited(change))
    survivors(strategy, hostile, rounds=1)
    assert list(strategy.rounds[0].failed) == [hostile.node]
    assert re.search(why, strategy.rounds[0].failed[hostile.node]), strategy.rounds[0].failed


def test_a_model_that_holds_infinity_is_refused_before_anything_is_trained() -> None:
    start = to_record({"fc.weight": torch.ones(2, 2), "mask": torch.tensor([0.0, -torch.inf])})
    with pytest.raises(ValueError, match="the array 'mask' of the model contains NaN or infinity"):
        run(FedShift(FedAvg(**ALL)), [], start=start)
