"""Partitions of nodes: Flower assigns random ids to nodes, and each node reports its partition when asked.

A node knows its `partition-id` and `num-partitions` from the simulation, or from `flower-supernode --node-config`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedshift.flower.addon.outbox import Outbox
from fedshift.flower.addon.replies import brief

QUERY, ANSWER = "fedshift_who", "about"  # name of the query, and of the record with the answer
UNKNOWN = "query function registered"  # part of the error of an app without the query
KEYS = "partition-id", "num-partitions"
TIMEOUT = 60.0  # seconds for a node to answer


def introduce(app: ClientApp) -> ClientApp:
    """Add a query to an app by which its nodes report their partition-id.

    >>> from fedshift.flower.testing import LocalGrid
    >>> grid = LocalGrid(introduce(ClientApp()), 3)
    >>> sorted(answer.partition for answer in ask(grid, grid.get_node_ids()).values())
    [0, 1, 2]
    """

    @app.query(QUERY)
    def answer(message: Message, context: Context) -> Message:
        known: dict[str, Any] = {key: value for key, value in context.node_config.items() if key in KEYS}
        return Message(RecordDict({ANSWER: ConfigRecord(known)}), reply_to=message)

    return app


class PartitionAnswer(NamedTuple):
    """Partition of a node, or the reason why it is unknown."""

    partition: int | None = None
    partitions: int | None = None
    problem: str = ""
    final: bool = True  # False if the node may answer when it is asked again


def ask(grid: Grid, nodes: Iterable[int], timeout: float = TIMEOUT) -> dict[int, PartitionAnswer]:
    """Ask nodes for their partitions."""
    messages = [Message(RecordDict(), node, f"query.{QUERY}") for node in nodes]
    outbox = Outbox(grid, messages, timeout)
    return {node: _answer(outbox.reply(node)) for node in (message.metadata.dst_node_id for message in messages)}


def _answer(reply: Message | None) -> PartitionAnswer:
    if reply is None:
        return PartitionAnswer(problem="it did not answer", final=False)
    if reply.has_error():
        reason = reply.error.reason or ""
        return PartitionAnswer(problem=brief(reason), final=UNKNOWN in reason)
    config = reply.content.config_records.get(ANSWER, ConfigRecord())
    part, parts = (_number(config.get(key)) for key in KEYS)
    missing = part is None or parts is None
    return PartitionAnswer(
        part, parts, "its node config contains no partition-id and num-partitions" if missing else ""
    )


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError):
        return None
