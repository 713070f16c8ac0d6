"""Reproducible selection of nodes.

Flower draws nodes from a list of node ids without a fixed order, with an unseeded generator, and in a simulation the
ids differ between runs. `Seeded` sorts the nodes by partition-id and seeds the generator in every round.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedshift.flower.addon.partitions import ask

LOG = getLogger("flwr.fedshift")


class Seeded(Strategy):
    """Draw the same nodes in every run with a seed: `FedShift(Seeded(FedAvg(fraction_train=0.1), seed=1))`.

    The nodes of a simulation must report their partition-id: call `introduce(app)` in client_app.py. Nodes that do not
    report it are sorted by node id, which deployed nodes keep between runs.

    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedshift.flower.addon.partitions import introduce
    >>> from fedshift.flower.testing import LocalGrid
    >>> grid, seeded = LocalGrid(introduce(ClientApp()), 5), Seeded(FedAvg(fraction_train=0.4), seed=1)
    >>> drawn = seeded.configure_train(1, ArrayRecord({}), ConfigRecord({}), grid)
    >>> sorted(grid.contexts[message.metadata.dst_node_id].node_config["partition-id"] for message in drawn)
    [1, 3]
    """

    def __init__(self, strategy: Strategy, seed: int = 0) -> None:
        self.strategy, self.seed = strategy, seed
        self.names: dict[str, int | None] = {}  # node -> partition-id, None if it is not reported

    def summary(self) -> None:
        LOG.info("\t├──> Nodes are drawn with seed %d", self.seed)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with self._drawing(grid, f"train/{server_round}") as view:
            return list(self.strategy.configure_train(server_round, arrays, config, view))

    def unique(self, nodes: Iterable[int]) -> dict[int, int]:
        """Partition-ids of these nodes, without ids that several nodes report."""
        claimed = {node: name for node in nodes if (name := self.names.get(str(node))) is not None}
        counts = Counter(claimed.values())
        for name in (name for name, count in counts.items() if count > 1):
            same = ", ".join(str(node) for node, claim in claimed.items() if claim == name)
            LOG.warning("nodes %s have the same partition-id %d; they are identified by node id instead", same, name)
        return {node: name for node, name in claimed.items() if counts[name] == 1}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with self._drawing(grid, f"evaluate/{server_round}") as view:
            return list(self.strategy.configure_evaluate(server_round, arrays, config, view))

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    @contextmanager
    def _drawing(self, grid: Grid, purpose: str) -> Iterator[Grid]:
        """Yield the grid to draw from; restore the state of Python's generator, which Flower draws with."""
        before = random.getstate()
        try:
            yield _Ordered(grid, self.names, f"{self.seed}/{purpose}")
        finally:
            random.setstate(before)


class _Ordered(Grid):
    """Grid that lists its nodes by partition-id and seeds Python's generator."""

    def __init__(self, grid: Grid, names: dict[str, int | None], seed: str) -> None:
        self.grid, self.names, self.seed = grid, names, seed

    def get_node_ids(self) -> list[int]:
        nodes = list(self.grid.get_node_ids())
        if new := [node for node in nodes if str(node) not in self.names]:
            answers = ask(self.grid, new)
            self.names.update({str(node): answer.partition for node, answer in answers.items() if answer.final})
            if nameless := [node for node, answer in answers.items() if answer.partition is None]:
                LOG.warning(
                    "%d nodes do not report a partition-id and are sorted by node id; call introduce(app)",
                    len(nameless),
                )
        random.seed(self.seed)  # last: waiting for nodes may have drawn numbers
        return sorted(nodes, key=self._place)

    def _place(self, node: int) -> tuple[bool, int]:
        name = self.names.get(str(node))  # a node that did not answer is asked again
        return name is None, node if name is None else name

    @property
    def run(self) -> Any:
        return self.grid.run

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self.grid.create_message(*args, **options)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.grid.send_and_receive(messages, timeout=timeout)
