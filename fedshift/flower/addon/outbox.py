"""Messages to nodes and their replies, without the seconds that `Grid.send_and_receive` waits between polls."""

import time
from collections.abc import Sequence

from flwr.app import Message
from flwr.serverapp import Grid


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
