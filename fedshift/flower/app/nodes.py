"""Nodes of a grid by partition, and messages to them.

Flower assigns random ids to nodes. Each node reports its `partition-id` and `num-partitions`, as set by the simulation
or `flower-supernode --node-config`. Client k is always trained by the node with partition-id k mod num-partitions,
which keeps its memory.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedshift.flower.addon.replies import brief
from fedshift.flower.addon.seeded import ABOUT, WHO

REPORT_INTERVAL = 30.0  # seconds between progress messages while waiting
QUERY_TIMEOUT = 60.0  # seconds for a node to report its partition
MAX_PARTITIONS = 1_000_000  # maximum number of partitions


class Outbox:
    """Messages that were sent, one per node, and the replies received so far."""

    def __init__(self, grid: Grid, messages: Sequence[Message], timeout: float) -> None:
        self.grid, self.began, self.timeout = grid, time.monotonic(), timeout
        pushed = {message_id for message_id in grid.push_messages(list(messages)) if message_id} if messages else set()
        ids = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        self.open = {message_id: node for message_id, node in ids.items() if message_id in pushed}  # not yet answered
        self.replies: dict[int, Message] = {}

    def reply(self, node: int) -> Message | None:
        """Wait for the reply of a node; None if the message was not accepted, or after the timeout."""
        while node not in self.replies and node in self.open.values():
            for message in self.grid.pull_messages(list(self.open)):
                sender = self.open.pop(message.metadata.reply_to_message_id, None)
                if sender is not None:
                    self.replies[sender] = message
            elapsed = time.monotonic() - self.began
            if node in self.replies or elapsed > self.timeout:
                break
            time.sleep(min(1.0, max(0.01, elapsed / 10)))  # adds at most a tenth to the waiting time
        return self.replies.get(node)


class Nodes:
    """Connected nodes, by partition."""

    def __init__(self, grid: Grid, wait: float, tell: Callable[[str], None]) -> None:
        self.grid, self.wait, self.tell = grid, wait, tell
        self.partitions = 0  # reported by the nodes
        self.parts: dict[int, int] = {}  # node -> partition
        self.invalid: dict[int, str] = {}  # node -> why it is ignored
        self.silent: dict[int, str] = {}  # node -> why its partition is not known yet

    def all(self) -> dict[int, int]:
        """Wait until every partition has a node; return partition -> node. ConnectionError after the timeout."""
        began = reported = time.monotonic()
        while not (at := self.now()) or len(at) < self.partitions:
            now = time.monotonic()
            if now - began > self.wait:
                raise ConnectionError(
                    f"{self._missing(at)} after {self.wait:g} s; the run starts when all nodes are connected"
                )
            if now - reported > REPORT_INTERVAL:
                reported = now
                self.tell(f"waiting for nodes: {self._missing(at)}")
            time.sleep(min(1.0, self.wait / 20))
        return at

    def now(self) -> dict[int, int]:
        """Return partition -> node of the connected nodes; new nodes are asked for their partition."""
        connected = dict.fromkeys(self.grid.get_node_ids())
        self.parts = {node: part for node, part in self.parts.items() if node in connected}
        # an ignored node that disconnects may be fixed when it returns
        self.invalid = {node: why for node, why in self.invalid.items() if node in connected}
        self._ask([node for node in connected if node not in self.parts and node not in self.invalid])
        return {part: node for node, part in self.parts.items() if part < self.partitions}  # the newer one of two

    def _ask(self, nodes: Iterable[int]) -> None:
        messages = [Message(RecordDict(), node, f"query.{WHO}") for node in nodes]
        outbox = Outbox(self.grid, messages, min(QUERY_TIMEOUT, self.wait))
        self.silent.clear()
        for message in messages:
            node = message.metadata.dst_node_id
            reply = outbox.reply(node)
            if reply is None or reply.has_error():  # it is asked again
                self.silent[node] = brief(reply.error.reason or "") if reply else "it did not answer"
                continue
            try:
                config = reply.content[ABOUT]
                part, partitions = int(config["partition-id"]), int(config["num-partitions"])  # type: ignore[arg-type]
            except (KeyError, ValueError, TypeError):
                self.invalid[node] = "its node config contains no partition-id and num-partitions"
                continue
            if not 0 <= part < partitions <= MAX_PARTITIONS or partitions != (self.partitions or partitions):
                rule = "partition-id must be below num-partitions, which must be equal on all nodes"
                self.invalid[node] = f"it reports partition {part} of {partitions}; {rule}"
                continue
            self.partitions = partitions
            self.parts[node] = part

    def _missing(self, at: dict[int, int]) -> str:
        others = list((self.invalid | self.silent).items())[:3]
        ignored = "".join(f"; node {node} is ignored: {why[:300]}" for node, why in others)
        if not self.partitions:
            return f"no node has connected{ignored}"
        missing = [part for part in range(self.partitions) if part not in at]
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        return f"{len(at)} of {self.partitions} nodes have connected, partitions {some} are missing{ignored}"
