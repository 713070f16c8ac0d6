"""Functions on Params."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedshift.core.types import Params


def tmap(f: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Apply f to the tensors of each name in the first tree.

    >>> tmap(lambda w, g: w - 0.5 * g, {"w": torch.ones(2)}, {"w": torch.ones(2), "unused": torch.ones(1)})
    {'w': tensor([0.5000, 0.5000])}
    """
    return {name: f(x, *(other[name] for other in others)) for name, x in first.items()}


def zeros(like: Params) -> Params:
    """Zeros of the same names, shapes and types."""
    return tmap(torch.zeros_like, like)


def take(params: Params, names: Iterable[str]) -> Params:
    """Tensors with these names."""
    return {name: params[name] for name in names}


def prefixed(prefix: str, params: Params) -> Params:
    """The same tensors with a prefix before their names.

    >>> prefixed("m/", {"w": torch.ones(1)})
    {'m/w': tensor([1.])}
    """
    return {prefix + name: x for name, x in params.items()}


def part(prefix: str, params: Params) -> Params:
    """Tensors whose names have the prefix, without it.

    >>> part("m/", {"m/w": torch.ones(1), "v/w": torch.zeros(1)})
    {'w': tensor([1.])}
    """
    return {name.removeprefix(prefix): x for name, x in params.items() if name.startswith(prefix)}


def added(params: Params, prefix: str, terms: Params) -> Params:
    """Params with `terms` added to the sums that have the prefix.

    >>> added(added({}, "sum/", {"w": torch.ones(1)}), "sum/", {"w": torch.ones(1)})
    {'sum/w': tensor([2.])}
    """
    sums = {name: params[name] + x if name in params else x for name, x in prefixed(prefix, terms).items()}
    return params | sums


def over(x: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per client (K,) to broadcast over stacked tensors (K, ...); scalars are unchanged."""
    return x.view(-1, *[1] * (like.ndim - 1)) if x.ndim else x


def norm(tensors: Iterable[Tensor]) -> float:
    """|x| over all floating point tensors, in float64.

    >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]]), torch.tensor([7])])
    5.0
    """
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in tensors if x.is_floating_point()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def same(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are equal byte by byte, also for NaN and dtypes without arithmetic.

    >>> same(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0])), same(torch.ones(2), torch.ones(2).int())
    (True, False)
    """
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    if a.layout != torch.strided:
        a, b = a.to_sparse().coalesce(), b.to_sparse().coalesce()
        return torch.equal(a.indices(), b.indices()) and same(a.values(), b.values())
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)))
