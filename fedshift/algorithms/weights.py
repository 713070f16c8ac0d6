"""Weights of a model: the tensors that a shift may change.

A layer's weights are many numbers around a mean that carries no meaning of its own. The scale of a
normalisation, a class token, a positional table or the magnitude of a reparametrised weight are not:
taking out a part of their mean changes what the model computes. The number of axes does not tell them
apart (`LayerNorm([8, 8])`, a token of shape (1, 1, 16)), the module that holds a tensor does.

    weights(module)     decides by the type of the module that holds each parameter
    likely(params)      decides by names and shapes, where there is no module
"""

import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from fedshift.types import Params

RECURRENT = r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?"
PROJECTION = r"(in|q|k|v)_proj_weight"  # of attention, whose projections are linear layers
LAYERS: list[tuple[tuple[type[nn.Module], ...], re.Pattern[str]]] = [
    ((nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear, nn.Embedding, nn.EmbeddingBag), re.compile("weight")),
    ((nn.RNNBase, nn.RNNCellBase), re.compile(RECURRENT)),
    ((nn.MultiheadAttention,), re.compile(PROJECTION)),
]
# the mean of a factor is not the mean of the product, and an original is not the weight that is computed from it
FACTOR = re.compile(r"(^|[./_])lora|(^|[./])parametrizations[./]", re.IGNORECASE)
LIKELY = re.compile(rf"(.*[./])?(weight|{RECURRENT}|{PROJECTION}|kernel|recurrent_kernel)")
WORDS = re.compile(r"[./_\d]+|(?<=[a-z])(?=[A-Z])")  # between the words of a name
OTHERS = {
    *("bn", "ln", "gn", "gain", "gamma", "beta", "scale", "scales", "scaling", "magnitude", "temperature"),
    *("token", "tokens", "cls", "pos", "position", "positions", "positional", "pe", "wpe", "mask", "masks", "running"),
}


def weights(module: nn.Module) -> list[str]:
    """Names of the trained weights of linear, convolution, recurrent, bilinear, embedding and attention layers.

    Subclasses of these layers count. Left out are parameters that the module holds itself, frozen and
    reparametrised ones, low-rank adapters, and weights of a single value. A shared tensor has the name under which
    `named_parameters` lists it.

    >>> weights(nn.Sequential(nn.Conv2d(1, 4, 3), nn.LayerNorm([6, 6]), nn.Flatten(), nn.Linear(144, 10)))
    ['0.weight', '3.weight']
    """
    return list(_among(module, module.named_parameters()))


def all_names(module: nn.Module) -> list[str]:
    """Names of the same tensors in `state_dict`, which lists a shared tensor under each of its names."""
    return list(_among(module, module.named_parameters(remove_duplicate=False)))


def _among(module: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[str]:
    held, factors = set[int](), set[int]()  # by identity: a tensor may have several names
    for path, part in module.named_modules(remove_duplicate=False):
        for name, p in part.named_parameters(recurse=False):
            if FACTOR.search(f"{path}.{name}"):
                factors.add(id(p))
            elif any(isinstance(part, kinds) and pattern.fullmatch(name) for kinds, pattern in LAYERS):
                held.add(id(p))
    held -= factors
    for name, p in named:
        if id(p) in held and p.requires_grad and p.is_floating_point() and p.numel() > 1:
            yield name


def likely(params: Params) -> list[str]:
    """Names of tensors that are weights as far as names and shapes tell.

    Their names end like those of weights, and no word in them is one of a normalisation, a scale, a token, a position,
    a mask or an adapter; a `weight` with a `bias` of its own shape belongs to a normalisation. Where all names are
    numbers, as of a list of arrays, shapes decide: two rows and two columns or more.

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


def _named(name: str) -> bool:
    words = [word.lower() for word in WORDS.split(name)]
    other = any(word in OTHERS or "norm" in word for word in words)
    return bool(LIKELY.fullmatch(name)) and not other and not FACTOR.search(name)


def _elementwise(name: str, w: Tensor, params: Params) -> bool:
    """True for a tensor with one bias per value, as the scale of a normalisation has."""
    bias = params.get(f"{name.removesuffix('weight')}bias")
    return bias is not None and bias.shape == w.shape
