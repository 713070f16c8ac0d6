"""Filter centring: only the mean of the weights of each output unit is subtracted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift import centre, centred, fedavg, scaffold, shift
from fedshift.algorithms import Chain, Filters, Shift, filters
from fedshift.algorithms.centring import wide
from fedshift.algorithms.weights import FAN_IN, likely_filters
from fedshift.core.types import Broadcast, Params, Round
from fedshift.experiment.build import complete_algorithm
from fedshift.experiment.settings import Experiment
from fedshift.models import MLP, PaperCNN
from tests.algorithms.test_weights import CASES, Adapted, Tied, Vision, parameters


def seeded(make: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def a_round(number: int = 1, share: float = 0.0) -> Round:
    return Round(number, 1, 1, Broadcast({}, {}), {}, share)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


# a layer with one weight, and the shape of one example
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "one unit": (lambda: nn.Linear(5, 1), (5,)),
    "convolution in 1 dimension": (lambda: nn.Conv1d(4, 6, 3), (4, 7)),
    "convolution": (lambda: nn.Conv2d(2, 3, (2, 3)), (2, 4, 5)),
    "convolution in 3 dimensions": (lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 3)),
    "grouped convolution": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 3, 3)),
    "depthwise convolution": (lambda: nn.Conv1d(4, 4, 3, groups=4), (4, 5)),
    "transposed in 1 dimension": (lambda: nn.ConvTranspose1d(4, 6, 3), (4, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 5, 2), (3, 4, 4)),
    "transposed in 3 dimensions": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 3, 3, 3)),
    "grouped transposed": (lambda: nn.ConvTranspose2d(6, 4, 3, groups=2), (6, 4, 4)),
    "grouped transposed in 1 dimension": (lambda: nn.ConvTranspose1d(6, 9, 2, groups=3), (6, 4)),
}


def units(layer: Any, x: Tensor) -> list[Tensor]:
    """Weights of each output unit: those that its output depends on."""
    y = layer(x[None])
    return [torch.autograd.grad(y[:, u].sum(), layer.weight, retain_graph=True)[0] != 0 for u in range(y.shape[1])]


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("name", LAYERS)
def test_a_filter_is_all_that_one_output_unit_multiplies_its_inputs_with(name: str, share: float) -> None:
    make, shape = LAYERS[name]
    layer = seeded(make)
    w, at, used = layer.weight.detach(), filters(layer)["weight"], units(layer, randn(*shape).abs() + 0.1)
    assert torch.equal(sum(used), torch.ones_like(w, dtype=torch.int64))  # type: ignore[arg-type]
    assert torch.allclose(at.means(w), torch.stack([w[mask].double().mean() for mask in used]), atol=1e-9)
    expected = w.clone()
    for mask in used:
        expected[mask] -= share * w[mask].mean()
    assert torch.allclose(at.centred(w, share), expected, atol=1e-7)
    assert at.fan_in(w.shape) == int(used[0].sum())


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_centred_filters_maps_a_constant_input_to_its_bias(name: str) -> None:
    make, shape = LAYERS[name]
    layer = seeded(make).double()
    layer.load_state_dict(centre(parameters(layer), filters=filters(layer)))
    y = layer(torch.full((1, *shape), 3.0, dtype=torch.float64))
    if "transposed" in name:  # units at the border do not see the whole kernel
        for dim, size in enumerate(layer.kernel_size, 2):
            y = y.narrow(dim, size - 1, y.shape[dim] - 2 * (size - 1))
    assert y.numel() > 0
    assert torch.allclose(y, layer.bias.view(1, -1, *[1] * (y.ndim - 2)).expand_as(y), atol=1e-12)


def test_a_centred_bilinear_form_maps_constants_to_its_bias() -> None:
    layer = seeded(lambda: nn.Bilinear(4, 5, 3))
    layer.load_state_dict(centre(parameters(layer), filters=filters(layer)))
    y = layer(torch.full((1, 4), 2.0), torch.full((1, 5), -3.0))
    assert torch.allclose(y, layer.bias[None], atol=1e-5)


def test_each_centred_gate_of_a_recurrent_layer_ignores_constant_input_and_state() -> None:
    cell = seeded(lambda: nn.LSTMCell(5, 4, bias=False))
    cell.load_state_dict(centre(parameters(cell), filters=filters(cell)))
    c = randn(1, 4)
    h, new = cell(torch.full((1, 5), 2.0), (torch.full((1, 4), 0.5), c))  # all gates are 1/2, and the cell input is 0
    assert torch.allclose(new, c / 2, atol=1e-6)
    assert torch.allclose(h, torch.tanh(c / 2) / 2, atol=1e-6)

    gru = seeded(lambda: nn.GRU(5, 4, num_layers=2, bidirectional=True, bias=False))
    assert len(filters(gru)) == 8
    gru.load_state_dict(centre(parameters(gru), filters=filters(gru)))
    y, _ = gru(torch.full((3, 1, 5), 2.0))
    assert torch.allclose(y, torch.zeros_like(y), atol=1e-6)


def test_the_projection_of_an_lstm_is_centred_by_its_outputs() -> None:
    lstm = seeded(lambda: nn.LSTM(5, 4, proj_size=2, bias=False)).double()
    assert filters(lstm).keys() == {"weight_ih_l0", "weight_hh_l0", "weight_hr_l0"}
    lstm.load_state_dict(centre(parameters(lstm), filters=filters(lstm)))
    h, c = torch.zeros(1, 1, 2).double(), torch.full((1, 1, 4), 3.0).double()
    y, _ = lstm(torch.ones(1, 1, 5).double(), (h, c))  # all units are alike, so the projection sees a constant
    assert torch.allclose(y, torch.zeros_like(y), atol=1e-12)


@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 10}])
def test_attention_on_constant_queries_keys_and_values_gives_its_bias(widths: dict[str, int]) -> None:
    layer = seeded(lambda: nn.MultiheadAttention(8, 2, **widths))
    nn.init.constant_(layer.out_proj.bias, 0.7)
    layer.load_state_dict(centre(parameters(layer), filters=filters(layer)))
    q, k, v = (torch.full((3, 1, n), 2.0) for n in (8, widths.get("kdim", 8), widths.get("vdim", 8)))
    y, _ = layer(q, k, v)
    assert torch.allclose(y, torch.full_like(y, 0.7), atol=1e-6)


class Net(nn.Module):
    """Layers with many inputs, and other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.ones(1, 1, 64)), nn.Parameter(torch.ones(9, 64))
        self.embed, self.plane, self.fc = nn.Embedding(40, 64), nn.LayerNorm([8, 8]), nn.Linear(64, 3)
        self.conv, self.bn, self.lora_A = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Linear(64, 2)
        self.count = nn.Parameter(torch.ones(40, 40, dtype=torch.int64), requires_grad=False)


