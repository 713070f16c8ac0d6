"""Who is who among the nodes of a grid, and messages to them.

Flower numbers nodes at random. Ours say which part of the clients is theirs: `partition-id` of
`num-partitions`, as the simulation and `flower-supernode --node-config` set them. Client k is played
by the node with partition-id k mod num-partitions, always: what it remembers lives there.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedshift.flower.addon.replies import brief
from fedshift.flower.addon.seeded import ABOUT, WHO

EVERY = 30.0  # seconds between sentences while waiting
ASK = 60.0  # seconds a node has to say who it is
MOST = 1_000_000  # partitions


class Post:
    """Messages on their way, one a node, and the replies as they come in."""

    def __init__(self, grid: Grid, messages: Sequence[Message], timeout: float) -> None:
        self.grid, self.began, self.timeout = grid, time.monotonic(), timeout
        pushed = {one for one in grid.push_messages(list(messages)) if one} if messages else set()
        ids = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        self.open = {one: node for one, node in ids.items() if one in pushed}  # the grid refused the others
        self.replies: dict[int, Message] = {}

    def reply(self, node: int) -> Message | None:
        """Wait for a node's reply; None when there will be none, or not in time."""
        while node not in self.replies and node in self.open.values():
            for message in self.grid.pull_messages(list(self.open)):
                sender = self.open.pop(message.metadata.reply_to_message_id, None)
                if sender is not None:
                    self.replies[sender] = message
            passed = time.monotonic() - self.began
            if node in self.replies or passed > self.timeout:
                break
            time.sleep(min(1.0, max(0.01, passed / 10)))  # a tenth is waited in vain at most
        return self.replies.get(node)


class Nodes:
    """The nodes that are there, by partition."""

    def __init__(self, grid: Grid, wait: float, tell: Callable[[str], None]) -> None:
        self.grid, self.wait, self.tell = grid, wait, tell
        self.partitions = 0  # as the nodes say
        self.parts: dict[int, int] = {}  # node -> partition
        self.strange: dict[int, str] = {}  # node -> why it takes no part
        self.silent: dict[int, str] = {}  # and of those that could not say who they are

    def all(self) -> dict[int, int]:
        """Partition -> node, once every partition has one; ConnectionError if that takes too long."""
        began = said = time.monotonic()
        while not (at := self.now()) or len(at) < self.partitions:
            now = time.monotonic()
            if now - began > self.wait:
                raise ConnectionError(f"{self._missing(at)} after {self.wait:g} s; the run needs them all to begin")
            if now - said > EVERY:
                said = now
                self.tell(f"waiting for nodes: {self._missing(at)}")
            time.sleep(min(1.0, self.wait / 20))
        return at

    def now(self) -> dict[int, int]:
        """Partition -> node of those that are there; nodes not seen before are asked who they are."""
        there = dict.fromkeys(self.grid.get_node_ids())
        self.parts = {node: part for node, part in self.parts.items() if node in there}
        self.strange = {node: why for node, why in self.strange.items() if node in there}  # it may come back mended
        self._ask([node for node in there if node not in self.parts and node not in self.strange])
        return {part: node for node, part in self.parts.items() if part < self.partitions}  # of two, the newer

    def _ask(self, nodes: Iterable[int]) -> None:
        messages = [Message(RecordDict(), node, f"query.{WHO}") for node in nodes]
        post = Post(self.grid, messages, min(ASK, self.wait))
        self.silent.clear()
        for message in messages:
            node = message.metadata.dst_node_id
            reply = post.reply(node)
            if reply is None or reply.has_error():  # it is asked again
                self.silent[node] = brief(reply.error.reason or "") if reply else "it did not answer"
                continue
            try:
                said = reply.content[ABOUT]
                part, partitions = int(said["partition-id"]), int(said["num-partitions"])  # type: ignore[arg-type]
            except (KeyError, ValueError, TypeError):
                self.strange[node] = "it has no partition-id and num-partitions in its node config"
                continue
            if not 0 <= part < partitions <= MOST or partitions != (self.partitions or partitions):
                self.strange[node] = f"it says it is partition {part} of {partitions}"
                continue
            self.partitions = partitions
            self.parts[node] = part

    def _missing(self, at: dict[int, int]) -> str:
        others = list((self.strange | self.silent).items())[:3]
        strange = "".join(f"; node {node} takes no part: {why[:300]}" for node, why in others)
        if not self.partitions:
            return f"no node has connected{strange}"
        lacking = [part for part in range(self.partitions) if part not in at]
        some = ", ".join(map(str, lacking[:5])) + (", ..." if len(lacking) > 5 else "")
        return f"{len(at)} of {self.partitions} nodes have connected, partitions {some} are missing{strange}"
