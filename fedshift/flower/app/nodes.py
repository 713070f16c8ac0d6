"""Nodes of a grid by partition.

Client k is always trained by the node with partition-id k mod num-partitions, which keeps its memory.
"""

import time
from collections.abc import Callable, Iterable

from flwr.serverapp import Grid

from fedshift.flower.addon.partitions import TIMEOUT, ask

REPORT_INTERVAL = 30.0  # seconds between progress messages while waiting
MAX_PARTITIONS = 1_000_000  # maximum number of partitions


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
        self.silent.clear()
        for node, answer in ask(self.grid, nodes, min(TIMEOUT, self.wait)).items():
            part, partitions = answer.partition, answer.partitions
            if part is None or partitions is None:
                (self.invalid if answer.final else self.silent)[node] = answer.problem
            elif not 0 <= part < partitions <= MAX_PARTITIONS or partitions != (self.partitions or partitions):
                rule = "partition-id must be below num-partitions, which must be equal on all nodes"
                self.invalid[node] = f"it reports partition {part} of {partitions}; {rule}"
            else:
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
