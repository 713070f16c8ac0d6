"""Models by name: their sizes, the examples that they accept, and what they compute."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import Codec, Dataset, Range, Step, dataset, pack, unpack
from fedshift.algorithms.centring import wide
from fedshift.algorithms.weights import filters, likely, likely_filters, weights
from fedshift.experiment.build import build
from fedshift.experiment.toml import SettingsError
from fedshift.models import MODELS, CharTransformer
from tests.federations import points, settings

SIZES: dict[str, tuple[tuple[int, ...], int, int]] = {  # shape of an example, classes, parameters
    "mlp": ((64,), 10, 9_610),
    "logistic": ((60,), 10, 610),
    "paper-cnn": ((3, 32, 32), 10, 2_155_872),
    "small-paper-cnn": ((1, 28, 28), 10, 12_024),
    "cnn": ((1, 28, 28), 10, 454_922),
    "resnet8": ((3, 32, 32), 10, 78_042),
    "resnet18": ((3, 32, 32), 10, 11_173_962),
    "char-lstm": ((80,), 80, 133_520),
    "char-transformer": ((80,), 80, 175_120),
}


def examples(name: str, n: int = 2) -> Tensor:
    """Examples that fit a model."""
    shape, classes, _ = SIZES[name]
    g = torch.Generator().manual_seed(0)
    return torch.randint(classes, (n, *shape), generator=g) if "char" in name else torch.randn(n, *shape, generator=g)


def made(name: str, **args: Any) -> nn.Module:
    """Model for its usual examples, with the same weights in every call."""
    shape, classes, _ = SIZES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name](shape=shape, classes=classes, **args)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_documented_number_of_parameters_and_one_logit_per_class(name: str) -> None:
    _, classes, parameters = SIZES[name]
    model = made(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in MODELS[name]().parameters()) == parameters
    assert model(examples(name)).shape == (2, classes)
    if name != "mlp":
        assert f"{parameters:,} parameters" in (MODELS[name].__doc__ or "")


def test_the_papers_cnn_has_the_papers_tensors() -> None:
    shapes = [tuple(p.shape) for p in made("paper-cnn").parameters()]
    assert shapes == [(32, 3, 5, 5), (64, 32, 5, 5), (512, 4096), (10, 512)]


def test_a_hidden_layer_of_512_gives_the_cnn_of_fedavg() -> None:
    assert sum(p.numel() for p in made("cnn", hidden=512).parameters()) == 1_663_370


@pytest.mark.parametrize("name", ["cnn", "resnet8", "resnet18"])
def test_image_models_accept_other_sizes_channels_and_classes(name: str) -> None:
    for shape in ((1, 8, 8), (3, 9, 13), (4, 28, 28)):
        assert MODELS[name](shape, 7)(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("cnn", {"shape": (64,)}, r"CNN\(shape=\(64,\)\): needs images"),
        ("cnn", {"shape": (1, 3, 8)}, "of 4x4 or more"),
        ("resnet8", {"shape": (64,)}, r"ResNet\(shape=\(64,\)\): needs images"),
        ("resnet8", {"groups": 3}, r"ResNet\(groups=3\): groups must divide the widths 16, 32, 64"),
        ("char-lstm", {"shape": (3, 32, 32)}, r"CharLSTM\(shape=\(3, 32, 32\)\): needs windows of characters"),
        ("char-lstm", {"positions": 81}, r"CharLSTM\(positions=81\): must be between 1 and 80, the length of a window"),
        ("char-transformer", {"positions": 0}, r"CharTransformer\(positions=0\): must be between 1 and 80"),
        ("char-transformer", {"shape": (8, 8)}, "needs windows of characters"),
        ("char-transformer", {"heads": 3}, r"CharTransformer\(width=80, layers=2, heads=3\): .* heads must divide"),
    ],
)
def test_examples_and_arguments_that_do_not_fit_are_refused(name: str, args: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        MODELS[name](**args)


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_residual_networks_have_no_batch_statistics_and_start_as_their_shortcuts(name: str) -> None:
    model = made(name)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {norm.num_groups for norm in norms} == {2}
    assert not list(model.buffers())
    x = torch.randn(3, 16 if name == "resnet8" else 64, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.get_submodule("blocks.0")(x), F.relu(x))


@pytest.mark.parametrize("name", ["char-lstm", "char-transformer"])
def test_text_models_see_the_whole_window_and_each_example_alone(name: str) -> None:
    model, x = made(name), examples(name, 3)
    logits = model(x)
    torch.testing.assert_close(model(x[1:2]), logits[1:2])
    for position in (0, 79):
        other = x.clone()
        other[0, position] = (other[0, position] + 1) % 80
        assert not torch.equal(model(other)[0], logits[0])
        torch.testing.assert_close(model(other)[1:], logits[1:])


@pytest.mark.parametrize("name", ["char-lstm", "char-transformer"])
def test_a_model_of_several_positions_predicts_the_next_character_at_each(name: str) -> None:
    """The logits of a position are those of the last one of a window that ends there."""
    last, every, x = made(name), made(name, positions=80), examples(name, 3)
    every.load_state_dict(last.state_dict())
    logits = every(x)
    assert logits.shape == (3, 80, 80)
    for position in (9, 79):
        torch.testing.assert_close(logits[:, :, position], last(x[:, : position + 1]))


def test_the_transformer_is_causal_and_equals_fused_attention() -> None:
    """Positions of all layers but the last do not depend on later characters."""
    model, x = made("char-transformer"), examples("char-transformer", 2)
    assert isinstance(model, CharTransformer)
    layer = model.layers[0]
    y = model.embed(x) + model.positions
    other = y.clone()
    other[:, 50:] += 1
    before, after = layer(y, 80), layer(other, 80)
    torch.testing.assert_close(after[:, :50], before[:, :50], rtol=0, atol=1e-6)
    torch.testing.assert_close(layer(y, 1)[:, 0], before[:, -1])
    attention: Any = layer.attention
    q, k, v = (part(y).view(2, 80, 4, 20).transpose(1, 2) for part in (attention.query, attention.key, attention.value))
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 80, 80)
    torch.testing.assert_close(attention(y, 80), attention.out(fused))


@pytest.mark.parametrize("name", [name for name in MODELS if "paper" not in name])
def test_models_start_near_the_loss_of_a_guess(name: str) -> None:
    """Larger logits make clients with few labels diverge in the first round."""
    _, classes, _ = SIZES[name]
    x = examples(name, 8)
    with torch.no_grad():
        loss = F.cross_entropy(made(name)(x), torch.arange(8) % classes)
    assert float(loss) == pytest.approx(math.log(classes), abs=0.35)


@pytest.mark.parametrize("name", MODELS)
def test_models_learn_a_batch_with_plain_sgd(name: str) -> None:
    model, x, classes = made(name), examples(name, 8), SIZES[name][1]
    if name == "resnet18":
        x = x[..., :8, :8]
    y, rate = torch.arange(8) % classes, 0.02 if "paper" in name else 0.1
    losses: list[float] = []
    while not losses or losses[-1] > 0.8 * losses[0]:
        loss = F.cross_entropy(model(x), y)
        losses.append(float(loss.detach()))
        assert len(losses) < 40
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data.sub_(g, alpha=rate)


def test_filters_are_those_of_products_with_many_inputs() -> None:
    """Left out: scales of norms, embeddings, positions, biases, and filters with fewer than 32 inputs."""
    chosen = {name: list(wide(model.state_dict(), filters(model))) for name in MODELS if (model := made(name))}
    inner = [f"blocks.{block}.conv{conv}.weight" for block in (0, 1, 2) for conv in (1, 2)]
    layer = ("attention.query", "attention.key", "attention.value", "attention.out", "fc1", "fc2")
    assert chosen["logistic"] == ["fc.weight"]
    assert chosen["cnn"] == ["conv2.weight", "fc1.weight", "fc2.weight"]  # 5x5 on one channel: 25 inputs
    assert chosen["resnet8"] == [*inner, "blocks.2.shortcut.conv.weight", "fc.weight"]  # 27 and 16 inputs elsewhere
    assert chosen["char-lstm"] == ["lstm.weight_hh_l0", "lstm.weight_ih_l1", "lstm.weight_hh_l1", "fc.weight"]
    assert chosen["char-transformer"] == [f"layers.{n}.{part}.weight" for n in (0, 1) for part in layer] + ["fc.weight"]
    shapes = {name: p.shape for name, p in made("char-lstm").named_parameters()}
    assert shapes["lstm.weight_hh_l0"] == (400, 100)  # one filter per gate and unit


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_alone_tell_the_same_weights_and_filters(name: str) -> None:
    """As on Flower, where the server has no module."""
    model = made(name)
    assert likely(model.state_dict()) == weights(model)
    assert likely_filters(model.state_dict()) == filters(model)
    assert not any("norm" in weight or "positions" in weight for weight in weights(model))


@pytest.mark.parametrize("name", MODELS)
def test_lean_updates_of_a_model_are_packed_near_their_rate_and_unpacked(name: str) -> None:
    model = made(name)
    x, (_, classes, count) = examples(name), SIZES[name]
    x = x[..., :8, :8] if name == "resnet18" else x
    loss = F.cross_entropy(model(x), torch.arange(2) % classes)
    update = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
    frame = pack(Codec(Step(rate=0.8), Range(), min_axes=1), update)
    found = unpack(frame, like=update)
    assert {key: w.shape for key, w in found.items()} == {key: w.shape for key, w in update.items()}
    assert len(frame) < count * 0.8 / 8 * 1.1 + 200
    error = sum(float((found[key] - w).square().sum()) for key, w in update.items())
    assert error < sum(float(w.square().sum()) for w in update.values())


def windows(most: int, positions: int = 1, classes: int = 5) -> Dataset:
    """Windows of six characters from 0 to `most`, with `positions` targets each."""
    x, y = torch.arange(48).view(8, 6) % (most + 1), torch.arange(8 * positions).view(8, positions) % classes
    y = y[:, 0] if positions == 1 else y
    return dataset(x, y, x, y)


@pytest.mark.parametrize(
    ("name", "args", "data", "problem"),
    [
        ("mlp", {}, windows(4), "model.name = 'mlp': the examples are whole numbers, like characters; it needs images"),
        ("logistic", {}, windows(4), "model.name = 'logistic': the examples are whole numbers, like characters"),
        ("char-lstm", {}, windows(7), "found character 7; with 5 classes, characters must be 0 to 4"),
        (
            "char-transformer",
            {"classes": 7},
            windows(7),
            "found character 7; with 7 classes, characters must be 0 to 6",
        ),
        ("char-lstm", {"positions": 3}, windows(4), "model.args.positions = 3: must be 1, the number of targets"),
        ("char-lstm", {"classes": 5}, windows(4, 2), "model.args.positions = 1: must be 2, the number of targets"),
        ("char-lstm", {}, points(), "model.name = 'char-lstm': needs windows of characters, whole numbers of shape"),
    ],
)
def test_examples_that_do_not_fit_a_model_are_named(
    name: str, args: dict[str, int], data: Dataset, problem: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        build(settings(model={"name": name, "args": args}), data=data)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("args", "data"), [({}, windows(4)), ({"classes": 8}, windows(7)), ({"classes": 5, "positions": 2}, windows(4, 2))]
)
def test_a_text_model_takes_characters_below_its_vocabulary(args: dict[str, int], data: Dataset) -> None:
    experiment = settings(model={"name": "char-lstm", "args": args})
    experiment = experiment.changed(**{"data.clients": 2, "train.cohort": 2})
    assert build(experiment, data=data).task.data is data
