"""Weights of a model: the tensors that a shift may change.

The weights of a layer are many numbers around a mean without a function. This does not apply to the scale
of a normalisation, a class token, a positional table or the magnitude of a reparametrised weight:
subtracting a part of their mean changes the model's output. The number of axes does not distinguish them
(`LayerNorm([8, 8])`, a token of shape (1, 1, 16)); the module that contains a tensor does.

    weights(module)     decides by the type of the module that contains each parameter
    likely(params)      decides by names and shapes, without a module

A weight consists of filters, one for each output unit. `filters` and `likely_filters` find those that may be
centred.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedshift.core.types import Params

RECURRENT = r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?"
PROJECTION = r"(in|q|k|v)_proj_weight"  # of attention, whose projections are linear layers
LAYERS: list[tuple[tuple[type[nn.Module], ...], re.Pattern[str]]] = [
    ((nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear, nn.Embedding, nn.EmbeddingBag), re.compile("weight")),
    ((nn.RNNBase, nn.RNNCellBase), re.compile(RECURRENT)),
    ((nn.MultiheadAttention,), re.compile(PROJECTION)),
]
# the mean of a factor is not the mean of the product, and the original of a parametrization is not the weight itself
FACTOR = re.compile(r"(^|[./_])lora|(^|[./])parametrizations[./]", re.IGNORECASE)
LIKELY = re.compile(rf"(.*[./])?(weight|{RECURRENT}|{PROJECTION}|kernel|recurrent_kernel)")
WORDS = re.compile(r"[./_\d]+|(?<=[a-z])(?=[A-Z])")  # separators of the words of a name
OTHERS = {
    *("bn", "ln", "gn", "gain", "gamma", "beta", "scale", "scales", "scaling", "magnitude", "temperature"),
    *("token", "tokens", "cls", "pos", "position", "positions", "positional", "pe", "wpe", "mask", "masks", "running"),
}
EMBEDDING = ("embed", "wte")  # prefixes of words in the names of embeddings
FAN_IN = 32  # least number of inputs of a filter that is centred by default


class Filters(NamedTuple):
    """Position of the filters in a weight: the axis of output units, and the number of groups of a convolution.

    Linear, convolution, recurrent and attention layers have output units on the first axis, transposed convolutions
    on the second, `(inputs, outputs / groups, ...)`, and those of Keras on the last.
    """

    axis: int = 0
    groups: int = 1

    def means(self, w: Tensor) -> Tensor:
        """Mean of each filter, (filters,), summed in float64."""
        return self._means(self._grouped(w)).flatten()

    def centred(self, w: Tensor, share: float) -> Tensor:
        """w_f - share * mean(w_f) for each filter f, computed in float32 or wider.

        >>> Filters().centred(torch.tensor([[1.0, 3.0], [4.0, 6.0]]), 1.0).tolist()
        [[-1.0, 1.0], [-1.0, 1.0]]
        >>> Filters(axis=1).centred(torch.tensor([[1.0, 3.0], [4.0, 6.0]]), 1.0).tolist()
        [[-1.5, -1.5], [1.5, 1.5]]
        """
        wide = torch.promote_types(w.dtype, torch.float32)
        grouped = self._grouped(w)
        return (grouped.to(wide) - (share * self._means(grouped)).to(wide)).reshape(w.shape).to(w.dtype)

    def fan_in(self, shape: torch.Size) -> int:
        """Number of weights in one filter; 1 for a tensor of one axis or none."""
        if not shape.numel() or len(shape) < 2:
            return min(shape.numel(), 1)
        return shape.numel() // (shape[self.axis] * self.groups)

    def _grouped(self, w: Tensor) -> Tensor:
        w = w if w.ndim else w.reshape(1)
        return w.reshape(self.groups, len(w) // self.groups, *w.shape[1:])

    def _means(self, grouped: Tensor) -> Tensor:
        output = 1 + self.axis % (grouped.ndim - 1)
        inputs = [dim for dim in range(1, grouped.ndim) if dim != output]
        return grouped.mean(inputs, keepdim=True, dtype=torch.float64) if inputs else grouped.double()


def weights(module: nn.Module) -> list[str]:
    """Names of the trained weights of linear, convolution, recurrent, bilinear, embedding and attention layers.

    Subclasses of these layers count. Left out are direct parameters of the module, frozen and
    reparametrised ones, low-rank adapters, and weights of a single value. A shared tensor has the name under which
    `named_parameters` lists it.

    >>> weights(nn.Sequential(nn.Conv2d(1, 4, 3), nn.LayerNorm([6, 6]), nn.Flatten(), nn.Linear(144, 10)))
    ['0.weight', '3.weight']
    """
    return list(_among(module, module.named_parameters()))


def all_names(module: nn.Module) -> list[str]:
    """Names of the same tensors in `state_dict`, which lists a shared tensor under each of its names."""
    return list(_among(module, module.named_parameters(remove_duplicate=False)))


def filters(module: nn.Module) -> dict[str, Filters]:
    """Position of the filters in each weight, by all its names.

    Embeddings have one row per symbol and no filters. Weights that are shared with an embedding, or between layers
    whose filters are on different axes, are left out too.

    >>> filters(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Embedding(5, 8)))
    {'0.weight': Filters(axis=0, groups=1), '1.weight': Filters(axis=1, groups=2)}
    """
    found = _among(module, module.named_parameters(remove_duplicate=False)).items()
    positions = {name: {_filters_of(part) for part in parts} for name, parts in found}
    return {name: at for name, (at, *others) in positions.items() if at is not None and not others}


def _filters_of(part: nn.Module) -> Filters | None:
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        return None
    return Filters(1, part.groups) if isinstance(part, nn.modules.conv._ConvTransposeNd) else Filters()


def _among(module: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, list[nn.Module]]:
    """The weights among named parameters, and the layers that contain each."""
    owners, factors = dict[int, list[nn.Module]](), set[int]()  # by identity: a tensor may have several names
    for path, part in module.named_modules(remove_duplicate=False):
        for name, p in part.named_parameters(recurse=False):
            if FACTOR.search(f"{path}.{name}"):
                factors.add(id(p))
            elif any(isinstance(part, kinds) and pattern.fullmatch(name) for kinds, pattern in LAYERS):
                owners.setdefault(id(p), []).append(part)
    return {
        name: owners[id(p)]
        for name, p in named
        if id(p) in owners.keys() - factors and p.requires_grad and p.is_floating_point() and p.numel() > 1
    }


def likely(params: Params) -> list[str]:
    """Names of tensors that are probably weights, judged by names and shapes.

    Their names end like those of weights, and no word in them denotes a normalisation, a scale, a token, a position,
    a mask or an adapter; a `weight` with a `bias` of the same shape belongs to a normalisation. If all names are
    numbers, as in a list of arrays, shapes decide: at least two rows and two columns.

    >>> import torch
    >>> w = torch.ones(3, 4)
    >>> likely({"fc.weight": w, "fc.bias": torch.ones(3), "norm.weight": w, "pos_embed.weight": w, "cls_token": w})
    ['fc.weight']
    >>> likely({"0": w, "1": torch.ones(3), "2": torch.ones(1, 1, 16)})
    ['0']
    """
    floats = {name: w for name, w in params.items() if w.is_floating_point() and w.ndim >= 2}
    if all(name.isdigit() for name in params):
        return [name for name, w in floats.items() if len(w) > 1 and w[0].numel() > 1]
    return [name for name, w in floats.items() if w.numel() > 1 and _named(name) and not _elementwise(name, w, params)]


def _words(name: str) -> list[str]:
    return [word.lower() for word in WORDS.split(name)]


def _named(name: str) -> bool:
    other = any(word in OTHERS or "norm" in word for word in _words(name))
    return bool(LIKELY.fullmatch(name)) and not other and not FACTOR.search(name)


def _elementwise(name: str, w: Tensor, params: Params) -> bool:
    """True for a tensor with one bias per value, as the scale of a normalisation has."""
    bias = params.get(f"{name.removesuffix('weight')}bias")
    return bias is not None and bias.shape == w.shape


def likely_filters(params: Params) -> dict[str, Filters]:
    """Position of the filters in each likely weight, judged by names and shapes; embeddings are left out.

    Output units are on the first axis of a `weight` and on the last of a `kernel`; in a list of arrays, on the axis
    that fits the lengths of more biases. A bias that fits only the axis beside it belongs to a transposed convolution,
    or to a linear layer that stores its matrix transposed. Also left out are weights with the values of an embedding,
    which share its tensor, and weights whose output units have several axes, like the queries of attention in Keras.

    >>> w, up = torch.ones(3, 4), torch.ones(6, 3, 2, 2)
    >>> likely_filters({"fc.weight": w, "fc.bias": torch.ones(3), "up.weight": up, "up.bias": torch.ones(3)})
    {'fc.weight': Filters(axis=0, groups=1), 'up.weight': Filters(axis=1, groups=1)}
    >>> likely_filters({"0": torch.ones(4, 3), "1": torch.ones(3)})
    {'0': Filters(axis=-1, groups=1)}
    """
    names, tables = list[str](), list[Tensor]()
    for name in likely(params):
        if any(word.startswith(EMBEDDING) for word in _words(name)):
            tables.append(params[name])
        else:
            names.append(name)
    names = [name for name in names if not _several_axes(name, params) and not _one_of(params[name], tables)]
    biases = {name: _bias(name, params) for name in names}
    known = [(params[name].shape, len(bias)) for name, bias in biases.items() if bias is not None]
    known = [(shape, n) for shape, n in known if len(shape) == 2 or all(name.isdigit() for name in names)]
    last = sum(shape[-1] == n for shape, n in known) > sum(shape[0] == n for shape, n in known)
    return {name: _position(name, params[name], bias, last) for name, bias in biases.items()}


def _several_axes(name: str, params: Params) -> bool:
    """True for a weight whose bias has several axes, those of its output units."""
    bias = params.get(_bias_name(name))
    return bias is not None and bias is not params[name] and bias.ndim >= 2 and bias.shape == params[name].shape[1:]


def _one_of(w: Tensor, tables: list[Tensor]) -> bool:
    return any(w.shape == table.shape and torch.equal(w, table) for table in tables)


def _bias_name(name: str) -> str:
    """Name of the bias of a weight; in a list, the index of the array that follows it."""
    return str(int(name) + 1) if name.isdigit() else re.sub("(weight|kernel)$", "bias", name)


def _bias(name: str, params: Params) -> Tensor | None:
    bias = params.get(_bias_name(name))
    return bias if bias is not None and bias.ndim == 1 else None


def _position(name: str, w: Tensor, bias: Tensor | None, turned: bool) -> Filters:
    """Position of the filters in one weight; `turned`: most biases fit the last axes of their weights."""
    last = turned if name.isdigit() else name.endswith("kernel")
    axis, other = (-1, -2) if last else (0, 1)
    groups, rest = divmod(0 if bias is None else len(bias), w.shape[other])
    if bias is None or not groups or rest:
        return Filters(axis)
    fits = len(bias) == w.shape[axis]
    if w.ndim == 2:  # in a list, the array after a weight may belong to the next layer
        beside = groups == 1 and not name.isdigit() and (not fits or (turned and not last))
    else:
        beside = not fits and w.shape[axis] % groups == 0 and (groups == 1 or not last)
    return Filters(other, groups) if beside else Filters(axis)
