"""Models with tensors that cannot all be sent: each is trained, or refused before anything is written."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fedshift import Experiment, dataset, resume, run
from fedshift.data.datasets import Dataset
from fedshift.engines import TrainingError
from fedshift.experiment.toml import SettingsError
from fedshift.runs.run import Run

ENGINES: dict[str, dict[str, Any]] = {"sequential": {}, "processes": {"workers": 1}, "batched": {"device": "cpu"}}
UPLINKS: dict[str, Any] = {  # exact and quantized weights and updates, side by side
    "bits": 32,
    "group": {
        "quantized": {"clients": [1], "bits": 4},
        "updates": {"clients": [2], "send": "updates"},
        "fed-back": {"clients": [3], "bits": 4, "send": "updates", "feedback": True},
    },
}


def points() -> Dataset:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return dataset(x[:40], y[:40], x[40:], y[40:])


def settings(engine: str = "sequential", algorithm: str = "fedavg") -> Experiment:
    return Experiment(
        data={"clients": 4, "partition": "iid"},
        algorithm={"name": algorithm},
        train={"rounds": 2, "cohort": 4, "epochs": 1, "lr": 0.1},
        uplink=UPLINKS,
        engine={"name": engine, **ENGINES[engine]},
        record={"histograms": 1},
    )


def trained(model: nn.Module, engine: str, out: Path, algorithm: str = "fedavg") -> Run:
    """A run of two rounds in which every upload could be used."""
    whole = run(settings(engine, algorithm), out, model=model, data=points())
    assert [(outcome.arrived, outcome.failed) for outcome in whole] == [(4, {}), (4, {})]
    assert (out / "model.safetensors").exists()
    return whole


def refused(model: nn.Module, engine: str, out: Path) -> str:
    """Error message for a model that is refused; nothing is written."""
    with pytest.raises(SettingsError) as problem:
        run(settings(engine), out, model=model, data=points())
    assert not out.exists()
    assert "\n" not in str(problem.value)
    return str(problem.value)


class Masked(nn.Module):
    """Two layers, and a buffer that is added to the output of the first."""

    mask: Tensor

    def __init__(self, buffer: Tensor, persistent: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 2
        self.register_buffer("mask", buffer, persistent)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.mask.numel() == 3:
            mask = self.mask.to_dense() if self.mask.is_sparse else self.mask
            h = torch.softmax(h + mask.to(torch.complex64).real.to(h.dtype), -1)
        outputs: Tensor = self.second(h)
        return outputs


INFINITE = torch.tensor([0.0, 0.0, -math.inf])
BUFFERS = {
    "minus infinity": INFINITE,
    "largest": torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min]),
    "expanded": torch.tensor(-math.inf).expand(5, 5),
    "empty": torch.zeros(0, 3),
    "float8": torch.tensor([0.0, 0.0, -8.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([0.0, 0.0, -8.0], dtype=torch.complex64),
    "uint16": torch.tensor([0, 0, 8], dtype=torch.uint16),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_cannot_be_averaged_is_unchanged(name: str, engine: str, tmp_path: Path) -> None:
    model = Masked(BUFFERS[name])
    whole = trained(model, engine, tmp_path / "run")
    assert "mask" not in whole.params
    kept = whole.model.get_buffer("mask")
    assert kept.dtype == BUFFERS[name].dtype
    assert kept.to(torch.complex64).tolist() == BUFFERS[name].to(torch.complex64).tolist()
    assert not torch.equal(whole.model.get_parameter("second.weight"), model.second.weight)


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_sparse_buffer_in_the_state_is_refused(engine: str, tmp_path: Path) -> None:
    mask = torch.tensor([0.0, 0.0, -8.0]).to_sparse()
    message = refused(Masked(mask), engine, tmp_path / "run")
    assert message == (
        "model: mask: has layout torch.sparse_coo, which model.safetensors cannot store; "
        "make it dense and of another dtype, or a buffer with persistent=False"
    )
    trained(Masked(mask, persistent=False), engine, tmp_path / "run")


def test_tensors_that_cannot_be_stored_are_refused_before_training(tmp_path: Path) -> None:
    message = refused(Masked(torch.zeros(3, dtype=torch.complex128)), "sequential", tmp_path / "run")
    assert "mask: has dtype torch.complex128, which model.safetensors cannot store" in message


class Seen(Masked):
    """Stores the minimum of its inputs, as an observer of ranges does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mask.copy_(torch.minimum(self.mask, x.detach().min()))
        outputs: Tensor = self.second(self.first(x))
        return outputs


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unsent_buffer_must_not_change_in_training(engine: str, tmp_path: Path) -> None:
    message = refused(Seen(torch.tensor(math.inf)), engine, tmp_path / "run")
    why = "contains NaN, infinity or a number beyond 1e+30"
    assert message == f"model: mask: {why}, so it cannot be sent, and training must not change it"
    if engine != "batched":  # a model with a changing buffer cannot be stacked
        whole = trained(Seen(torch.tensor(1e6)), engine, tmp_path / "run")
        assert float(whole.params["mask"]) < 0


