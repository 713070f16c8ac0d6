"""Choice of the forward pass of a stack, and models that are refused, with alternatives, before training."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Dataset, dataset
from fedshift.core.types import Params
from fedshift.engines import Batched, StackError, Task
from fedshift.engines.gpu.nets import KERNELS, Net
from fedshift.engines.gpu.stacked import Mapped, stacked
from fedshift.experiment.build import build
from fedshift.models import CharLSTM, PaperCNN
from tests.federations import Normed, federation, points, settings, train
from tests.test_layers import MODULES, ours, package


class LinearNet(Mapped):
    """Forward pass of K linear layers as one product."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return torch.baddbmm(params["bias"][:, None], x, params["weight"].mT)


class LinearKernels:
    """Kernels of a second model, in addition to those of the library."""

    def supports(self, task: Task) -> bool:
        return type(task.model) is nn.Linear

    def stack(self, task: Task, precision: str) -> Net:
        return LinearNet(task, precision)


def test_a_model_is_trained_by_the_kernels_that_support_it() -> None:
    fed, other = federation(nn.Linear(6, 4)), federation()
    net = stacked(fed.task, "fp32", [*KERNELS, LinearKernels()])
    assert isinstance(net, LinearNet)
    assert type(stacked(other.task, "fp32", [*KERNELS, LinearKernels()])) is Mapped
    engine = Batched(fed.task)
    engine.net = net
    state, reference = train(fed, engine=engine)[0], train(fed)[0]
    for name, x in reference.out.params.items():
        torch.testing.assert_close(state.out.params[name], x, rtol=0, atol=1e-4)


def test_only_their_own_package_and_the_table_of_kernels_know_the_papers_cnn() -> None:
    engines = {name: ours(file) for name, file in MODULES.items() if name.startswith("engines.")}
    others = {name: found for name, found in engines.items() if not name.startswith("engines.gpu.paper_cnn")}
    assert not [name for name, found in others.items() if any(package(other) == "models" for other in found)]
    assert [name for name, found in others.items() if "engines.gpu.paper_cnn" in found] == ["engines.gpu.nets"]


def test_the_kernels_of_the_papers_cnn_are_for_a_gpu_alone() -> None:
    x = torch.zeros(60, 3, 8, 8, dtype=torch.uint8)
    fed = federation(PaperCNN((3, 8, 8)), dataset(x, torch.arange(60) % 10, x, torch.arange(60) % 10, mean=(0.5,) * 3))
    assert type(stacked(fed.task, "fp32")) is Mapped


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Normed(), r"norm \(BatchNorm1d\) mixes the examples"),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)), r"1 \(Dropout\) draws random numbers"),
    ],
)
def test_a_model_that_cannot_be_stacked_is_refused_with_alternatives(module: nn.Module, why: str) -> None:
    with pytest.raises(StackError, match=why) as caught:
        Batched(federation(module).task)
    for way_out in ("'sequential'", "'processes'", "GroupNorm"):
        assert way_out in str(caught.value)


class Counting(nn.Linear):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return super().forward(x)


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Counting(), "seen changes during training"),
        (Centred(6, 4), "the gradient of weight depends on other examples of the batch"),
        (nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten()), "padding_idx"),
    ],
)
def test_models_that_a_stack_would_train_wrongly_are_refused(module: nn.Module, why: str) -> None:
    with pytest.raises(StackError, match=why):
        Batched(federation(module, dataset=words() if "padding" in why else None).task)


@pytest.mark.parametrize("name", ["char-lstm", "gru"])
def test_recurrent_layers_are_refused_without_advice_about_other_layers(name: str) -> None:
    model = CharLSTM((1,), 9) if name == "char-lstm" else nn.Sequential(nn.Embedding(9, 4), nn.GRU(4, 4))
    layer = "lstm (LSTM)" if name == "char-lstm" else "1 (GRU)"
    x, y = torch.arange(60).view(60, 1) % 9, torch.arange(60) % 9
    task = Task(model, dataset(x, y, x, y), F.cross_entropy, None)
    with pytest.raises(StackError) as caught:
        Batched(task)
    assert str(caught.value) == (
        f"{type(model).__name__} cannot be trained for many clients at once: {layer} is a fused recurrent layer, which "
        "cannot be stacked; use engine.name = 'sequential' or 'processes'"
    )


def words() -> Dataset:
    x, y = torch.arange(60).view(60, 1) % 9, torch.arange(60) % 4
    return dataset(x, y, x[:20], y[:20])


def test_a_loss_that_is_not_a_mean_over_examples_is_refused() -> None:
    rare = torch.tensor([0.1, 1.0, 5.0, 20.0])
    fed = build(settings(), data=points(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets, weight=rare))
    with pytest.raises(StackError, match="must be the mean of the examples' losses"):
        Batched(fed.task)


def test_functional_dropout_is_refused_too() -> None:
    class Sly(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), training=self.training)

    with pytest.raises(StackError, match="'sequential'"):
        Batched(federation(Sly(6, 4)).task)
