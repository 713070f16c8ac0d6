"""Lost, damaged or forged uploads: each is left out and logged, and the others are used."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from fedshift import Codec, KMeans, header
from fedshift.flower import FedShift, NoUploadsError, QuantizeMod
from fedshift.flower.addon.arrays import KEY, enclose, to_params, to_record
from fedshift.flower.testing import LocalGrid
from tests.federations import forged
from tests.flower.apps import client_app, model, run, same
from tests.flower.attacks import ATTACKS, BAD, Hostile, InOrder, edited, frame, in_order, metrics, survivors


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_invalid_upload_is_left_out_and_logged_and_the_others_are_aggregated(attack: str, caplog: Any) -> None:
    edit, why = ATTACKS[attack]
    strategy, hostile = FedShift(InOrder(fraction_evaluate=0.0)), Hostile(edited(edit))
    after = survivors(strategy, hostile, rounds=1)
    assert list(strategy.rounds[0].failed) == [hostile.node]
    assert re.search(why, strategy.rounds[0].failed[hostile.node]), strategy.rounds[0].failed
    assert f"the upload of node {hostile.node} is left out" in caplog.text
    assert same(after, survivors(FedShift(InOrder(fraction_evaluate=0.0)), None, rounds=1))


@pytest.mark.parametrize("other", ["round", "node"])
def test_a_replayed_frame_of_another_round_or_node_is_refused(other: str) -> None:
    """Each is a valid frame of the same run, model and codec."""
    seen: dict[tuple[int, int], bytes] = {}  # honest frames by round and node

    def replay(reply: Message) -> Message:
        node, data = reply.metadata.src_node_id, reply.content.array_records["arrays"][KEY].data
        number = header(data).base
        seen[number, node] = data
        if (number, node) == (2, bad):
            replayed = seen[(1, bad) if other == "round" else (2, first)]
            reply.content["arrays"] = ArrayRecord({KEY: enclose(replayed)})
        return reply

    grid, strategy = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1), FedShift(InOrder(fraction_evaluate=0.0))
    in_order(grid)
    first, bad, grid.tamper = grid.node_of(0), grid.node_of(BAD), replay
    strategy.start(grid, model(), num_rounds=2)
    why = "round 1, not 2" if other == "round" else f"client {first}, not client {bad}"
    assert [(x.used, x.failed) for x in strategy.rounds] == [(6, {}), (5, {bad: f"the frame belongs to {why}"})]


def test_an_upload_that_is_lost_or_an_error_is_left_out_too() -> None:
    alone = survivors(FedShift(InOrder(fraction_evaluate=0.0)), None)
    lost = FedShift(InOrder(fraction_evaluate=0.0))
    assert same(survivors(lost, Hostile(lambda reply: None)), alone)
    assert [(x.used, list(x.failed.values())) for x in lost.rounds] == [(5, ["the node did not reply"])] * 2

    def refuse(reply: Message) -> Message:
        error = Message(RecordDict(), 1, "train")
        error.metadata.__dict__.update(reply.metadata.__dict__)
        return Message(metadata=reply.metadata, error=Error(2, "it broke"))  # type: ignore[call-overload,no-any-return]

    broken = FedShift(InOrder(fraction_evaluate=0.0))
    assert same(survivors(broken, Hostile(refuse)), alone)
    assert list(broken.rounds[0].failed.values()) == ["it broke"]


def test_a_hostile_evaluation_does_not_end_the_run() -> None:
    def other(reply: Message) -> Message:
        reply.content["metrics"] = MetricRecord({"something": 1.0})
        return reply

    random.seed(3)
    hostile = Hostile(other, "evaluate")
    grid = LocalGrid(client_app([QuantizeMod(4)]), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    result = FedShift(FedAvg(min_train_nodes=6, min_evaluate_nodes=6)).start(grid, model(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1] == {"loss": 2.0}


def test_a_run_without_usable_uploads_ends_with_the_reason() -> None:
    def diverged(start: Any, client: int, context: Any) -> Any:
        return {name: w * torch.nan for name, w in start.items() if client or "two" in name}, {"num-examples": 1}

    strategy = FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=6), patience=2)
    with pytest.raises(
        NoUploadsError, match=r"round 2: no usable upload in 2 rounds in a row; .*contains NaN or infinity"
    ):
        run(strategy, [QuantizeMod(4)], train=diverged)
    assert [len(x.failed) for x in strategy.rounds] == [6, 6]


@pytest.mark.parametrize("mod", [fixedclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 0.1)])
def test_mods_in_the_wrong_order_are_found_in_the_first_round(mod: Any) -> None:
    inner = flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.01, 1.0, 6)
    with pytest.raises(NoUploadsError, match="round 1: the clients' mods are in the wrong order; QuantizeMod must be"):
        run(FedShift(inner), [mod, QuantizeMod(4)])


@pytest.mark.parametrize("attack", [edited(ATTACKS["truncated"][0]), lambda reply: None])
def test_privacy_is_not_weakened_by_an_upload_that_is_bad_or_lost(attack: Any) -> None:
    """Noise is calibrated for a number of clients: with fewer, Flower's wrapper skips the round."""
    inner = flower.DifferentialPrivacyServerSideFixedClipping(InOrder(fraction_evaluate=0.0), 0.01, 1.0, 6)
    strategy = FedShift(inner)
    after = survivors(strategy, Hostile(attack), rounds=2)
    assert same(after, model())
    assert [(x.used, len(x.failed)) for x in strategy.rounds] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("loss", [float("nan"), -1.0])
def test_a_loss_that_is_a_weight_must_be_a_number(loss: float) -> None:
    strategy = FedShift(flower.QFedAvg(0.1, fraction_evaluate=0.0, min_train_nodes=6))
    random.seed(3)
    hostile = Hostile(edited(metrics({"num-examples": 13, "train_loss": loss})))
    grid = LocalGrid(client_app([QuantizeMod(32)]), 6, seed=1, tamper=hostile)
    hostile.node = grid.node_of(BAD)
    result = strategy.start(grid, model(), num_rounds=1)
    assert f"train_loss={loss}" in strategy.rounds[0].failed[hostile.node]
    assert np.isfinite(result.arrays["one.weight"].numpy()).all()


def test_a_frame_of_a_bigger_codebook_or_other_codec_is_just_another_upload() -> None:
    """Clients choose their codec; the frame describes it."""

    strategy = FedShift(InOrder(fraction_evaluate=0.0))
    change = frame(lambda data: forged(data, to_params(model()), Codec(KMeans(2)), described=True))
    survivors(strategy, Hostile(edited(change)), rounds=1)
    assert strategy.rounds[0].failed == {}
    assert to_record(to_params(model())) == model()
