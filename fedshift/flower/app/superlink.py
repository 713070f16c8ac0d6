"""A SuperLink of Flower as a child process, and runs on it: simulated, or with SuperNodes that connect.

Only Flower's commands are used, with a private FLWR_HOME that contains the connection to this SuperLink, and without
requests to other hosts.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tomli_w

from fedshift.core.extras import needs
from fedshift.flower.app.processes import Process, ProcessError, free_port, wait_for_port

Config = Mapping[str, str | int | float | bool]

COMMAND_TIMEOUT = 60.0  # seconds for a command of Flower, which takes one or two
START_TIMEOUT = 60.0
CONNECTION = "fedshift"  # name of the connection in the private FLWR_HOME
PRIVATE = {
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
QUICK = {
    "OMP_NUM_THREADS": "1",  # many processes on few cores
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # default: 1 s, for every message of every node
    "PYTHONUNBUFFERED": "1",  # logs are read while they are written
}


@dataclass(frozen=True)
class Tls:
    """Files of a SuperLink with TLS: certificate authority, certificate and key."""

    ca: Path
    certificate: Path
    key: Path


class SuperLink:
    """A running SuperLink, from the constructor to `close`; also a context manager.

    >>> with SuperLink(Path("runs/link"), supernodes=10) as link:  # doctest: +SKIP
    ...     status, log = link.wait(link.run(Path("my-app"), {"num-server-rounds": 3}), timeout=600)
    """

    def __init__(
        self,
        folder: Path,
        *,
        supernodes: int | None = None,
        cpus: int = 1,
        gpus: float = 0.0,
        tls: Tls | None = None,
        auth: bool = False,
        database: Path | None = None,
    ) -> None:
        """Start a SuperLink; `folder` contains its log and FLWR_HOME.

        With `supernodes` it simulates this number of SuperNodes, each with `cpus` cores and a share `gpus` of a GPU.
        Without, SuperNodes connect to `address`, over TLS with `tls`, and only registered ones with `auth`. Its state
        is in memory, or in the file `database`, which `restart` reads.
        """
        if supernodes is not None and supernodes < 1:
            raise ValueError(f"SuperLink(supernodes={supernodes}): at least one SuperNode is needed")
        if auth and tls is None:
            raise ValueError("SuperLink(auth=True): Flower authenticates SuperNodes over TLS only; tls is missing")
        self.folder, self.tls, self.simulated = folder.absolute(), tls, supernodes is not None
        self.home = self.folder / "superlink"
        self.home.mkdir(parents=True, exist_ok=True)
        self.environment = environment(self.home)
        self.federation = (
            f"num-supernodes={supernodes} client-resources-num-cpus={cpus} client-resources-num-gpus={gpus}"
        )
        self.options = ["--simulation"] if self.simulated else []
        self.options += ["--enable-supernode-auth"] if auth else []
        self.options += ["--database", str(database.absolute())] if database else []
        self.port = free_port()
        self.process = self._start()

    @property
    def address(self) -> str:
        """Address for SuperNodes and commands; Flower 1.41 or later uses one port for both."""
        return f"127.0.0.1:{self.port}"

    def run(self, app: Path, config: Config | None = None) -> str:
        """Start an app, with `config` over the settings of its pyproject.toml; return the id of the run."""
        settings = self.home / "run-config.toml"  # a file, since values on the command line cannot contain quotes
        settings.write_text(tomli_w.dumps(dict(config or {})), encoding="utf-8")
        command = ["run", str(app.absolute()), CONNECTION, "--run-config", str(settings)]
        command += ["--federation-config", self.federation] if self.simulated else []
        return str(self._flwr(*command)["run-id"])

    def status(self, run: str) -> str:
        """Status: pending, starting, running, finished:completed, finished:failed or finished:stopped."""
        return str(self._flwr("list", CONNECTION, "--run-id", run)["runs"][0]["status"])

    def wait(self, run: str, timeout: float) -> tuple[str, str]:
        """Wait for the end of a run; return final status and log. ProcessError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            command = [executable("flwr"), "log", run, CONNECTION, "--stream"]
            follow = Process(command, self.environment, self.folder / f"run-{run}.log")
            try:  # ends with the run, and is cheaper than polling the status
                while follow.wait(0.2) is None:
                    self._check(follow, run, deadline)
            finally:
                follow.kill()
            self._check(follow, run, deadline)
            if (status := self.status(run)).startswith("finished"):
                return status, follow.text()

    def log(self, run: str) -> str:
        """Log of the run so far."""
        return self._flower("log", run, CONNECTION, "--show")

    def stop(self, run: str) -> None:
        """End the run, not the SuperLink."""
        self._flwr("stop", run, CONNECTION)

    def register(self, public_key: Path) -> int:
        """Register the public key of a SuperNode; return its id."""
        return int(self._flwr("supernode", "register", str(public_key), CONNECTION)["node-id"])

    def nodes(self) -> dict[int, str]:
        """Status of each known SuperNode: registered, online or offline."""
        listed = self._flwr("supernode", "list", CONNECTION)["nodes"]
        return {int(node["node-id"]): str(node["status"]) for node in listed}

    def kill(self) -> None:
        """Kill it at once, with the ServerApps it runs."""
        self.process.kill()

    def restart(self) -> None:
        """Restart at the same address from the database; runs whose ServerApp has ended are not resumed."""
        self.process.kill()
        self.process = self._start()

    def close(self) -> None:
        """End it, its runs and all their processes."""
        self.process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _start(self) -> Process:
        security = ["--insecure"]
        connection: dict[str, str | bool] = {"address": self.address, "insecure": True}
        if self.tls:
            security = ["--ssl-ca-certfile", str(self.tls.ca), "--ssl-certfile", str(self.tls.certificate)]
            security += ["--ssl-keyfile", str(self.tls.key)]
            connection = {"address": self.address, "root-certificates": str(self.tls.ca.absolute())}
        config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        (self.home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        command = [executable("flower-superlink"), *security, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation", *self.options]
        process = Process(command, self.environment, self.folder / "superlink.log", self.environment["RAY_TMPDIR"])
        try:
            wait_for_port(process, self.port, START_TIMEOUT)
        except BaseException:
            process.kill()
            raise
        return process

    def _check(self, follow: Process, run: str, deadline: float) -> None:
        if self.process.code is not None:
            raise ProcessError(f"the SuperLink ended during run {run}, see {self.process.log}:\n{self.process.tail()}")
        if time.monotonic() > deadline:
            raise ProcessError(f"run {run} has not finished in time, see {follow.log}:\n{follow.tail()}")

    def _flwr(self, *arguments: str) -> Any:
        """Run a command of Flower and return its JSON output."""
        answer = json.loads(self._flower(*arguments, "--format", "json"))
        if not answer["success"]:  # although the exit code is 0
            raise ProcessError(f"flwr {' '.join(arguments)}: {answer['error-message'].strip()}")
        return answer

    def _flower(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [executable("flwr"), *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise ProcessError(f"flwr {' '.join(arguments)}: no answer after {COMMAND_TIMEOUT:g} s") from None
        if done.returncode:
            raise ProcessError(f"flwr {' '.join(arguments)}: {(done.stdout + done.stderr).strip()}")
        return done.stdout


def environment(home: Path) -> dict[str, str]:
    """Environment of Flower's processes: private FLWR_HOME, no requests to other hosts."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    direct = ",".join(filter(None, [os.environ.get("no_proxy", os.environ.get("NO_PROXY")), "127.0.0.1,localhost"]))
    paths = {"FLWR_HOME": str(home), "RAY_TMPDIR": _short(home), "PATH": path, "no_proxy": direct, "NO_PROXY": direct}
    return {**os.environ, **PRIVATE, **QUICK, **paths}


def executable(name: str) -> str:
    """Path of a command of Flower, from the environment of this Python if possible."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise ProcessError(f"{name} is not installed; it {needs('flwr')}")
    return found


def _short(home: Path) -> str:
    """Short path of a folder per home: Ray creates sockets below it, and their paths are limited to 107 bytes."""
    base = tempfile.gettempdir()
    return f"{base if len(base) < 25 else '/tmp'}/fs{zlib.crc32(str(home.absolute()).encode()):08x}"
