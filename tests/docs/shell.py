"""The commands of a page, run in its folder; those that would need a network or a new environment are checked."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import typer

from fedshift.cli import app
from tests.docs.blocks import ROOT, Block

CHECKED = ("pip", "make", "source")  # commands that stand in for themselves: nothing is installed by a test
TIMEOUT = 1200
CLI = typer.main.get_command(app)


def commands(block: Block) -> list[list[str]]:
    """The words of each command of ours, and of those that are only checked."""
    joined = block.code.replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in joined.splitlines() if "<<" not in line]
    return [words for words in lines if words and words[0] in ("fedshift", *CHECKED)]


def parsed(words: list[str]) -> click.Command:
    """The command that these words call, once its parser has taken its arguments; SystemExit or a UsageError if not."""
    command, names, rest = CLI, [words[0]], words[1:]
    parent: click.Context | None = None
    while isinstance(command, click.Group):
        parent = command.make_context(names[-1], [], parent=parent, resilient_parsing=True)
        name, found, rest = command.resolve_command(parent, rest)
        assert found is not None
        command, names = found, [*names, str(name)]
    command.make_context(names[-1], rest, parent=parent)
    return command


def check(words: list[str]) -> None:
    """That a command which is not run could be: its extras, its target, its folder."""
    if words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in words for group in re.findall(r"\[(.+)\]", word) for extra in group.split(",")]
        assert set(asked) <= set(extras), words
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[0] == "source":
        assert words[1:] == [".venv/bin/activate"], words
    else:
        parsed(words)


def changed(block: Block) -> str:
    """The commands as the test runs them: `with` adds each of its options where a command has it."""
    options = re.findall(r"(--[\w-]+)((?: (?!--)(?:'[^']*'|\S+))*)", block.says("with") or "")
    lines = []
    for line in block.code.splitlines():
        if line.startswith("fedshift "):
            command = parsed(shlex.split(line, comments=True))
            known = {name for one in command.params for name in one.opts}
            line = line.partition("  #")[0].rstrip() + "".join(f" {o}{v}" for o, v in options if o in known)
        lines.append(line)
    return "\n".join(lines)


def environment(folder: Path) -> dict[str, str]:
    """In which `fedshift` and `python` are those of this environment, and what is only checked does nothing."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in CHECKED[:2]:
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "COLUMNS": "110", "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}


def run(block: Block, folder: Path, cwd: Path) -> tuple[str, Path]:
    """Output of the commands, and the folder they end in."""
    env, ended = environment(folder), folder / "cwd"
    script = f"set -e\nsource() {{ :; }}\n{changed(block)}\npwd > {shlex.quote(str(ended))}\n"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == int(block.says("exits") or 0), f"{block.place}\n{done.stdout}"
    return done.stdout, Path(ended.read_text().strip()) if ended.exists() else cwd
