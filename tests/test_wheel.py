"""The wheel, installed with its core dependencies and nothing else, does what a first run needs."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow
OPTIONAL = ["flwr", "matplotlib", "mlflow", "pytest", "sklearn", "tensorboard", "trustme", "wandb"]


def done(*command: str | Path, cwd: Path) -> str:
    """Output of a command, which must not fail; it cannot import this checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip wheel .` does, by the build backend that is installed here: there is no network."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(out)]
    built = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = out.glob("fedshift-*.whl")
    return found


def required(about: Distribution) -> list[str]:
    """Names of the packages it needs without any extra."""
    wanted = map(Requirement, about.requires or ())
    return [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def core(wheel: Path) -> set[Path]:
    """The files and folders of the wheel's core dependencies and of what they need in turn."""
    (own,) = distributions(path=[str(wheel)])
    waiting, seen, found = required(own), set[str](), set[Path]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        about = distribution(name)
        waiting += required(about)
        tops = {file.parts[0] for file in about.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {Path(str(about.locate_file(top))) for top in tops}
    return found


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and links to its core dependencies."""
    made = tmp_path_factory.mktemp("installed") / "venv"
    done(sys.executable, "-m", "venv", "--without-pip", made, cwd=made.parent)
    python = made / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    done(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=made.parent)
    place = Path(done(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=made.parent).strip())
    for path in core(wheel):
        (place / path.name).symlink_to(path)
    return made


def test_everything_in_the_package_is_in_the_wheel(wheel: Path) -> None:
    package = ROOT / "fedshift"
    here = {path.relative_to(ROOT).as_posix() for path in package.rglob("*") if path.is_file()}
    there = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fedshift/")}
    assert there == {name for name in here if "__pycache__" not in name}
    assert {"fedshift/py.typed", "fedshift/data/digits.npz"} <= there
    assert {"fedshift/report/web/page.html", "fedshift/report/web/start.js"} <= there


def test_the_wheel_alone_runs_and_reports(folder: Path, tmp_path: Path) -> None:
    python, fedshift = folder / "bin" / "python", folder / "bin" / "fedshift"
    place = Path(done(python, "-c", "import fedshift; print(fedshift.__file__)", cwd=tmp_path).strip())
    assert folder in place.parents
    absent = f"from importlib.util import find_spec; print([n for n in {OPTIONAL} if find_spec(n)])"
    assert done(python, "-c", absent, cwd=tmp_path) == "[]\n"
    done(fedshift, "run", "--preset", "smoke", "--set", "train.rounds=3", "--out", "runs/first", cwd=tmp_path)
    (tmp_path / "runs" / "first" / "report.html").unlink()
    done(fedshift, "report", "runs/first", cwd=tmp_path)
    page = (tmp_path / "runs" / "first" / "report.html").read_text(encoding="utf-8")
    assert "makeFigure" in page  # its script is in the wheel
    assert "</html>" in page
    assert done(fedshift, "plan", "--uplink", "1MB/s", "--weights", "1000", cwd=tmp_path).count("Uniform") > 3
