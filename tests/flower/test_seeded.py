"""The same nodes in the same rounds, independent of their ids."""

import random
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy

from fedshift.flower import FedShift, QuantizeMod, Seeded, introduce
from fedshift.flower.addon.partitions import ask
from fedshift.flower.testing import LocalGrid
from tests.flower.apps import client_app, model, same


def drawn(strategy: Strategy, grid: LocalGrid, rounds: int = 5, kind: str = "train") -> list[list[int]]:
    """The partitions of each round's nodes, in the order of the messages."""
    configure = strategy.configure_train if kind == "train" else strategy.configure_evaluate
    asked = [configure(number, model(), ConfigRecord(), grid) for number in range(1, rounds + 1)]
    return [[_partition(grid, message) for message in messages] for messages in asked]


def _partition(grid: LocalGrid, message: Message) -> int:
    return int(grid.contexts[message.metadata.dst_node_id].node_config["partition-id"])


def grid(app: Any = None) -> LocalGrid:
    """Grid with new ids and another order in every call."""
    made = LocalGrid(app or introduce(client_app([QuantizeMod(4)])), 20)
    made.contexts = dict(random.SystemRandom().sample(list(made.contexts.items()), 20))
    return made


def test_a_seed_draws_the_same_nodes_on_every_grid_and_other_seeds_others() -> None:
    for inner in (FedAvg, FedMedian):
        seeded, again, other = (Seeded(inner(fraction_train=0.3), seed=s) for s in (1, 1, 2))
        first = drawn(seeded, grid())
        assert first == drawn(again, grid())
        assert first != drawn(other, grid())
        assert [len(set(nodes)) for nodes in first] == [6] * 5
        assert len({tuple(nodes) for nodes in first}) == 5
        assert drawn(again, grid(), kind="evaluate") != first


def test_the_whole_training_is_reproducible() -> None:
    results = [
        FedShift(Seeded(FedAvg(fraction_train=0.3, fraction_evaluate=0.0))).start(grid(), model(), num_rounds=4)
        for _ in range(2)
    ]
    assert same(results[0].arrays, results[1].arrays)


def test_pythons_own_generator_is_left_as_it_was() -> None:
    random.seed(9)
    before = random.getstate()
    drawn(Seeded(FedAvg(fraction_train=0.3)), grid())
    assert random.getstate() == before


def test_nodes_without_a_partition_id_are_sorted_by_node_id() -> None:
    silent = grid(client_app([QuantizeMod(4)]))
    assert {answer.partition for answer in ask(silent, silent.get_node_ids()).values()} == {None}
    ids = [
        [
            message.metadata.dst_node_id
            for message in Seeded(FedAvg(fraction_train=0.3)).configure_train(1, model(), ConfigRecord(), silent)
        ]
        for _ in range(2)
    ]
    assert ids[0] == ids[1]
