"""The app of tests.flower.trial: in a folder, deployed, and on a grid in this process as the reference."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from flwr.app import Message, RecordDict

from fedshift.flower.addon.arrays import KEY
from fedshift.flower.testing import Deployment, LocalGrid
from fedshift.wire.writer import header
from tests.flower import trial
from tests.flower.trial import client, server

CONFIG: dict[str, Any] = {
    "num-server-rounds": 3,
    "nodes": 3,  # minimum number of nodes
    "timeout": 600.0,
    "out": "",
    "checkpoint": False,
    "pack": False,
    "error-feedback": False,
    "steps": False,  # updates in steps of 0.8 bits with error feedback instead of weights in 4 bits
    "state-dir": "",
    "hostile": False,
    "wait-in": 0,
    "pause-after": -1,
}


@dataclass(frozen=True)
class Result:
    model: bytes
    rounds: list[dict[str, Any]]


def write_app(folder: Path) -> Path:
    """Write the app into a folder for `flwr run`; return the folder."""
    shutil.copytree(Path(trial.__file__).parent, folder / "trial", ignore=shutil.ignore_patterns("__pycache__"))
    project = {
        "project": {"name": "trial", "version": "0.1.0", "dependencies": []},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedshift",
                    "components": {"serverapp": "trial.server:app", "clientapp": "trial.client:app"},
                    "config": CONFIG,
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    return folder


def result_in(out: Path) -> Result:
    return Result((out / "model.safetensors").read_bytes(), json.loads((out / "rounds.json").read_text()))


def reference(
    out: Path,
    nodes: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    lost: Callable[[int, int], bool] = lambda partition, number: False,
    forgets: tuple[int, int] = (-1, 0),
) -> Result:
    """Result in one process, with `lost` uploads, and a node that loses its memory after a round."""
    out.mkdir()

    def tamper(reply: Message) -> Message | None:
        if reply.metadata.message_type != "train":
            return reply
        context = grid.contexts[reply.metadata.src_node_id]
        partition = int(context.node_config["partition-id"])
        number = header(reply.content.array_records["arrays"][KEY].data).base
        if (partition, number) == forgets:
            context.state = RecordDict()
        return None if lost(partition, number) else reply

    quiet = {name: CONFIG[name] for name in ("checkpoint", "pack", "hostile", "wait-in", "pause-after", "state-dir")}
    settings = {**CONFIG, **config, **quiet, "out": str(out)}
    grid = LocalGrid(client.app, nodes, settings, seed=1, tamper=tamper)
    server.run(grid, settings)
    return result_in(out)


class Trial:
    """One run of the app on a deployment."""

    def __init__(self, deployment: Deployment, app: Path, out: Path, config: Mapping[str, Any]) -> None:
        self.deployment, self.app, self.out = deployment, app, out
        out.mkdir(exist_ok=True)
        self.config = {**config, "out": str(out)}
        self.start()

    def start(self) -> None:
        """Start the run; a second call resumes it from its checkpoint."""
        self.run = self.deployment.run(self.app, self.config)

    def until(self, *names: str, timeout: float = 600.0) -> None:
        """Wait until the app has created these files."""
        deadline = time.monotonic() + timeout
        while not all((self.out / name).exists() for name in names):
            assert time.monotonic() < deadline, f"{names} did not happen:\n{self.deployment.superlink.log(self.run)}"
            time.sleep(0.05)

    def go(self) -> None:
        (self.out / "go").touch()

    def end(self, timeout: float = 900.0) -> tuple[Result, str]:
        """Wait for the end; return the result and the log."""
        status, log = self.deployment.wait(self.run, timeout)
        assert status == "finished:completed", log
        return result_in(self.out), log
