"""A figure of `fedshift bench flower`: what a node sends in a round, counted on its way, with TLS and authentication.

Every SuperNode reaches the SuperLink through a relay of its own, which counts the bytes of TCP's streams.
"""

import copy
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import tomli_w
import torch

from fedshift.bench.codecs import Bar
from fedshift.bench.relay import Relay
from fedshift.codecs import Codec, KMeans
from fedshift.flower.bench import APP, SHAPE, TIMEOUT
from fedshift.flower.processes import ProcessError
from fedshift.flower.superlink import SuperLink
from fedshift.flower.testing.certificates import server_certificate, supernode_key
from fedshift.flower.testing.deployment import Node
from fedshift.wire import size

NODES, ROUNDS = 2, 3
IDLE = 15.0  # seconds
PROJECT = {
    "project": {"name": "uplink", "version": "0.1.0", "dependencies": []},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "fedshift",
                "components": {"serverapp": "uplink.app:server", "clientapp": "uplink.app:client"},
                "config": {"rounds": ROUNDS, "nodes": NODES, "bits": 0},
            }
        }
    },
}
Tick = Callable[[str], None]


class Counted(NamedTuple):
    """Bytes at the level of TCP, TLS included."""

    up: float  # from one node to the server, a round
    connections: float
    seconds: float  # of a round


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
            node = Node(seen, f"node-{i}", {"partition-id": i}, security)
            stack.callback(node.kill)
            node.start()
        found = {}
        for bits in (0, 4):
            tick(f"rounds of a deployment, {bits or 32} bit")
            found[bits] = counted(link, relays, folder / "app", bits)
        tick("a deployment that does nothing")
        before = sum(relay.up for relay in relays)
        time.sleep(IDLE)
        waiting = (sum(relay.up for relay in relays) - before) / IDLE / NODES
    return told(found, waiting)


def counted(link: SuperLink, relays: list[Relay], app: Path, bits: int) -> Counted:
    """All that nodes sent from the start of a run to its end, over rounds and nodes; nothing is subtracted."""
    before, begin = [(relay.up, relay.connections) for relay in relays], time.monotonic()
    status, log = link.wait(link.run(app, {"bits": bits}), TIMEOUT)
    if status != "finished:completed":
        raise ProcessError(f"the run of {bits} bit is {status}:\n{log}")
    up = sum(relay.up - first for relay, (first, _) in zip(relays, before, strict=True))
    connections = sum(relay.connections - first for relay, (_, first) in zip(relays, before, strict=True))
    return Counted(up / ROUNDS / NODES, connections / ROUNDS / NODES, (time.monotonic() - begin) / ROUNDS)


def told(found: dict[int, Counted], waiting: float) -> tuple[list[Bar], list[tuple[str, ...]]]:
    like = {"weight": torch.zeros(SHAPE)}
    arrays = {0: like["weight"].numel() * 4, 4: size(Codec(KMeans(4)), like)}
    ratio = found[4].up / found[0].up
    bars = [Bar("bytes up, 4 bit / fp32, TCP with TLS", "<= 1/7", ratio, ratio <= 1 / 7)]
    rows = []
    for bits, what in (0, "fp32, as Flower sends it"), (4, "4 bit, QuantizeMod"):
        one = found[bits]
        polls = waiting * one.seconds
        rest = one.up - arrays[bits] - polls
        figures = one.up, arrays[bits], polls, rest
        rows.append((what, *(f"{figure:,.0f}" for figure in figures), f"{one.connections:.1f}", f"{one.seconds:.0f}"))
    return bars, rows