@pytest.mark.parametrize("known", [True, False])
def test_tensors_other_than_weights_of_layers_are_unchanged(known: bool) -> None:
    net = Net()
    rule = Shift("filter", filters=filters(net) if known else None)
    before = parameters(net)
    out, _ = rule.apply(Broadcast(before, {}), {}, a_round())
    assert [name for name, w in out.params.items() if w is not before[name]] == ["fc.weight", "conv.weight"]
    assert list(out.params) == list(before)


def test_a_second_centring_changes_nothing_and_shares_multiply() -> None:
    w = {"weight": randn(6, 40).double()}
    once = centre(w)
    assert torch.allclose(centre(once)["weight"], once["weight"], atol=1e-15)
    half = centre(centre(w, 0.5), 0.5)["weight"]  # (1 - 1/2)^2 of the mean is left
    assert torch.allclose(half, centre(w, 0.75)["weight"], atol=1e-15)
    assert torch.allclose(half - half.mean(1, keepdim=True), once["weight"], atol=1e-15)
    assert centre(w, 0.0)["weight"] is w["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_of_any_precision_keep_it_and_are_rounded_once(dtype: torch.dtype) -> None:
    w = (randn(4, 64) + 0.5).to(dtype)
    got = Filters().centred(w, 1.0)
    exact = w.double() - w.double().mean(1, keepdim=True)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("at", [Filters(), Filters(1), Filters(1, 2), Filters(-1), Filters(-2)])
def test_the_layout_in_memory_does_not_matter(at: Filters) -> None:
    w = randn(8, 6, 3, 3)
    expected, means = at.centred(w, 0.5), at.means(w)
    turned = w.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    spread = torch.zeros(16, 6, 6, 3)[::2, :, ::2]
    spread.copy_(w)
    for same in (w.to(memory_format=torch.channels_last), turned, spread):
        assert same.stride() != w.stride()
        assert torch.allclose(at.centred(same, 0.5), expected, atol=1e-7)
        assert torch.allclose(at.means(same), means, atol=1e-12)


def test_filters_of_few_inputs_are_not_centred_unless_they_are_named() -> None:
    params = {"few.weight": randn(4, FAN_IN - 1), "many.weight": randn(4, FAN_IN), "kernel.weight": randn(8, 1, 3, 3)}
    assert Shift("filter").chosen(params) == ["many.weight"]
    assert list(wide(params, likely_filters(params))) == ["many.weight"]
    assert Shift("filter", tensors=("few*", "kernel*")).chosen(params) == ["few.weight", "kernel.weight"]
    after = Shift("filter", tensors=("few*",)).shifted(params, a_round())
    assert torch.allclose(after["few.weight"].mean(1), torch.zeros(4), atol=1e-7)
    assert after["many.weight"] is params["many.weight"]


def test_filters_of_one_value_are_never_centred_even_if_they_are_named() -> None:
    """A bias, a scalar, a kernel of one weight and an empty tensor would become zero, or cannot have a mean."""
    params: Params = {
        "bias": torch.ones(5),
        "heat": torch.tensor(2.0),
        "pointwise": torch.ones(4, 1, 1, 1),
        "empty": torch.ones(4, 0),
        "none": torch.ones(0, 4),
        "count": torch.ones(4, 40, dtype=torch.int64),
        "fc": randn(2, 3),
    }
    rule = Shift("filter", tensors=("*",))
    assert rule.chosen(params) == ["fc"]
    after = rule.shifted(params, a_round())
    assert [name for name, w in after.items() if w is not params[name]] == ["fc"]


@pytest.mark.parametrize("shape", [(5,), (), (4, 0), (0, 4), (0,)])
def test_means_of_tensors_without_filters_can_be_recorded(shape: tuple[int, ...]) -> None:
    w = torch.ones(shape)
    assert Filters().means(w).shape == (shape[0] if shape else 1,)
    assert Filters().centred(w, 0.5).shape == w.shape


def late_tied() -> nn.Module:
    """The output layer comes first and shares its weight with the embedding."""
    net = nn.ModuleDict({"decode": nn.Linear(64, 40, bias=False), "embed": nn.Embedding(40, 64)})
    net["embed"].weight = net["decode"].weight
    return net


def tied_autoencoder() -> nn.Module:
    """Rows of one layer's weight are columns of the other's."""
    net = nn.ModuleDict({"down": nn.Conv2d(4, 8, 3), "up": nn.ConvTranspose2d(8, 4, 3)})
    net["up"].weight = net["down"].weight
    return net


def test_a_weight_that_layers_use_in_different_ways_is_not_centred_unless_it_is_named() -> None:
    for make in (Tied, late_tied, tied_autoencoder):
        net = make()
        assert filters(net) == {}
        assert Shift("filter", filters=filters(net)).chosen(parameters(net)) == []
    assert likely_filters(parameters(late_tied())) == {}  # a state has the same values under both names
    named = Shift("filter", filters={}, tensors=("decode.weight",))
    assert torch.allclose(
        named.shifted(parameters(late_tied()), a_round())["decode.weight"].mean(1), torch.zeros(40), atol=1e-7
    )
    twice = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    twice[1].weight = twice[0].weight
    assert filters(twice) == {"0.weight": Filters(), "1.weight": Filters()}


def test_frozen_reparametrised_and_low_rank_weights_have_no_filters() -> None:
    for name in ("weight norm", "old weight norm", "spectral norm", "pruned", "orthogonal", "embedding", "layer norm"):
        assert filters(CASES[name][0]()) == {}, name
    assert list(filters(CASES["frozen"][0]())) == ["1.weight"]
    assert list(filters(Adapted())) == ["base.weight"]


# Without a module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "paper": PaperCNN,
    "grouped": lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8)),
    "decoder": lambda: nn.Sequential(nn.ConvTranspose2d(6, 4, 3, groups=2), nn.ConvTranspose1d(4, 5, 3)),
    "decoder of an image": lambda: nn.Sequential(nn.Linear(5, 64), nn.ConvTranspose2d(8, 3, 3)),
    "recurrent": lambda: nn.ModuleDict({"rnn": nn.LSTM(5, 4, 2, bidirectional=True), "head": nn.Linear(8, 3)}),
    "projected": lambda: nn.ModuleDict({"rnn": nn.LSTM(5, 4, proj_size=2), "cell": nn.GRUCell(3, 4)}),
    "attention": lambda: nn.ModuleDict({"mix": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 3)}),
    "other widths": lambda: nn.ModuleDict({"mix": nn.MultiheadAttention(8, 2, kdim=4, vdim=6)}),
    "transformer": lambda: nn.ModuleDict({"block": nn.TransformerEncoderLayer(16, 2, 32), "head": nn.Linear(16, 10)}),
    "bilinear": lambda: nn.ModuleDict({"pair": nn.Bilinear(3, 4, 5)}),
}


