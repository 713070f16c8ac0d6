"""Functions of users that fail: a sentence with the setting, the type, and the line of the user's file."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import fedshift

PLAIN = """
[data]
name = "digits"
clients = 12

[train]
rounds = 1
epochs = 1
cohort = 4

[engine]
name = "sequential"
"""

EXITS = """
import sys


def ends(*args, **kwargs):
    sys.exit(0)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Current folder with settings; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.toml").write_text(PLAIN)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def started(*assignments: str) -> tuple[int, str]:
    """Exit code and error output of a run with these settings."""
    done = fedshift("run", "plain.toml", *(x for each in assignments for x in ("--set", each)), "--out", "out", "-q")
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    "key",
    [
        *("train.loss", "train.metric", "data.name", "model.name", "data.partition", "train.schedule"),
        *("train.optimizer", "algorithm.name", "uplink.codec", "uplink.policy"),
    ],
)
def test_a_function_that_ends_the_process_is_an_error(folder: Path, key: str) -> None:
    (folder / "exiting.py").write_text(EXITS)
    code, text = started(f"{key}=exiting:ends", *(["train.goal=max"] if key == "train.metric" else []))
    assert code > 0
    assert len(text.splitlines()) == 1
    assert f"SystemExit(0): it must not end the process ({folder}/exiting.py:6)" in text


def test_a_module_that_ends_the_process_is_an_error(folder: Path) -> None:
    (folder / "exiting_module.py").write_text("raise SystemExit(0)\n")
    code, text = started("model.name=exiting_module:make")
    assert code > 0
    assert text == (
        "fedshift: --set: model.name = 'exiting_module:make': SystemExit(0): it must not end the process "
        f"({folder}/exiting_module.py:1)\n"
    )


@pytest.mark.parametrize(
    "key",
    [
        *("train.loss", "data.name", "model.name", "train.optimizer", "algorithm.name"),
        *("uplink.codec", "uplink.policy"),
    ],
)
def test_a_missing_import_is_named_with_the_line_that_needs_it(folder: Path, key: str) -> None:
    (folder / "importing.py").write_text("\nimport nothere\n")
    code, text = started(f"{key}=importing:f")
    assert code == 2
    assert text == (
        f"fedshift: --set: {key} = 'importing:f': ModuleNotFoundError: No module named 'nothere' "
        f"({folder}/importing.py:2)\n"
    )


@pytest.mark.parametrize(
    "key",
    [
        *("data.name", "data.partition", "model.name", "train.optimizer", "algorithm.name"),
        *("uplink.codec", "uplink.policy"),
    ],
)
def test_a_wrong_signature_cites_no_line_of_fedshift(folder: Path, key: str) -> None:
    (folder / "signature.py").write_text("def f(a, b, c, d, e): ...\n")
    code, text = started(f"{key}=signature:f")
    assert code == 2
    assert "TypeError: f() missing" in text
    assert ".py:" not in text


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("None", "returns NoneType; must be a Partition, or a list with the indices of each client's examples"),
        ("'text'", "returns str; must be a Partition, or a list with the indices of each client's examples"),
        ("[]", "there are no clients; must be one or more"),
        ("['a', 'b']", "client 0 has str; needs a list of indices"),
        ("1 / 0", "ZeroDivisionError: division by zero ({folder}/parts.py:2)"),
        ("int('x')", "ValueError: invalid literal for int() with base 10: 'x' ({folder}/parts.py:2)"),
    ],
)
def test_a_wrong_partition_is_explained(folder: Path, result: str, problem: str) -> None:
    (folder / "parts.py").write_text(f"def f(*args):\n    return {result}\n")
    code, text = started("data.partition=parts:f")
    assert (code, text) == (2, f"fedshift: --set: data.partition = 'parts:f': {problem.format(folder=folder)}\n")


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("None", "must return one number, the mean over the batch, not NoneType"),
        ("'1'", "must return one number, the mean over the batch, not str"),
        ("(outputs.sum(1) - targets).abs()", "must return one number, the mean over the batch, not shape (64,)"),
        ("1.5", "must return a tensor with one number that depends on the outputs, not float"),
        (
            "float(outputs.detach().sum())",
            "must return a tensor with one number that depends on the outputs, not float",
        ),
        (
            "outputs.detach().sum()",
            "must return a tensor with one number that depends on the outputs, not a tensor without a gradient",
        ),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(folder: Path, result: str, problem: str) -> None:
    (folder / "losses.py").write_text(f"def f(outputs, targets):\n    return {result}\n")
    code, text = started("train.loss=losses:f")
    assert (code, text) == (2, f"fedshift: --set: train.loss = 'losses:f': a loss {problem}\n")
    assert not (folder / "out").exists()


def test_a_wrong_metric_is_named_with_its_setting(folder: Path) -> None:
    (folder / "metrics.py").write_text("def f(outputs, targets):\n    return 1.0\n")
    problem = "f: a metric must return a tensor with one number for each of 64 examples, not float"
    code, text = started("train.metric=metrics:f", "train.goal=max")
    assert (code, text) == (2, f"fedshift: --set: train.metric = 'metrics:f': {problem}\n")
    code, text = started("train.metrics={ accuracy = 'max', 'metrics:f' = 'max' }")
    assert (code, text) == (2, f"fedshift: --set: train.metrics = 'metrics:f': {problem}\n")


def test_outputs_that_are_no_tensor_are_for_users_functions_only(folder: Path) -> None:
    (folder / "named_outputs.py").write_text("""
import torch


class Net(torch.nn.Linear):
    def forward(self, x):
        return {"logits": super().forward(x)}


def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs["logits"], targets)


def right(outputs, targets):
    return outputs["logits"].argmax(1) == targets
""")
    model = "model={ name = 'named_outputs:Net', args = { in_features = 64, out_features = 10 } }"
    code, text = started(model)
    assert (code, text) == (
        2,
        "fedshift: plain.toml: Net on examples of shape (64,) with 10 classes: returns dict; it must return a tensor "
        "with one row of outputs per example, unless train.loss and all metrics are your own functions\n",
    )
    code, text = started(model, "train.loss=named_outputs:loss", "train.metric=named_outputs:right", "train.goal=max")
    assert not code, text


def test_an_optimizer_must_change_a_parameter_in_its_first_steps(folder: Path) -> None:
    (folder / "optimizers.py").write_text("""
import torch


class Still(torch.optim.SGD):
    def step(self):
        pass


class Fourth(torch.optim.SGD):
    calls = 0

    def step(self):
        self.calls += 1
        if self.calls % 4 == 0:
            super().step()


def last_only(parameters, lr):
    return torch.optim.SGD(parameters[-1:], lr)
""")
    code, text = started("train.optimizer=optimizers:Still")
    assert (code, text) == (
        2,
        "fedshift: --set: train.optimizer = 'optimizers:Still': it changed no parameter in 8 steps; step() must change "
        "the parameters in place\n",
    )
    for name in ("Fourth", "last_only"):
        assert started(f"train.optimizer=optimizers:{name}", f"name={name}")[0] == 0
        (folder / "out").rename(folder / name)
