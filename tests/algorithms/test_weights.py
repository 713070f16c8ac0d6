"""Tensors that are shifted: weights of layers, and no others."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from fedshift.algorithms import layers, weights
from fedshift.algorithms.weights import all_names, likely
from fedshift.core.types import Params
from fedshift.models import MLP, PaperCNN


def old(norm: str) -> Callable[[nn.Module], nn.Module]:
    """The deprecated reparametrisation from before `parametrizations`."""

    def apply(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made: nn.Module = getattr(nn.utils, norm)(module)
        return made

    return apply


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)


class Vision(nn.Module):
    """Class token, positional table and output scale are parameters of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 16)), nn.Parameter(torch.randn(1, 9, 16))
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.embed, self.block = nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)
        self.register_buffer("table", torch.ones(9, 16))


class Own(nn.Module):
    """A layer of an unknown type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))


class Tall(nn.Linear):
    """A linear layer with an additional parameter."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.gain = nn.Parameter(torch.ones(4, 1))


class Adapted(nn.Module):
    """Low-rank adapters with the names that libraries use."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.ones(2, 8))})
        self.my_lora = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.decode.weight = self.embed.weight


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def pruned(module: nn.Module) -> nn.Module:
    made: nn.Module = prune.random_unstructured(module, "weight", amount=0.5)  # type: ignore[no-untyped-call]
    return made


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "linear": (lambda: nn.Linear(3, 4), ["weight"]),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), ["weight"]),
    "embedding": (lambda: nn.Embedding(9, 4), ["weight"]),
    "embedding bag": (lambda: nn.EmbeddingBag(9, 4), ["weight"]),
    "convolution": (lambda: nn.Conv3d(1, 2, 3), ["weight"]),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.ConvTranspose1d(2, 3, 3)),
        ["0.weight", "1.weight"],
    ),
    "lstm": (
        lambda: nn.LSTM(3, 4, proj_size=2, bidirectional=True),
        [f"weight_{kind}_l0{way}" for way in ("", "_reverse") for kind in ("ih", "hh", "hr")],
    ),
    "gru": (lambda: nn.GRU(3, 4, 2), [f"weight_{kind}_l{i}" for i in (0, 1) for kind in ("ih", "hh")]),
    "cells": (
        lambda: nn.Sequential(nn.LSTMCell(3, 4), nn.RNNCell(4, 4)),
        ["0.weight_ih", "0.weight_hh", "1.weight_ih", "1.weight_hh"],
    ),
    "attention": (lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True), ["in_proj_weight", "out_proj.weight"]),
    "attention of other widths": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
    "layer norm": (lambda: nn.LayerNorm([8, 8]), []),
    "rms norm": (lambda: nn.RMSNorm([4, 4]), []),
    "other norms": (
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm1d(8, affine=True)),
        [],
    ),
    "residual block": (Residual, ["conv1.weight", "conv2.weight"]),
    "vision transformer": (
        Vision,
        [
            "embed.weight",
            "block.self_attn.in_proj_weight",
            "block.self_attn.out_proj.weight",
            "block.linear1.weight",
            "block.linear2.weight",
        ],
    ),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), []),
    "old weight norm": (lambda: old("weight_norm")(nn.Linear(3, 4)), []),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), []),
    "old spectral norm": (lambda: old("spectral_norm")(nn.Linear(3, 4)), []),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), []),
    "pruned": (lambda: pruned(nn.Linear(3, 4)), []),
    "weight norm of one of several": (
        lambda: parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0"),
        ["weight_ih_l0"],
    ),
    "adapters": (Adapted, ["base.weight"]),
    "subclass": (Tall, ["weight"]),
    "unknown layer": (Own, []),
    "tied": (Tied, ["embed.weight"]),
    "frozen": (lambda: nn.Sequential(frozen(nn.Linear(3, 4)), nn.Linear(4, 5)), ["1.weight"]),
    "single value": (lambda: nn.Linear(1, 1), []),
    "the paper's": (PaperCNN, ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"]),
    "mlp": (MLP, ["fc1.weight", "fc2.weight"]),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_only_those_of_layers(name: str) -> None:
    make, expected = CASES[name]
    assert weights(make()) == expected


def test_a_shared_tensor_has_one_name_in_a_run_and_all_of_them_in_a_state() -> None:
    class Late(nn.Module):
        """Has the weight of a layer under another name, before the layer."""

        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(3, 4, bias=False)
            self.first, self.layer = layer.weight, layer

    assert (weights(Tied()), all_names(Tied())) == (["embed.weight"], ["embed.weight", "decode.weight"])
    assert (weights(Late()), all_names(Late())) == (["first"], ["first", "layer.weight"])


def parameters(module: nn.Module) -> Params:
    return {name: x.detach() for name, x in module.state_dict().items()}


NAMED = [name for name in CASES if name not in ("rms norm", "unknown layer", "tied", "frozen")]


@pytest.mark.parametrize("name", NAMED)
def test_names_and_shapes_find_the_same_weights(name: str) -> None:
    make, expected = CASES[name]
    module = nn.Module()
    module.layer = make()
    got = likely(parameters(module))
    assert got == [f"layer.{name}" for name in expected]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "encoder.layer_norm.weight",
            "encoder.LayerNorm.weight",
            "ln_1.weight",
            "bn2.weight",
            "layers.0.norm1.weight",
        ),
        *("cls_token", "token.weight", "pos_embed", "pos_embed.weight", "embeddings.position_embeddings.weight"),
        *(
            "head.scale",
            "scale.weight",
            "attn.mask",
            "norm.running_mean",
            "fc.weight_g",
            "fc.weight_v",
            "fc.weight_orig",
        ),
        *("fc.parametrizations.weight.original0", "fc.parametrizations.weight.0.base.weight"),
        *("q.lora_A.weight", "q.lora_A.default.weight", "e.lora_embedding_A.default", "block.my_lora.0.weight"),
        *("table", "w", "fc1", "bias"),
    ],
)
def test_names_of_other_tensors_are_not_weights(name: str) -> None:
    assert likely({"fc.weight": torch.ones(3, 4), name: torch.ones(5, 6)}) == ["fc.weight"]


def test_a_weight_with_one_bias_per_value_is_a_normalisation() -> None:
    params = parameters(nn.Sequential(nn.LayerNorm([8, 8]), nn.Flatten(), nn.Linear(64, 10)))
    assert likely(params) == ["2.weight"]


def test_arrays_without_names_are_classified_by_their_shapes() -> None:
    shapes = [(8, 5), (8,), (3, 1, 3, 3), (1, 1, 16), (1, 1), (7, 1), (1, 7), (0, 3)]
    params: dict[str, Tensor] = {str(i): torch.zeros(shape) for i, shape in enumerate(shapes)}
    assert likely(params | {"8": torch.zeros(3, 3, dtype=torch.int64)}) == ["0", "2"]


def test_patterns_select_tensors_by_name() -> None:
    params = {
        "norm.weight": torch.ones(2, 2),
        "fc.weight": torch.ones(2, 2),
        "mask": torch.ones(2, 2, dtype=torch.bool),
    }
    assert layers(params, ["norm*", "mask"]) == ["norm.weight"]