@pytest.mark.parametrize("name", MODULES)
def test_names_and_shapes_find_the_same_filters_as_the_module(name: str) -> None:
    module = MODULES[name]()
    assert likely_filters(parameters(module)) == filters(module)


@pytest.mark.parametrize("name", MODULES)
def test_shapes_of_a_list_of_arrays_find_the_same_filters(name: str) -> None:
    module = MODULES[name]()
    state, known = parameters(module), filters(module)
    places = {name: str(i) for i, name in enumerate(state)}
    found = likely_filters({places[name]: w for name, w in state.items()})
    assert found == {places[name]: at for name, at in known.items()}


def test_an_embedding_and_a_patch_projection_are_recognized_by_name() -> None:
    assert "embed.weight" not in likely_filters(parameters(Vision()))
    assert likely_filters({"wte.weight": randn(40, 64), "emb.embeddings.weight": randn(40, 64)}) == {}


KERAS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Filters]]] = {
    "dense": (
        {"a/kernel": (8, 5), "a/bias": (5,), "b/kernel": (5, 5)},
        {"a/kernel": Filters(-1), "b/kernel": Filters(-1)},
    ),
    "convolution": ({"c/kernel": (3, 3, 4, 8), "c/bias": (8,)}, {"c/kernel": Filters(-1)}),
    "transposed": ({"c/kernel": (3, 3, 4, 8), "c/bias": (4,)}, {"c/kernel": Filters(-2)}),
    "lstm": (
        {"l/kernel": (6, 16), "l/recurrent_kernel": (4, 16), "l/bias": (16,)},
        {"l/kernel": Filters(-1), "l/recurrent_kernel": Filters(-1)},
    ),
    "normalisation": ({"n/gamma": (8, 8), "n/beta": (8, 8), "n/moving_mean": (8,)}, {}),
    "attention": (
        {"q/kernel": (8, 2, 4), "q/bias": (2, 4), "out/kernel": (2, 4, 8), "out/bias": (8,)},
        {"out/kernel": Filters(-1)},  # heads and their widths are two axes of output units
    ),
    "linear layers that are transposed": (
        {"h.attn.weight": (8, 24), "h.attn.bias": (24,), "h.proj.weight": (8, 8), "h.proj.bias": (8,)},
        {"h.attn.weight": Filters(1), "h.proj.weight": Filters(1)},
    ),
}


