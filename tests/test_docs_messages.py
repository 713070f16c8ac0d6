"""The messages that docs/troubleshooting.md quotes are those that the program prints."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import Codec, Experiment, Header, Uniform, WireError, header, pack, run, unpack
from fedshift.core.extras import needs
from fedshift.core.files import Lock
from tests.docs.blocks import ROOT, blocks
from tests.runs import fedshift

PAGE = ROOT / "docs" / "troubleshooting.md"
TEXT = PAGE.read_text(encoding="utf-8")
QUOTES = [line for block in blocks(PAGE) for line in block.code.splitlines()]
REASONS = re.findall(r"^\| `(.+?)` \|", TEXT, re.MULTILINE)
STANDS_FOR = re.compile(r"\b(?:DIR|NAME|PATH|HOST|REASON|PACKAGE|MODULE|COMMAND|HASH|DETAILS|N)\b")
ELSEWHERE = (  # what needs a device, a network or a full disk; other tests have the parts of these sentences
    "mnist could not be fetched",
    "No space left on device",
    "OutOfMemoryError",
    "runs failed",
    "with secure aggregation",
)
MODELS = """
from torch import nn


def small():
    return nn.Linear(32, 10)


def normed():
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


def narrow():
    return nn.Sequential(nn.Unflatten(1, (1, 64)), nn.AvgPool1d(4), nn.Flatten(), nn.Linear(16, 10))


def close(outputs, targets):
    return (outputs.argmax(1) == targets).float()
