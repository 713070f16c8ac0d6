"""A figure of `fedshift bench flower`: what a node sends in a round, counted on its way, with TLS and authentication.

Every SuperNode reaches the SuperLink through a relay of its own, which counts the bytes of TCP's streams.
"""

import copy
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

import tomli_w

from fedshift.bench.codecs import Bar
from fedshift.flower.app.processes import ProcessError
from fedshift.flower.app.superlink import SuperLink
from fedshift.flower.testing.bench import APP, ARRAYS, PLAIN, TIMEOUT
from fedshift.flower.testing.certificates import server_certificate, supernode_key
from fedshift.flower.testing.deployment import SuperNode

NODES, ROUNDS = 2, 3
UPLINKS = {PLAIN: "fp32, as Flower sends it", "paper": "4 bit, QuantizeMod", "lean": "lean, QuantizeMod"}
IDLE = 15.0  # seconds
PROJECT = {
    "project": {"name": "uplink", "version": "0.1.0", "dependencies": []},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedshift",
                "components": {"serverapp": "uplink.app:server", "clientapp": "uplink.app:client"},
                "config": {"rounds": ROUNDS, "nodes": NODES, "uplink": PLAIN},
            }
        }
    },
}
Tick = Callable[[str], None]
CHUNK = 1 << 16


class Traffic(NamedTuple):
    """Bytes at the level of TCP, TLS included."""

    up: float  # from one node to the server, a round
    arrays: int  # of it in weights, as floats or as a frame
    connections: float
    seconds: float  # of a round


class Relay:
    """Listens on a port of this machine, and relays every connection to another; `up` are the bytes sent there."""

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
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # nobody there, as the connection who connects will see
                    near.close()
                    continue
                with self._lock:
                    self.connections += 1
                    self._open += [near, far]
                for source, sink, upwards in (near, far, True), (far, near, False):
                    threading.Thread(target=self._pump, args=(source, sink, upwards), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                with self._lock:  # before it is passed on, so that who has it finds it counted
                    self.up += len(data) if upwards else 0
                    self.down += 0 if upwards else len(data)
                sink.sendall(data)
        _shut(source)
        _shut(sink)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def uplinks(tick: Tick) -> tuple[list[Bar], list[tuple[str, ...]]]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "app" / "uplink").mkdir(parents=True)
        (folder / "app" / "pyproject.toml").write_text(tomli_w.dumps(PROJECT))
        (folder / "app" / "uplink" / "__init__.py").touch()
        (folder / "app" / "uplink" / "app.py").write_text(APP)
        tick("start of a deployment")
        tls = server_certificate(folder / "keys")
        link = stack.enter_context(SuperLink(folder, tls=tls, auth=True))
        relays = [stack.enter_context(Relay(link.port)) for _ in range(NODES)]
        for i, relay in enumerate(relays):
            key = supernode_key(folder / "keys", f"node-{i}")
            link.register(key.public)
            seen = copy.copy(link)  # as the node sees it
            seen.port = relay.port
            security = ["--root-certificates", str(tls.ca), "--auth-supernode-private-key", str(key.private)]
            node = SuperNode(seen, f"node-{i}", {"partition-id": i}, security)
            stack.callback(node.kill)
            node.start()
        found = {}
        for uplink, what in UPLINKS.items():
            tick(f"rounds of a deployment, {what}")
            found[uplink] = counted(link, relays, folder / "app", uplink)
        tick("a deployment that does nothing")
        before = sum(relay.up for relay in relays)
        time.sleep(IDLE)
        waiting = (sum(relay.up for relay in relays) - before) / IDLE / NODES
    return bars(found), [row(what, found[uplink], waiting) for uplink, what in UPLINKS.items()]


def counted(link: SuperLink, relays: list[Relay], app: Path, uplink: str) -> Traffic:
    """All that nodes sent from the start of a run to its end, over rounds and nodes; nothing is subtracted."""
    before, begin = [(relay.up, relay.connections) for relay in relays], time.monotonic()
    status, log = link.wait(link.run(app, {"uplink": uplink}), TIMEOUT)
    arrays = re.search(rf"{ARRAYS} (\d+)", log)
    if status != "finished:completed" or arrays is None:
        raise ProcessError(f"the run with uplink = {uplink!r} is {status}:\n{log}")
    up = sum(relay.up - first for relay, (first, _) in zip(relays, before, strict=True))
    connections = sum(relay.connections - first for relay, (_, first) in zip(relays, before, strict=True))
    seconds = (time.monotonic() - begin) / ROUNDS
    return Traffic(up / ROUNDS / NODES, int(arrays[1]), connections / ROUNDS / NODES, seconds)


def bars(found: Mapping[str, Traffic]) -> list[Bar]:
    plain, paper, lean = (found[uplink] for uplink in UPLINKS)
    few, fewer, above = paper.up / plain.up, lean.up / plain.up, lean.up - lean.arrays
    return [
        Bar("bytes up, 4 bit / fp32, TCP with TLS", "<= 1/7", few, few <= 1 / 7),
        Bar("bytes up, lean / fp32, TCP with TLS", "<= 1/25", fewer, fewer <= 1 / 25),
        Bar("bytes up beyond lean's frame, per node and round", "<= 25,000", above, above <= 25_000),
    ]


def row(what: str, counted: Traffic, waiting: float) -> tuple[str, ...]:
    """One line of the table; `waiting` is what an idle node sends, in bytes per second."""
    polls = waiting * counted.seconds
    figures = counted.up, counted.arrays, polls, counted.up - counted.arrays - polls
    return what, *(f"{figure:,.0f}" for figure in figures), f"{counted.connections:.1f}", f"{counted.seconds:.0f}"
