"""Grid with nodes in this process: each message of a ServerApp is answered at once, one node after the other.

The time of a round is that of the ClientApp. As on a network, server and nodes share no objects: every message and
reply is a copy of its records; only the immutable bytes of arrays are shared.
"""

import random
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity  # required to create a Message

SUPERLINK = 1  # node id
RAISED, UNAVAILABLE = 2, 5  # Flower's error codes: exception in the app, node unavailable
Tamper = Callable[[Message], Message | None]  # returns the reply that the server receives, None for a lost one
Config = Mapping[str, Any]


class LocalGrid(Grid):
    """`LocalGrid(app, 10)`: grid of ten nodes, with partition-id and num-partitions as in a simulation.

    `tamper` can replace or drop each reply; `errors` contains the tracebacks of exceptions in the app.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int | Sequence[Config] = 10,
        run_config: Config | None = None,
        *,
        seed: int | None = None,
        tamper: Tamper | None = None,
    ) -> None:
        self.app, self.run_config, self.tamper = app, dict(run_config or {}), tamper
        self._draw = random.Random(seed) if seed is not None else random.SystemRandom()
        self._run: Any = SimpleNamespace(run_id=self._draw.getrandbits(63), override_config=dict(self.run_config))
        self.contexts: dict[int, Context] = {}
        self.away: set[int] = set()
        self.errors: list[str] = []
        self._replies: dict[str, Message] = {}
        if TaskIdentity._run_id is None:
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run.run_id, SUPERLINK, 1
        if isinstance(nodes, int):
            nodes = [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
        for config in nodes:
            self.join(config)

    def join(self, config: Config) -> int:
        """Add a node; return its id."""
        node = self._draw.randrange(2, 1 << 64)
        self.contexts[node] = Context(self._run.run_id, node, dict(config), RecordDict(), dict(self.run_config))
        return node

    def leave(self, node: int) -> None:
        """Disconnect a node: it is not listed, and messages to it are answered with an error."""
        self.away.add(node)

    def back(self, node: int, *, anew: bool = False) -> int:
        """Reconnect a node, unchanged, or with `anew` with a new id and empty state; return its id."""
        self.away.discard(node)
        return self.join(self.contexts.pop(node).node_config) if anew else node

    def node_of(self, partition: int) -> int:
        """Id of the node with this partition-id, connected or not."""
        return next(node for node, x in self.contexts.items() if x.node_config.get("partition-id") == partition)

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Answer the messages, one after the other."""
        pushed = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())  # as in Flower's grids
            pushed.append(message.metadata.message_id)
            reply = self._answer(message)
            seen = self.tamper(reply) if self.tamper and reply is not None else reply
            if reply is not None and seen is not None:
                metadata = seen.metadata.__dict__  # a replaced reply answers the same message
                metadata |= {key: reply.metadata.__dict__[key] for key in ("_reply_to_message_id", "_src_node_id")}
                self._replies[pushed[-1]] = seen
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(message_id) for message_id in message_ids if message_id in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies, in the order of the messages."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None or context.node_id in self.away:
            reply = _stamped(Message(Error(UNAVAILABLE, "the node is not connected"), reply_to=message))
            reply.metadata.__dict__.update(_src_node_id=SUPERLINK, _dst_node_id=SUPERLINK)  # the SuperLink sends it
            return reply
        configs = dict(context.node_config), copied(context.state), dict(context.run_config)
        copy = Context(context.run_id, context.node_id, *configs)
        try:
            reply = self.app(_delivered(message), copy)
            if reply.metadata.reply_to_message_id != message.metadata.message_id:
                return None  # a SuperLink drops replies to unknown messages
            answered = Message(copied(reply.content), reply_to=message) if reply.has_content() else reply
        except Exception as problem:  # the node's state is unchanged, and the server gets the same error as from Flower
            self.errors.append(traceback.format_exc())
            return _stamped(Message(Error(RAISED, f"{type(problem)}:<'{problem}'>"), reply_to=message))
        context.state = copied(copy.state)
        return _stamped(answered)


def copied(content: RecordDict) -> RecordDict:
    """Copy the records; bytes of arrays are shared."""
    return RecordDict({name: _record(record) for name, record in content.items()})


def _record(record: ArrayRecord | MetricRecord | ConfigRecord) -> ArrayRecord | MetricRecord | ConfigRecord:
    if isinstance(record, ArrayRecord):
        return ArrayRecord({name: Array(x.dtype, x.shape, x.stype, x.data) for name, x in record.items()})
    values: Any = {name: list(x) if isinstance(x, list) else x for name, x in record.items()}
    return type(record)(values)


def _delivered(message: Message) -> Message:
    """Copy of a message for the node."""
    metadata = message.metadata
    seen = Message(copied(message.content), metadata.dst_node_id, metadata.message_type, ttl=metadata.ttl)
    seen.metadata.__dict__.update(metadata.__dict__)
    return seen


def _stamped(reply: Message) -> Message:
    reply.metadata.__dict__["_message_id"] = str(uuid4())
    return reply
