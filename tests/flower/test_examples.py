"""The example apps run simulated and deployed; the Python code and the commands of docs/flower.md are run unchanged."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import read
from fedshift.flower.app.processes import Process, free_port
from fedshift.flower.app.superlink import environment
from fedshift.runs.run import Run
from tests.docs.blocks import blocks as found

HERE = Path(__file__).parents[2]
EXAMPLES = HERE / "examples"
PAGE = HERE / "docs" / "flower.md"
ARROW = re.compile(r"# <-- (\d)")
PORTS = "39091", "8000", "9094", "9095"  # those in the documentation


def blocks(path: Path, language: str) -> list[str]:
    """Blocks of an example; of docs/flower.md, the commands that name this file, and all Python."""
    mine = [block for block in found(path) if block.language == language]
    left = [block for block in mine if block.says("in tests/") == "flower/test_examples.py"]
    return [block.code for block in (left if path == PAGE and language == "bash" else mine)]


@pytest.fixture
def apps(tmp_path: Path) -> Path:
    """A folder with both examples, shortened to two rounds."""
    for name in "flower-app/experiment.toml", "flower-quantized/pyproject.toml":
        copy = tmp_path / "examples" / name
        shutil.copytree(EXAMPLES / copy.parent.name, copy.parent, ignore=shutil.ignore_patterns("__pycache__"))
        copy.write_text(re.sub(r"rounds = \d+", "rounds = 2", copy.read_text()))
    return tmp_path / "examples"


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Namespace of each Python block on the page; one of them imports an example."""
    monkeypatch.syspath_prepend(EXAMPLES / "flower-quantized")
    spaces: list[dict[str, Any]] = [{"__name__": "documented"} for _ in blocks(PAGE, "python")]
    for space, code in zip(spaces, blocks(PAGE, "python"), strict=True):
        exec(code, space)
    yield spaces
    for name in [name for name in sys.modules if name.partition(".")[0] == "quantized"]:
        del sys.modules[name]


def in_one_process(apps: Path, out: Path) -> bytes:
    settings = Experiment(**read(apps / "flower-app" / "experiment.toml"))
    list(Run(settings.changed(**{"engine.name": "sequential"}), out))
    return (out / "model.safetensors").read_bytes()


def test_the_five_lines_of_fedshift_are_marked() -> None:
    package = EXAMPLES / "flower-quantized" / "quantized"
    lines = [line for path in sorted(package.glob("*.py")) for line in path.read_text().splitlines()]
    assert [found[1] for line in lines if (found := ARROW.search(line))] == list("12345")
    others = [line for line in lines if not ARROW.search(line) and not line.startswith('"""')]
    assert not re.search(r"fedshift|FedShift|QuantizeMod|strategy\.rounds", "\n".join(others))


def test_the_python_on_the_page_runs(documented: list[dict[str, Any]]) -> None:
    assert len(documented) > 5
    defined("LocalGrid", documented)()


@pytest.mark.slow
def test_the_test_of_a_deployment_on_the_page_passes(
    documented: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    defined("Deployment", documented)(tmp_path)


def defined(word: str, documented: list[dict[str, Any]]) -> Callable[..., None]:
    """The test in the block that imports this name."""
    (space,) = [space for space in documented if word in space]
    (test,) = [thing for name, thing in space.items() if name.startswith("test_")]
    return test  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("page", [PAGE, EXAMPLES / "flower-app" / "README.md"], ids=["docs", "example"])
def test_the_commands_on_a_page_work_unchanged(page: Path, apps: Path, tmp_path: Path) -> None:
    """In one shell, with an empty home; only ports are changed, because they may be in use."""
    pytest.importorskip("ray")
    script = "\n".join(["set -e", *blocks(page, "bash")])
    ports = {port: str(free_port()) for port in PORTS}
    for port, free in ports.items():
        assert port in script
        script = script.replace(port, free)
    start, home = apps.parent if page == PAGE else apps / "flower-app", tmp_path / "home"
    (tmp_path / "script.sh").write_text(f"cd {start}\n{script}")
    home.mkdir()
    local = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports["39091"], "FLWR_LOCAL_CONTROL_API_PORT": str(free_port())}
    env = environment(home / ".flwr") | local | {"HOME": str(home)}
    process = Process(["bash", str(tmp_path / "script.sh")], env, tmp_path / "log", env["RAY_TMPDIR"])
    try:
        assert process.wait(1200) == 0, process.tail(40)
    finally:
        process.kill()
    saved = re.findall(r"uploads: ([\d,]+) bytes; at 32 bits ([\d,]+)", process.text())
    assert len(saved) == (2 if page == PAGE else 0)
    assert "lost its memory" not in process.text()  # the clients' errors are kept between rounds
    assert all(int(sent.replace(",", "")) < int(exact.replace(",", "")) for sent, exact in saved)
    models = [*home.rglob("model.safetensors"), *apps.rglob("model.safetensors")]
    assert len(models) == process.text().count("this run is already finished") == (1 if page == PAGE else 2)
    expected = in_one_process(apps, tmp_path / "here")
    assert all(path.read_bytes() == expected for path in models)