@pytest.mark.parametrize("name", KERAS)
def test_arrays_of_other_frameworks_have_output_units_where_their_biases_are(name: str) -> None:
    shapes, expected = KERAS[name]
    assert likely_filters({name: torch.ones(shape) for name, shape in shapes.items()}) == expected


def test_lists_of_arrays_of_keras_have_output_units_on_the_last_axis() -> None:
    shapes = [(3, 3, 1, 8), (8,), (3, 3, 8, 4), (4,), (36, 16), (5, 16), (16,), (5, 10), (10,)]
    arrays = {str(i): torch.ones(shape) for i, shape in enumerate(shapes)}
    assert likely_filters(arrays) == {i: Filters(-1) for i in ("0", "2", "4", "5", "7")}


def test_an_empty_bias_is_ignored() -> None:
    for shape in ((3, 4), (3, 4, 5)):
        assert likely_filters({"a.weight": torch.ones(shape), "a.bias": torch.ones(0)}) == {"a.weight": Filters()}


# The rule


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"per": "unit"}, "Shift(per='unit'): per must be 'layer' or 'filter'"),
        ({"share": 1.5}, "Shift(share=1.5): share must be between 0 and 1, or 'uploads'"),
        ({"share": -0.1}, "Shift(share=-0.1): share must be between 0 and 1, or 'uploads'"),
        ({"share": float("nan")}, "Shift(share=nan): share must be between 0 and 1, or 'uploads'"),
        ({"share": True}, "Shift(share=True): share must be between 0 and 1, or 'uploads'"),
        ({"share": "all"}, "Shift(share='all'): share must be between 0 and 1, or 'uploads'"),
        ({"max_share": float("nan")}, "Shift(max_share=nan): max_share must be between 0 and 1"),
    ],
)
def test_an_invalid_shift_is_refused_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Shift(**wrong)
    assert str(caught.value) == sentence


