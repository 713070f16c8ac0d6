"""Uplinks by name, set for an app, a node, a message or a run."""

from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.serverapp.strategy import FedAvg

from fedshift import Uplink
from fedshift.codecs import Cast, Codec, Identity, KMeans, Quantizer, RandomStep, Range, Step
from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold, ScaffoldMod
from fedshift.flower.addon.arrays import KEY, to_record
from fedshift.flower.testing import LocalGrid
from fedshift.rounds.uplink import named
from fedshift.wire.frame import parse
from fedshift.wire.plan import read_codecs
from tests.flower.apps import client_app, moved, run

ALL: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 2}
START = to_record({"w": torch.randn(40, 50, generator=torch.Generator().manual_seed(11))})


def sent(
    mod: QuantizeMod,
    node: Any = None,
    run_config: Any = None,
    message: Any = None,
    chosen: int | str | Uplink | None = None,
) -> tuple[type[Quantizer], bool, int]:
    """Upload of a node: the quantizer in its frame, whether it is an update, and its bytes."""
    seen: dict[object, bytes] = {}

    def watch(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        seen[context.node_config["partition-id"]] = reply.content.array_records["arrays"][KEY].data
        return reply

    grid = LocalGrid(
        client_app([watch, mod]), [{"partition-id": i, **(node or {})} for i in (0, 1)], run_config, seed=1
    )
    strategy = FedShift(FedAvg(**ALL), bits_for=lambda node, number: chosen)
    strategy.start(grid, START, num_rounds=1, train_config=ConfigRecord(message or {}))
    assert strategy.rounds[0].used == 2
    opened = parse(seen[0])
    (codec,) = read_codecs(opened.coding, 1)
    return type(codec.quantizer), opened.header.update, len(seen[0])


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (({"uplink": "exact"}, {"uplink": "paper"}, {"uplink": "lean"}), (Identity, False)),
        (({"uplink": "exact"}, {"bits": 4}, {"bits": 8}), (Identity, False)),
        (({"bits": 32}, {"uplink": "paper"}, {"uplink": "lean"}), (Identity, True)),  # the app's own, in 32 bits
        (({}, {"uplink": "paper"}, {"uplink": "lean"}), (KMeans, False)),
        (({}, {"uplink": "paper"}, {"bits": 16}), (KMeans, False)),
        (({}, {}, {"uplink": "paper"}), (KMeans, False)),
        (({}, {}, {"bits": 16}), (Cast, True)),
        (({}, {}, {}), (RandomStep, True)),
    ],
)
def test_an_uplink_comes_from_the_node_then_the_message_then_the_run_then_the_app(
    places: tuple[dict[str, Any], ...], expected: tuple[type[Quantizer], bool]
) -> None:
    node, message, run_config = places
    assert sent(QuantizeMod("extreme"), node, run_config, message)[:2] == expected


def test_a_name_is_the_same_uplink_wherever_it_is_set() -> None:
    """Also in an app with other bits, weights and no feedback, which the name replaces."""
    expected = sent(QuantizeMod("lean"))
    assert expected == sent(QuantizeMod(4), node={"uplink": "lean"})
    assert expected == sent(QuantizeMod(32), run_config={"uplink": "lean"})
    assert expected == sent(QuantizeMod("paper"), message={"uplink": "lean"})
    assert expected == sent(QuantizeMod("exact"), chosen="lean", message={"bits": 9})  # it replaces the strategy's
    assert expected == sent(QuantizeMod("exact"), chosen="lean", message={"uplink": "paper"})
    assert sent(QuantizeMod(4), chosen=32, message={"uplink": "lean"}) == sent(QuantizeMod("exact"))


def test_a_server_chooses_any_uplink_for_each_node_and_round() -> None:
    """Rates that grow over rounds and differ between nodes, in an app that would upload exact weights."""
    assert sent(QuantizeMod("exact"), chosen=named("lean")) == sent(QuantizeMod("lean"))
    least, *others = (8 * sent(QuantizeMod(), chosen=at_rate(rate))[2] / 2000 for rate in (0.5, 1.0, 2.5))
    assert [bits - least for bits in others] == pytest.approx([0.5, 2.0], abs=0.1)  # besides header and side data
    nodes: list[int] = []

    def bits_for(node: int, number: int) -> Uplink:
        nodes.extend({node} - {*nodes})
        return at_rate(0.5 * number * (1 + nodes.index(node)))

    strategy = FedShift(FedAvg(**ALL), bits_for=bits_for)
    run(strategy, [QuantizeMod(4)], nodes=2, start=START, rounds=3)
    assert [(x.used, x.lossy, x.reset) for x in strategy.rounds] == [(2, 2, [])] * 3
    bits = [8 * x.bytes_up / (2 * 2000) for x in strategy.rounds]
    assert [later - bits[0] for later in bits[1:]] == pytest.approx([0.75, 1.5], abs=0.1)


