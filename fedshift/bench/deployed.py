"""Measurement of `fedshift bench flower`: bytes that a node sends and receives per round, with TLS and authentication.

Each SuperNode connects to the SuperLink through a separate relay, which counts the bytes of its TCP streams.
"""

import copy
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import tomli_w

from fedshift.bench.codecs import Target
from fedshift.flower.app.processes import ProcessError
from fedshift.flower.app.superlink import Config, SuperLink
from fedshift.flower.testing.bench import ARRAYS, PLAIN, TIMEOUT
from fedshift.flower.testing.certificates import server_certificate, supernode_key
from fedshift.flower.testing.deployment import SuperNode

NODES, ROUNDS = 2, 3
BOTH = "both"  # name of the run with a compressed downlink
UPLINKS = {
    PLAIN: "fp32, as Flower sends it",
    "paper": "4 bit, QuantizeMod",
    "lean": "lean, QuantizeMod",
    BOTH: "lean, downlink=8",
}
IDLE = 15.0  # seconds
Tick = Callable[[str], None]
CHUNK = 1 << 16


class Traffic(NamedTuple):
    """Bytes of TCP streams, including TLS."""

    up: float  # from one node to the server, per round
    arrays: int  # bytes of weights in it, as floats or as a frame
    connections: float  # per round
    seconds: float  # per round
    down: float = 0.0  # from the server to one node, per round


class Relay:
    """Relay from a port of this machine to the port `target`; `up` counts the bytes sent to the target."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.up = self.down = self.connections = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            for connection in (self._listener, *self._open):
                _shut(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # no listener; the peer sees a closed connection
                    client.close()
                    continue
                with self._lock:
                    self.connections += 1
                    self._open += [client, server]
                for source, sink, upwards in (client, server, True), (server, client, False):
                    threading.Thread(target=self._pump, args=(source, sink, upwards), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                with self._lock:  # counted before it is sent, so that a receiver sees it counted
                    self.up += len(data) if upwards else 0
                    self.down += 0 if upwards else len(data)
                sink.sendall(data)
        _shut(source)
        _shut(sink)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def uplinks(tick: Tick) -> tuple[list[Target], list[tuple[str, ...]]]:
    """Run a deployment with each uplink; return the targets and the table of bytes."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_app(folder / "app", "bench", {"rounds": ROUNDS, "nodes": NODES, "uplink": PLAIN, "downlink": 32})
        tick("start of a deployment")
        link, relays = stack.enter_context(relayed(folder, NODES))
        found = {}
        for uplink, label in UPLINKS.items():
            tick(f"rounds of a deployment, {label}")
            found[uplink] = counted(link, relays, folder / "app", uplink)
        tick("an idle deployment")
        before = sum(relay.up for relay in relays)
        time.sleep(IDLE)
        idle = (sum(relay.up for relay in relays) - before) / IDLE / NODES
    return targets(found), [row(label, found[uplink], idle) for uplink, label in UPLINKS.items()]


@contextmanager
def relayed(folder: Path, nodes: int) -> Iterator[tuple[SuperLink, list[Relay]]]:
    """Start a SuperLink with TLS, and authenticated SuperNodes, each of them behind a relay."""
    with ExitStack() as stack:
        tls = server_certificate(folder / "keys")
        link = stack.enter_context(SuperLink(folder, tls=tls, auth=True))
        relays = [stack.enter_context(Relay(link.port)) for _ in range(nodes)]
        for i, relay in enumerate(relays):
            key = supernode_key(folder / "keys", f"node-{i}")
            link.register(key.public)
            behind = copy.copy(link)  # with the port of the relay
            behind.port = relay.port
            security = ["--root-certificates", str(tls.ca), "--auth-supernode-private-key", str(key.private)]
            node = SuperNode(behind, f"node-{i}", {"partition-id": i}, security)
            stack.callback(node.kill)
            node.start()
        yield link, relays


def write_app(folder: Path, module: str, config: Config) -> None:
    """Write the project of a Flower app; its ServerApp and ClientApp are in a module of `fedshift.flower.testing`."""
    components = {"serverapp": "measured.app:server", "clientapp": "measured.app:client"}
    app = {"publisher": "fedshift", "components": components, "config": dict(config)}
    project = {"name": "measured", "version": "0.1.0", "dependencies": []}
    (folder / "measured").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}}))
    (folder / "measured" / "__init__.py").touch()
    # Flower looks for assignments in this file
    source = f"from fedshift.flower.testing import {module} as apps\n\nclient = apps.client\nserver = apps.server\n"
    (folder / "measured" / "app.py").write_text(source)


def counted(link: SuperLink, relays: list[Relay], app: Path, uplink: str) -> Traffic:
    """Bytes that nodes sent from the start to the end of a run, per round and node; nothing is subtracted."""
    before, begin = [(relay.up, relay.down, relay.connections) for relay in relays], time.monotonic()
    config: dict[str, str | int] = {"uplink": "lean", "downlink": 8} if uplink == BOTH else {"uplink": uplink}
    status, log = link.wait(link.run(app, config), TIMEOUT)
    arrays = re.search(rf"{ARRAYS} (\d+)", log)
    if status != "finished:completed" or arrays is None:
        raise ProcessError(f"the run with uplink = {uplink!r} ended with status {status}:\n{log}")
    after = [(relay.up, relay.down, relay.connections) for relay in relays]
    up, down, connections = (
        sum(now - first for now, first in zip(new, old, strict=True)) / ROUNDS / NODES
        for new, old in zip(zip(*after, strict=True), zip(*before, strict=True), strict=True)
    )
    return Traffic(up, int(arrays[1]), connections, (time.monotonic() - begin) / ROUNDS, down)


def targets(found: Mapping[str, Traffic]) -> list[Target]:
    plain, paper, lean, both = (found[uplink] for uplink in UPLINKS)
    down_ratio = both.down / plain.down
    paper_ratio, lean_ratio, rest = paper.up / plain.up, lean.up / plain.up, lean.up - lean.arrays
    return [
        Target("bytes up, 4 bit / fp32, TCP with TLS", "<= 1/7", paper_ratio, paper_ratio <= 1 / 7),
        Target("bytes up, lean / fp32, TCP with TLS", "<= 1/25", lean_ratio, lean_ratio <= 1 / 25),
        Target("bytes down, 8 bit / fp32, TCP with TLS", "<= 1/3.5", down_ratio, down_ratio <= 1 / 3.5),
        Target("bytes up besides the frame of lean, per node and round", "<= 25,000", rest, rest <= 25_000),
    ]


def row(label: str, traffic: Traffic, idle: float) -> tuple[str, ...]:
    """Line of the table; `idle` is the number of bytes that an idle node sends per second."""
    polls = idle * traffic.seconds
    figures = traffic.up, traffic.arrays, polls, traffic.up - traffic.arrays - polls, traffic.down
    return label, *(f"{figure:,.0f}" for figure in figures), f"{traffic.connections:.1f}", f"{traffic.seconds:.0f}"
