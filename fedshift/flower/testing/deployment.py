"""A complete deployment of Flower on this machine, for tests: a SuperLink with TLS and authenticated SuperNodes.

Each of them is a separate process that can be killed and restarted.
"""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import tomli_w

from fedshift.flower.app.processes import Process, ProcessError, free_port
from fedshift.flower.app.superlink import Config, SuperLink, environment, executable
from fedshift.flower.testing.certificates import Key, server_certificate, supernode_key

START_TIMEOUT = 120.0  # seconds; twice the lease of a SuperNode that was killed
ACCEPTED = "SuperNode ID:"  # logged by a SuperNode when it is connected
REFUSED = re.compile(r"(Exit Code: \d+)\n(.+)\n(.+)")  # 305, "Failed to initialize the connection", reason
FEW_RETRIES = ("--max-retries", "2")  # a SuperNode without TLS is not told that it is refused


class SuperNode:
    """A SuperNode; `process` is its latest process, None before the first start."""

    def __init__(self, superlink: SuperLink, name: str, config: Config, security: Sequence[str]) -> None:
        self.superlink, self.name, self.security = superlink, name, security
        self.home = superlink.folder / name
        self.home.mkdir(parents=True, exist_ok=True)
        self.log = superlink.folder / f"{name}.log"
        self.config = self.home / "node-config.toml"
        self.config.write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
        self.environment = environment(self.home)  # a separate FLWR_HOME, as on a separate machine
        self.process: Process | None = None

    def launch(self) -> None:
        """Start it, without waiting for the connection."""
        self.kill()
        command = [executable("flower-supernode"), "--superlink", self.superlink.address, *self.security]
        command += ["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", str(self.config)]
        self.process = Process(command, self.environment, self.log)

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start it, and wait until it is connected.

        After a kill, the SuperLink refuses the SuperNode until its lease of 60 s expires, so the start is repeated. A
        SuperNode that was stopped is accepted at once.
        """
        self.launch()
        self.connected(timeout)

    def connected(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until it is connected; ProcessError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.accepted():
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} is not connected after {timeout:g} s, see {self.log}:\n{self._tail()}")
            if self.process is None or self.process.wait(0.1) is not None:
                time.sleep(1)
                self.launch()

    def accepted(self) -> bool:
        """True if it is running and connected."""
        return self.process is not None and self.process.code is None and ACCEPTED in self.process.text()

    def refused(self, timeout: float) -> str:
        """Wait until it gives up; return the reason from its log. ProcessError if it is connected, or still running."""
        if self.process is None or self.process.wait(timeout) is None or ACCEPTED in self.process.text():
            raise ProcessError(f"{self.name} was not refused within {timeout:g} s, see {self.log}:\n{self._tail()}")
        match = REFUSED.search(self.process.text())
        return " ".join(match.groups()) if match else f"exit code {self.process.code}"

    def stop(self) -> None:
        """Stop it; it signs off from the SuperLink."""
        if self.process:
            self.process.stop()

    def kill(self) -> None:
        """Kill it at once, with the ClientApp it runs."""
        if self.process:
            self.process.kill()

    def _tail(self) -> str:
        return self.process.tail() if self.process else ""


class Deployment:
    """A SuperLink with connected SuperNodes, until `close`; also a context manager.

    >>> with Deployment(Path("test"), nodes=[{"partition-id": 0}, {"partition-id": 1}]) as deployment:  # doctest: +SKIP
    ...     status, log = deployment.wait(deployment.run(Path("my-app"), {"num-server-rounds": 2}), timeout=300)
    """

    def __init__(self, folder: Path, nodes: Sequence[Config], *, tls: bool = True, auth: bool = True) -> None:
        """Start all processes; `folder`: for keys, logs and the database; `nodes`: configs of the SuperNodes."""
        self.folder = folder.absolute()
        self.tls = server_certificate(self.folder / "keys") if tls else None
        self.auth, self.nodes = auth, list[SuperNode]()
        self.superlink = SuperLink(self.folder, tls=self.tls, auth=auth, database=self.folder / "superlink.db")
        try:
            with ThreadPoolExecutor() as pool:
                self.nodes += pool.map(self._node, range(len(nodes)), nodes)
            for node in self.nodes:
                node.launch()
            for node in self.nodes:
                node.connected()
        except BaseException:
            self.close()
            raise

    def run(self, app: Path, config: Config | None = None) -> str:
        """Start an app; return the id of the run."""
        return self.superlink.run(app, config)

    def wait(self, run: str, timeout: float) -> tuple[str, str]:
        """Wait for the end of a run; return final status and log. ProcessError after `timeout` seconds."""
        return self.superlink.wait(run, timeout)

    def node(self, number: int) -> SuperNode:
        return self.nodes[number]

    def add(
        self, config: Config, *, key: Key | None = None, ca: Path | None = None, insecure: bool = False
    ) -> SuperNode:
        """Launch one more SuperNode; wait for the result with its `connected` or `refused`.

        By default it has a new, registered key. With another `key` it is not registered, with another `ca` it does not
        trust the SuperLink, and with `insecure` it connects without TLS and key.
        """
        node = self._node(len(self.nodes), config, key, ca, insecure)
        self.nodes.append(node)
        node.launch()
        return node

    def close(self) -> None:
        """End all processes."""
        for node in self.nodes:
            node.kill()
        self.superlink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _node(
        self, number: int, config: Config, key: Key | None = None, ca: Path | None = None, insecure: bool = False
    ) -> SuperNode:
        name = f"node-{number}"
        if insecure or self.tls is None:
            return SuperNode(self.superlink, name, config, ["--insecure", *(FEW_RETRIES if self.tls else ())])
        if key is None and self.auth:
            key = supernode_key(self.folder / "keys", name)
            self.superlink.register(key.public)
        security = ["--root-certificates", str(ca or self.tls.ca)]
        security += ["--auth-supernode-private-key", str(key.private)] if key else []
        return SuperNode(self.superlink, name, config, security)