def test_the_share_is_one_per_filter_and_that_of_the_uploads_per_layer_unless_it_is_given() -> None:
    assert (Shift("filter").share, Shift("layer").share) == (1.0, "uploads")
    assert Shift("filter").share_in(a_round(share=0.0)) == 1.0
    assert Shift("filter", 1, warmup=4).share_in(a_round(number=3)) == 0.75
    uploads = Shift("filter", "uploads", max_share=0.6, warmup=4)
    assert uploads.share_in(a_round(number=2, share=0.5)) == 0.25
    assert uploads.share_in(a_round(number=9, share=0.9)) == 0.6
    assert Shift("filter", "uploads").share_in(a_round()) == 0.0


def test_a_rule_that_knows_filters_can_be_compared_and_hashed() -> None:
    known = {"weight": Filters()}
    assert {Shift("filter", filters=known), Shift("filter", filters=dict(known))} == {Shift("filter", filters=known)}
    assert Shift("filter", filters=known) != Shift("filter")


def test_per_layer_a_shift_is_the_papers_formula_to_the_bit() -> None:
    params = parameters(seeded(PaperCNN))
    out, _ = Shift(max_share=1.0).apply(Broadcast(params, {}), {}, a_round(share=0.3))
    for name, w in params.items():
        expected = (w - 0.3 * w.mean(dtype=torch.float64)).to(w.dtype) if name.endswith("weight") else w
        assert torch.equal(out.params[name], expected)
    assert all(torch.equal(w, out.params[name]) for name, w in shift(params, 0.3).items())


def test_centred_appends_the_default_shift_of_an_experiment() -> None:
    assert centred(fedavg()) == complete_algorithm(Experiment())
    assert centred(scaffold(), 0.5, "fc*") == complete_algorithm(
        Experiment(algorithm={"name": "scaffold"}, shift={"share": 0.5, "tensors": ["fc*"]})
    )
    assert isinstance(centred(scaffold()).server, Chain)