"""
SMOKE = ("run", "--preset", "smoke", "--set", "train.rounds=2", "--set", "engine.name=sequential")


def matched(quotes: list[str], printed: str) -> set[str]:
    """The quotes that a line of the output matches, where words in capitals may stand for anything."""
    lines = [line.strip() for line in printed.splitlines()]
    patterns = {quote: STANDS_FOR.sub(".+", re.escape(quote)) for quote in quotes}
    return {quote for quote, pattern in patterns.items() if any(re.fullmatch(pattern, line) for line in lines)}


def settings() -> str:
    wrong = ["train.epoch=3", "uplink.bits=9", "uplink=leen", "train.decay=0.9", "model.name=resnet"]
    wrong += [
        "model.name=nothing_here:f",
        "engine.device=cuda",
        "model.name=documented_models:small",
        "train.metric=documented_models:close",
    ]
    printed = [fedshift(*SMOKE, "--set", one).output for one in wrong]
    stacked = ["--set", "model.name=documented_models:normed", "--engine", "batched"]
    return "".join([*printed, fedshift("run", "--preset", "smoke", *stacked).output])


def data() -> str:
    return fedshift(*SMOKE, "--set", "data.name=cifar10").output


def folders() -> str:
    printed = fedshift(*SMOKE, "--out", "stopped", "--minutes", "0").output
    printed += fedshift(*SMOKE, "--out", "stopped").output
    fedshift(*SMOKE, "--set", "train.rounds=1", "--out", "done")
    Path("other").mkdir()
    Path("other", "notes").touch()
    printed += fedshift(*SMOKE, "--out", "done").output + fedshift(*SMOKE, "--out", "other").output
    with Lock(Path("stopped")):
        printed += re.sub(r"in this process, (\d+)", r"process \1: fedshift", fedshift("resume", "stopped").output)
    own = run(Experiment(train={"rounds": 2}, engine={"name": "sequential"}), "own", model=torch.nn.Linear(64, 10))
    next(own)
    own.close()
    printed += fedshift("resume", "own").output
    file = Path("stopped", "settings.toml")
    file.write_text(file.read_text().replace("lr = 0.05", "lr = 0.2"))
    printed += fedshift("resume", "stopped").output
    file.write_text(file.read_text().replace("lr = 0.2", "lr = 0.05"))
    (checkpoint,) = Path("stopped").glob("checkpoint.*")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1] + b"?")
    return printed + fedshift("resume", "stopped").output


def sweeps() -> str:
    printed = ""
    for rounds in (2, 3):
        Path("grid.toml").write_text(f"[train]\nrounds = {rounds}\n[sweep]\nseed = [0]\n")
        printed += fedshift("sweep", "grid.toml", "--out", "grid", "--quiet").output
    return printed


def training() -> str:
    narrow = fedshift(*SMOKE, "--set", "model.name=documented_models:narrow").output
    return narrow + fedshift(*SMOKE, "--set", "train.rounds=8", "--set", "train.lr=1e20").output


def frames() -> str:
    w = {"w": torch.ones(3, 3)}
    whole, described = pack(Codec(Uniform(4)), w), pack(Codec(Uniform(4)), w, described=True)
    like = {"w": torch.ones(3, 3), "b": torch.ones(3)}
    wrong: list[Callable[[], Any]] = [
        lambda: header(whole[:-1] + bytes([whole[-1] ^ 1])),
        lambda: header(whole[:20]),
        lambda: header(b"GARBAGE" * 9),
        lambda: unpack(whole, like),
        lambda: unpack(described, like),
        lambda: header(whole[:4] + b"\1" + whole[5:]),
        lambda: header(whole).check(run=7, base=0, client=None),
        lambda: header(whole).check(run=0, base=2, client=None),
        lambda: Header(client=1).check(run=0, base=0, client=2),
    ]
    return "\n".join(message(one, WireError) for one in wrong)


def packages() -> str:
    """Messages for missing packages, whose beginnings are checked by the tests of each."""
    wanted = {"--set: engine.name = 'flower':": "flwr", "--figures": "matplotlib", "--track mlflow:": "mlflow"}
    return "\n".join(f"fedshift: {what} {needs(package)}" for what, package in wanted.items())


def message(provoke: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        provoke()
    return str(raised.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder without data sets, and with a module of models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "data"))
    (tmp_path / "documented_models.py").write_text(MODELS)
    return tmp_path


def test_quoted_messages_are_printed(here: Path) -> None:
    parts = (settings, data, folders, sweeps, training, frames, packages)
    printed = "\n".join(part() for part in parts)
    flower = TEXT[TEXT.index("## On Flower") : TEXT.index("## Frames")]
    elsewhere = (*ELSEWHERE, "no CUDA device") if torch.cuda.is_available() else ELSEWHERE
    expected = {one for one in QUOTES if one not in flower and not any(part in one for part in elsewhere)}
    assert len(expected) > 20
    assert expected - matched(QUOTES, printed) == set(), printed


def test_messages_of_flower_are_those_of_the_table() -> None:
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord
    from flwr.clientapp.mod import fixedclipping_mod
    from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

    from fedshift.flower import FedShift, NoUploadsError, QuantizeMod, Scaffold
    from tests.flower.apps import run as train

    start = ArrayRecord({"weight": torch.ones(20, 20)})

    def ends(strategy: Any, mods: list[Any], reply: Any, metrics: Any) -> str:
        def trained(model: Any, node: int, context: Any) -> Any:
            return {"weight": reply}, metrics

        return message(lambda: train(strategy, mods, nodes=3, train=trained, start=start), NoUploadsError)

    plain, heavy, mod = FedAvg(fraction_evaluate=0.0), {"num-examples": 600}, QuantizeMod("lean")
    private = DifferentialPrivacyClientSideFixedClipping(FedAvg(fraction_evaluate=0.0), 1.0, 10.0, 3)
    fine = torch.ones(20, 20)
    printed = [
        ends(FedShift(private), [fixedclipping_mod, QuantizeMod(bits=4)], fine, heavy),
        ends(FedShift(plain, pack=True), [], fine, heavy),
        ends(FedShift(Scaffold(plain, population=3)), [mod], fine, heavy),
        ends(FedShift(plain), [mod], fine, {"loss": 1.0}),
        ends(FedShift(plain), [], torch.ones(20, 21), heavy),
        ends(FedShift(plain), [], fine / 0, heavy),
        message(lambda: mod.round_info({}), ValueError),
        message(lambda: QuantizeMod("leen"), ValueError),
        frames(),
    ]
    assert len(REASONS) == 8
    assert [reason for reason in REASONS if not any(reason in text for text in printed)] == []
    found = matched(QUOTES, "\n".join(printed))
    assert {one for one in QUOTES if one.startswith(("QuantizeMod(", "round N: every reply"))} <= found