class Late(Masked):
    """Changes its buffer only after some steps, when the trial is over."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + self.training
        if self.steps > 3:
            self.mask.fill_(0.0)
        outputs: Tensor = super().forward(x)
        return outputs


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_change_of_an_unsent_buffer_is_detected_in_any_round(engine: str) -> None:
    begun = run(settings(engine), model=Late(INFINITE), data=points())
    with pytest.raises(TrainingError, match=r"round 1, client \d: .*mask: contains .* training must not change it"):
        list(begun)


class Idle(Masked):
    """Has a parameter without elements."""

    def __init__(self, *shape: int) -> None:
        super().__init__(torch.zeros(3))
        self.nothing = nn.Parameter(torch.zeros(*shape))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = super().forward(x) + self.nothing.sum()
        return outputs


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_parameter_without_elements_is_skipped(
    shape: tuple[int, ...], engine: str, algorithm: str, tmp_path: Path
) -> None:
    whole = trained(Idle(*shape), engine, tmp_path / "run", algorithm)
    assert "nothing" not in whole.params
    assert whole.model.get_parameter("nothing").shape == shape


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_models_of_other_precisions_train(dtype: torch.dtype, engine: str, algorithm: str, tmp_path: Path) -> None:
    model = Masked(INFINITE).to(dtype)
    whole = trained(model, engine, tmp_path / "run", algorithm)
    assert {x.dtype for x in whole.model.state_dict().values()} == {dtype}
    assert all(x.isfinite().all() for x in whole.params.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_precisions_differ_only_by_rounding(engine: str) -> None:
    exact = settings(engine).changed(uplink={"bits": 32}, shift={"on": False})
    found = {}
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        whole = run(exact, model=Masked(INFINITE).to(dtype), data=points())
        list(whole)
        found[dtype] = torch.cat([x.double().flatten() for x in whole.params.values()])
    moved = torch.cat([p.detach().double().flatten() for p in Masked(INFINITE).parameters()]) - found[torch.float32]
    assert moved.abs().max() > 0.03
    for dtype, near in ((torch.float64, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        assert (found[dtype] - found[torch.float32]).abs().max() < near


def test_a_run_of_another_precision_is_resumed(tmp_path: Path) -> None:
    model = Masked(INFINITE).double()
    whole = trained(model, "sequential", tmp_path / "whole")
    stopped = run(settings(), tmp_path / "part", model=model, data=points())
    next(stopped)
    stopped.close()
    rest = resume(tmp_path / "part", model=model, data=points())
    list(rest)
    assert all(torch.equal(x, rest.params[name]) for name, x in whole.params.items())


def broken(of: str) -> nn.Module:
    model = Masked(torch.zeros(3))
    made = {
        "complex": torch.zeros(2, 3, dtype=torch.complex64),
        "float8": torch.zeros(2, 3).to(torch.float8_e4m3fn),
        "infinite": torch.full((2, 3), math.inf),
        "large": torch.full((2, 3), 3.4e38),
    }
    model.second.weight = nn.Parameter(made[of])
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("of", "why"),
    [
        ("complex", "has dtype torch.complex64"),
        ("float8", "has dtype torch.float8_e4m3fn"),
        ("infinite", "contains NaN, infinity or a number beyond 1e+30"),
        ("large", "contains NaN, infinity or a number beyond 1e+30"),
    ],
)
def test_a_parameter_that_cannot_be_trained_is_refused(of: str, why: str, engine: str, tmp_path: Path) -> None:
    message = refused(broken(of), engine, tmp_path / "run")
    assert message == f"model: second.weight: {why}; such a parameter cannot be trained"


def test_a_lazy_model_is_refused(tmp_path: Path) -> None:
    message = refused(nn.Sequential(nn.LazyLinear(2)), "sequential", tmp_path / "run")
    assert message == "model: 0.weight: has no shape yet; call the lazy model on one batch before training"


def test_a_model_that_cannot_be_stacked_leaves_no_folder(tmp_path: Path) -> None:
    message = refused(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), "batched", tmp_path / "run")
    assert message.startswith(
        "engine.name = 'batched': Sequential cannot be trained for many clients at once: 1 (Batch"
    )


def computed(by: str) -> nn.Module:
    """Two layers, where the first stores a weight that it computes from its parameters."""
    first = nn.Linear(4, 3)
    if by == "weight_norm":
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(first)
    else:
        prune.l1_unstructured(first, "weight", 0.5)  # type: ignore[no-untyped-call]
    return nn.Sequential(first, nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("by", ["weight_norm", "pruning"])
def test_a_model_that_stores_a_computed_weight_is_trained_and_copied(by: str, engine: str, tmp_path: Path) -> None:
    model = computed(by)
    copied = trained(model, engine, tmp_path / "run").model
    x = points().test_x
    assert copied.state_dict().keys() == model.state_dict().keys()
    assert not torch.equal(copied(x), model(x))
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied(x), model(x))


class Watched(Masked):
    """Stores the outputs of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = super().forward(x)
        self.outputs, self.history = outputs, [outputs]
        return outputs


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_stores_its_outputs_is_trained_and_copied(engine: str, tmp_path: Path) -> None:
    whole = trained(Watched(torch.zeros(3)), engine, tmp_path / "run")
    assert all(torch.equal(x, whole.params[name]) for name, x in whole.model.state_dict().items())


def test_a_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    model = Masked(torch.zeros(3))
    model.lock = threading.Lock()  # type: ignore[assignment]
    message = refused(model, "sequential", tmp_path / "run")
    assert message.startswith("model: Masked cannot be copied: TypeError: cannot pickle '_thread.lock' object")
