"""Completion, in a real shell."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from fedshift.cli import main as cli
from fedshift.cli import paper as paper
from fedshift.cli import terminal
from fedshift.data.catalog import CATALOG
from fedshift.experiment import frontier
from fedshift.experiment.settings import Experiment
from fedshift.models import MODELS
from fedshift.paper.experiments import ALGORITHMS
from fedshift.paper.published import BITS
from fedshift.report import style
from tests.runs import COMMAND

ENVIRONMENT = os.environ | {"PATH": f"{Path(COMMAND).parent}:{os.environ['PATH']}"}
# what readline does when somebody presses TAB behind these words
TAB = """
eval "$(fedshift --show-completion)"
read -r _ _ _ _ function _ <<< "$(complete -p fedshift)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
"$function" fedshift "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def tab(*words: str) -> list[str]:
    """Completions of bash for the last word."""
    command = ["bash", "--norc", "-c", TAB, "bash", "fedshift", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ru"], ["run"]),
        (["me"], ["methods"]),
        (
            ["run", "--preset", ""],
            ["demo", "smoke", "paper", "fashion", "synthetic", "shakespeare", "transformer", "resnet"],
        ),
        (["run", "--engine", "s"], ["sequential"]),
        (["sweep", "grid.toml", "--track", ""], ["tensorboard", "mlflow", "wandb"]),
        (["resume", "runs/grid", "--track", "w"], ["wandb"]),
        (["frontier", "--task", ""], ["digits", "cifar10", "fashion", "shakespeare", "transformer", "synthetic"]),
        (["data", ""], ["cifar10", "cifar100", "mnist", "fashion-mnist", "shakespeare"]),
        (["bench", ""], ["codecs", "engines", "rates", "flower", "large", "peers"]),
        (["paper", "table1", "--algorithms", "fedp"], ["fedpaq", "fedprox"]),
        (["plan", "--model", "res"], ["resnet8", "resnet18"]),
        (["paper", "figures", "7", "--format", "p"], ["png", "pdf"]),
        (["run", "--mi"], ["--minutes"]),
    ],
    ids=lambda part: " ".join(part),
)
def test_bash_offers(words: list[str], offered: list[str]) -> None:
    assert tab(*words) == offered


def test_completions_are_the_known_names() -> None:
    assert get_args(Experiment().engine.__class__.model_fields["name"].annotation) == cli.ENGINES
    assert set(cli.DATA) == set(CATALOG)
    assert tuple(frontier.TASKS) == cli.TASKS
    assert set(paper.MODELS) == set(MODELS)
    assert tuple(ALGORITHMS) == paper.ALGORITHMS
    assert tuple(map(str, BITS)) == paper.BITS
    assert terminal.FORMATS == style.FORMATS


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "fedshift run --preset "}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "fedshift run --preset ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_other_shells_have_a_script_and_get_answers(shell: str, asked: dict[str, str]) -> None:
    def answer(**variables: str) -> str:
        environment = ENVIRONMENT | variables
        return subprocess.run([COMMAND], capture_output=True, text=True, env=environment).stdout

    assert "fedshift" in answer(_FEDSHIFT_COMPLETE=f"source_{shell}")
    assert all(name in answer(_FEDSHIFT_COMPLETE=f"complete_{shell}", **asked) for name in ("demo", "smoke", "paper"))


def test_completion_imports_no_heavy_package() -> None:
    variables = {"COMP_WORDS": "fedshift run --engine ", "COMP_CWORD": "3", "_FEDSHIFT_COMPLETE": "complete_bash"}
    program = [sys.executable, "-X", "importtime", COMMAND]
    done = subprocess.run(program, capture_output=True, text=True, env=ENVIRONMENT | variables)
    assert "sequential" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fedshift.cli" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "mlflow", "wandb", "tensorboard"}
