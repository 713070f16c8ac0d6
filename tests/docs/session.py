"""A page that somebody follows: its blocks run one after another, in one folder and one namespace."""

import importlib.util
import io
import re
import shutil
import tomllib
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from fedshift.data import cache
from fedshift.data.catalog import CATALOG
from fedshift.experiment.grid import expand
from tests.docs import shell
from tests.docs.blocks import ROOT, Block, blocks

COPIED = "docs", "results", "examples"  # of the repository, for commands that belong into its root
MEASURED = re.compile(r"[-+]?\d+\\\.\d+")  # accuracies and times: a number is enough, where whole ones must agree


class Session:
    def __init__(self, page: Path, folder: Path) -> None:
        self.blocks, self.folder = blocks(page), folder
        self.cwd = folder / "here"
        self.cwd.mkdir()
        self.space: dict[str, Any] = {"__name__": "documented"}
        self.done = 0
        self.printed = ""

    def reach(self, block: Block) -> None:
        """Run what is left up to this block; slow ones, and those that lack something here, only if they are meant."""
        while self.done <= self.blocks.index(block):
            one = self.blocks[self.done]
            self.done += 1
            if one == block or not (missing(one) or one.says("slow") is not None):
                self._take(one)

    def _take(self, block: Block) -> None:
        if block.says("only parsed") is not None:
            for words in shell.commands(block):
                shell.check(words)
        elif where := (block.says("in an app,") or block.says("in tests/")):
            self._elsewhere(block, where)
        elif block.title:
            (self.cwd / block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "bash":
            self._commands(block)
        elif block.language == "python":
            self._python(block)
        elif block.language == "output":
            compare(block, self.printed)
        if block.language == "toml" and not block.says("in tests/"):
            settings(block)

    def _commands(self, block: Block) -> None:
        for words in shell.commands(block):
            shell.check(words)
        if block.says("in a copy") is None:
            self.printed, self.cwd = shell.run(block, self.folder, self.cwd)
            return
        copy = self.folder / "copy"
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, dirs_exist_ok=True)
        self.printed, _ = shell.run(block, self.folder, copy)

    def _python(self, block: Block) -> None:
        out = io.StringIO()
        with chdir(self.cwd), redirect_stdout(out):
            exec(compile(block.code, block.place, "exec"), self.space)
        self.printed = out.getvalue()

    def _elsewhere(self, block: Block, where: str) -> None:
        """Another test has it, and names the page; or it stands in an app that is there."""
        if block.says("in an app,") is None:
            text = (ROOT / "tests" / where).read_text(encoding="utf-8")
            assert block.page.name in text, f"{block.place}: tests/{where} does not speak of this page"
            return
        spec = importlib.util.spec_from_file_location("documented_app", ROOT / where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.space |= {name: getattr(module, name) for name in module.__all__}
        self._python(block)
        rounds = self.space["strategy"].rounds
        assert len(rounds) == 50
        assert all(one.lossy == one.used == 10 for one in rounds)


def missing(block: Block) -> str:
    """Reason why this machine cannot run a block; empty if it can."""
    need = block.says("needs")
    if need == "gpu" and not torch.cuda.is_available():
        return "there is no CUDA device"
    if need in CATALOG and not cache.path(CATALOG[need]).is_file():
        return f"{need} is not in the cache: fedshift data {need}"
    return ""


def settings(block: Block) -> None:
    """SettingsError unless a file holds settings, or a grid of them."""
    assert expand(tomllib.loads(block.code)), block.place


def compare(block: Block, printed: str) -> None:
    """Every line of the block is among those printed, in the same order; rules of tables do not count."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in (" ".join(line.split()) for line in block.code.splitlines()):
        pattern = MEASURED.sub(r"[-+]?[\\d.]+", re.escape(line))
        if line.strip("─"):
            assert any(re.fullmatch(pattern, other) for other in lines), f"{block.place}: {line}\n---\n{printed}"
