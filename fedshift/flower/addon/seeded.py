"""A draw of nodes that can be repeated.

Flower draws from a list of node ids in no certain order, with a generator nobody seeded, and in a
simulation the ids themselves are new in every run. Here the list is in the order of the nodes' own
names, their partition-id, and the generator is seeded for every round.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

WHO, ABOUT = "fedshift_who", "about"  # the question, and the record with the answer
UNKNOWN = "query function registered"  # in the error of an app that does not know the question
LOG = getLogger("flwr.fedshift")


def introduce(app: ClientApp) -> ClientApp:
    """Let the nodes of an app say their partition-id when they are asked.

    >>> from fedshift.flower.testing import LocalGrid
    >>> grid = LocalGrid(introduce(ClientApp()), 3)
    >>> sorted(partitions(grid, grid.get_node_ids()).values())
    [0, 1, 2]
    """

    @app.query(WHO)
    def who(message: Message, context: Context) -> Message:
        about: dict[str, Any] = {
            key: value for key, value in context.node_config.items() if key in ("partition-id", "num-partitions")
        }
        return Message(RecordDict({ABOUT: ConfigRecord(about)}), reply_to=message)

    return app


def partitions(grid: Grid, nodes: Iterable[int], timeout: float = 60.0) -> dict[int, int | None]:
    """The partition-id of each node that answers, None for one that has none or does not know the question."""
    questions = [Message(RecordDict(), node, f"query.{WHO}") for node in nodes]
    answers = grid.send_and_receive(questions, timeout=timeout) if questions else ()
    known = (reply for reply in answers if reply.has_content() or UNKNOWN in (reply.error.reason or ""))
    return {reply.metadata.src_node_id: _partition(reply) for reply in known}


def _partition(reply: Message) -> int | None:
    about = reply.content.config_records.get(ABOUT) if reply.has_content() else None
    number = about.get("partition-id") if about is not None else None
    return number if isinstance(number, int) else None


class Seeded(Strategy):
    """The same nodes in the same rounds, every time: `FedShift(Seeded(FedAvg(fraction_train=0.1), seed=1))`.

    The nodes of a simulation have to say who they are: `introduce(app)` in client_app.py. Deployed
    nodes keep their ids, and those that say nothing are put in the order of these.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedshift.flower.testing import LocalGrid
    >>> grid, seeded = LocalGrid(introduce(ClientApp()), 5), Seeded(FedAvg(fraction_train=0.4), seed=1)
    >>> drawn = seeded.configure_train(1, ArrayRecord({}), ConfigRecord({}), grid)
    >>> sorted(grid.contexts[message.metadata.dst_node_id].node_config["partition-id"] for message in drawn)
    [1, 3]
    """

    def __init__(self, strategy: Strategy, seed: int = 0) -> None:
        self.strategy, self.seed = strategy, seed
        self.names: dict[str, int | None] = {}  # node -> its partition-id, None for one that does not say

    def summary(self) -> None:
        LOG.info("\t├──> Nodes are drawn with seed %d", self.seed)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        with self._drawing(grid, f"train/{server_round}") as view:
            return list(self.strategy.configure_train(server_round, arrays, config, view))

    def unique(self, nodes: Iterable[int]) -> dict[int, int]:
        """Partition-ids of these nodes, without those that several of them claim: nobody knows whose these are."""
        claimed = {node: name for node in nodes if (name := self.names.get(str(node))) is not None}
        counts = Counter(claimed.values())
        for name in (name for name, count in counts.items() if count > 1):
            same = ", ".join(str(node) for node, own in claimed.items() if own == name)
            LOG.warning("nodes %s have the same partition-id %d; each is known by its node id instead", same, name)
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
        """The grid to draw from; Python's own generator, which Flower draws with, is left as it was found."""
        before = random.getstate()
        try:
            yield _Ordered(grid, self.names, f"{self.seed}/{purpose}")
        finally:
            random.setstate(before)


class _Ordered(Grid):
    """A grid that lists its nodes in the order of their names, ready to draw from."""

    def __init__(self, grid: Grid, names: dict[str, int | None], seed: str) -> None:
        self.grid, self.names, self.seed = grid, names, seed

    def get_node_ids(self) -> list[int]:
        nodes = list(self.grid.get_node_ids())
        if new := [node for node in nodes if str(node) not in self.names]:
            told = partitions(self.grid, new)
            self.names.update({str(node): name for node, name in told.items()})
            if nameless := [node for node in new if told.get(node) is None]:
                LOG.warning(
                    "%d nodes do not say who they are and are ordered by their ids: introduce(app)", len(nameless)
                )
        random.seed(self.seed)  # last: waiting for nodes may have drawn from it
        return sorted(nodes, key=self._place)

    def _place(self, node: int) -> tuple[bool, int]:
        name = self.names.get(str(node))  # one that did not answer is asked again
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