def test_an_uplink_that_cannot_be_sent_is_refused_with_the_node_and_the_round() -> None:
    class Unnumbered(KMeans):
        pass

    with pytest.raises(ValueError, match=r"bits_for\(\d+, 1\): .*Unnumbered\(.*\) has no number in the wire format"):
        sent(QuantizeMod(), chosen=Uplink(Codec(Unnumbered(4))))
    with pytest.raises(NoUploadsError, match="in the message: not an uplink"):
        sent(QuantizeMod(), message={"uplink": "{}"})


def at_rate(rate: float) -> Uplink:
    return Uplink(Codec(Step(rate=rate), Range()), update=True, feedback=True)


def test_16_and_32_bits_keep_the_updates_of_a_named_uplink() -> None:
    mod, coder = QuantizeMod("lean"), named("lean").codec.coder
    for bits, quantizer in (16, Cast("bfloat16")), (32, Identity()):
        uplink = mod.uplink(bits)
        assert (uplink.codec.quantizer, uplink.codec.coder) == (quantizer, coder)
        assert (uplink.update, uplink.feedback) == (True, False)
        assert sent(mod, node={"bits": bits})[:2] == (type(quantizer), True)
    assert QuantizeMod("exact").uplink() == Uplink()


PLACES = {"node's config": "node", "message": "message", "run's config": "run_config"}


@pytest.mark.parametrize("place", PLACES)
def test_invalid_settings_are_refused_with_the_name_of_the_place(place: str) -> None:
    """The error reaches the server at once, because all nodes report the same."""
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"bits": 8},
            rf"bits in the {place}: RandomStep\(.*rate=0.8.*\) cannot have 8 bits; allowed are 16, 32, or an uplink",
        ),
        ({"bits": 4}, rf"bits in the {place}: RandomStep\(.*rate=0.8.*\) cannot have 4 bits"),
        ({"bits": 9}, rf"bits in the {place}: 9 is not allowed; use 1 to 8"),
        ({"uplink": "leen"}, rf"uplink = 'leen' in the {place}: no such uplink; known are exact, paper, lean, extreme"),
        ({"uplink": 4}, rf"uplink = 4 in the {place}: no such uplink"),
        ({"uplink": "lean", "bits": 32}, f"bits and uplink in the {place}: both choose the codec; set only one"),
    ]
    for values, problem in cases:
        where: dict[str, Any] = {PLACES[place]: values}
        with pytest.raises(NoUploadsError, match=problem):
            sent(QuantizeMod("lean"), **where)


def test_nodes_of_a_fleet_upload_by_different_names_in_one_round() -> None:
    """Two exact, one with the paper's codes and one lean; each upload decodes as if sent alone."""
    names = ["exact", "exact", "paper", "lean"]
    nodes = [{"partition-id": i, "uplink": name} for i, name in enumerate(names)]
    strategy = FedShift(FedAvg(fraction_evaluate=0.0, min_train_nodes=4))
    run(strategy, [QuantizeMod()], nodes=nodes, start=START, rounds=3)
    assert [(x.used, x.lossy, x.reset) for x in strategy.rounds] == [(4, 2, [])] * 3
    exact = 40 * 50 * 4
    assert all(2 * exact < x.bytes_up < 2.25 * exact for x in strategy.rounds)


def test_scaffold_takes_names_and_overrides_too() -> None:
    def train(start: Any, client: int, context: Any) -> Any:
        w, metrics = moved(start, client, context)
        return w, metrics | {"travel": 0.5}

    others: list[dict[str, Any]] = [{}, {"uplink": "exact"}, {"bits": 32}]
    nodes = [{"partition-id": i, **other} for i, other in enumerate(others)]
    strategy = FedShift(Scaffold(FedAvg(fraction_evaluate=0.0, min_train_nodes=3)))
    run(strategy, [ScaffoldMod("lean")], nodes=nodes, start=START, train=train, rounds=3)
    assert [(x.used, x.lossy, x.reset) for x in strategy.rounds] == [(3, 1, [])] * 3
    with pytest.raises(ValueError, match=r"ScaffoldMod\('leen'\): no such uplink; known are exact, paper, lean"):
        ScaffoldMod("leen")


def test_feedback_of_codes_that_may_diverge_is_refused() -> None:
    with pytest.raises(ValueError, match=r"feedback = true: errors of RandomStep\(.*\) may exceed the values"):
        QuantizeMod(codec=Codec(RandomStep(rate=0.3), Range()), updates=True, error_feedback=True)
