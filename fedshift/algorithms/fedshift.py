"""FedShift: Seo, Kim, Rong, Robust Federated Learning Aggregation via Weight Shifting.

    server:  w = sum_k p_k w_k                     or the result of another algorithm
             w_hat = w - share * mean(w)           for each layer separately

`share` is the aggregation weight of the quantized uploads, I/K with equal weights. Quantized weights
move a layer's mean away from zero; the shift subtracts their part of the mean. It adds nothing to an
upload, no work for clients, and one pass over the model on the server.

Without a limit, the model collapses when nearly every upload is quantized (share near one), so the share
is capped at `max_share`; the paper's rule is `max_share=1`, which then needs some rounds of `warmup`.
Only weights of layers are shifted: the mean of a bias, the scale of a normalisation, a class token or a
positional table is part of the function of the model. `weights` decides which tensors of a module are
weights, and a federation passes their names to the rule as `tensors`. For arrays without a module and
without `tensors`, names and shapes decide.

`Shift(per="filter")` subtracts the mean of each filter instead: see `fedshift.algorithms.centring`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.centring import centre, wide
from fedshift.algorithms.weights import Filters, likely, likely_filters
from fedshift.core.types import Broadcast, Params, Round

Per = Literal["layer", "filter"]
Share = float | Literal["uploads"]


def layers(params: Params, tensors: Sequence[str] | None = None) -> list[str]:
    """Names of the tensors to shift: likely weights, or floating point tensors that match a name or pattern."""
    if tensors is None:
        return likely(params)
    floats = [name for name, w in params.items() if w.is_floating_point()]
    return [name for name in floats if name in tensors or any(fnmatchcase(name, pattern) for pattern in tensors)]


def mean(w: Tensor) -> Tensor:
    """Mean of a layer, summed in float64 so that it is nearly the same on every device."""
    return w.mean(dtype=torch.float64)


def shift(params: Params, share: float, tensors: Sequence[str] | None = None) -> Params:
    """w - share * mean(w) for each layer; other tensors are unchanged.

    >>> shift({"weight": torch.tensor([[1.0, 3.0]]), "bias": torch.tensor([5.0])}, share=0.5)
    {'weight': tensor([[0., 2.]]), 'bias': tensor([5.])}
    """
    chosen = set(layers(params, tensors)) if share else set()
    return {name: (w - share * mean(w)).to(w.dtype) if name in chosen else w for name, w in params.items()}


def default_share(per: Per) -> Share:
    return 1.0 if per == "filter" else "uploads"


@dataclass(frozen=True)
class Shift(ServerRule):
    """Subtract a share of the mean of each layer (FedShift, the paper's rule) or of each filter (filter centring).

        w_hat = w - share * min(1, t / warmup) * mean(w)      for every layer, or for every filter

    `share` is a number, or "uploads" for the share of the quantized uploads, at most `max_share` (default:
    "uploads" per layer, 1 per filter). `tensors` are names or patterns of tensors to shift (default: the weights of
    layers; per filter, those with at least `FAN_IN` inputs). `filters` are the positions of the filters in each weight
    (default: from names and shapes). Tensors with fewer than two inputs per filter, like biases, are never centred.
    """

    per: Per = "layer"
    share: Share | None = None
    max_share: float = 0.5
    warmup: int = 0  # rounds until the whole share is subtracted
    tensors: tuple[str, ...] | None = None
    filters: Mapping[str, Filters] | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        if self.per not in ("layer", "filter"):
            raise ValueError(f"Shift(per={self.per!r}): per must be 'layer' or 'filter'")
        if self.share is None:
            object.__setattr__(self, "share", default_share(self.per))
        if not 0 <= self.max_share <= 1:
            raise ValueError(f"Shift(max_share={self.max_share}): max_share must be between 0 and 1")
        share = self.share
        number = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1
        if share != "uploads" and not number:
            raise ValueError(f"Shift(share={share!r}): share must be between 0 and 1, or 'uploads'")
        if self.warmup < 0:
            raise ValueError(f"Shift(warmup={self.warmup}): warmup must be 0 or more rounds")
        if self.tensors is not None and not all(isinstance(name, str) for name in self.tensors):
            raise TypeError(f"Shift(tensors={self.tensors!r}): tensors must be names or patterns, such as 'fc*.weight'")

    def share_in(self, rnd: Round) -> float:
        """The share of the mean that is subtracted in a round."""
        ramp = min(1.0, rnd.number / self.warmup) if self.warmup else 1.0
        return (self.share if isinstance(self.share, (int, float)) else min(rnd.share, self.max_share)) * ramp

    def chosen(self, params: Params) -> list[str]:
        """Names of the tensors that are shifted."""
        return layers(params, self.tensors) if self.per == "layer" else list(self._chosen_filters(params))

    def _chosen_filters(self, params: Params) -> dict[str, Filters]:
        """Position of the filters in each tensor that is centred."""
        known = likely_filters(params) if self.filters is None else self.filters
        if self.tensors is None:
            return wide(params, known)
        return wide(params, {name: known.get(name, Filters()) for name in layers(params, self.tensors)}, least=2)

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        return out._replace(params=self.shifted(out.params, rnd)), state

    def shifted(self, params: Params, rnd: Round) -> Params:
        """The parameters after the shift of a round."""
        share = self.share_in(rnd)
        if self.per == "layer":
            return shift(params, share, self.tensors)
        return centre(params, share, self._chosen_filters(params))


def shifted(
    algorithm: Algorithm,
    max_share: float = 0.5,
    warmup: int = 0,
    tensors: Sequence[str] | None = None,
    share: Share = "uploads",
) -> Algorithm:
    """The algorithm, followed by the paper's shift per layer.

    >>> from fedshift.algorithms.fedprox import fedprox
    >>> shifted(fedprox(0.01)).server.rules
    (Average(), Shift(per='layer', share='uploads', max_share=0.5, warmup=0, tensors=None))
    """
    rule = Shift("layer", share, max_share, warmup, patterns(tensors))
    return Algorithm(algorithm.client, chain(algorithm.server, rule))


def centred(algorithm: Algorithm, share: Share = 1.0, tensors: Sequence[str] | None = None) -> Algorithm:
    """The algorithm, followed by filter centring.

    >>> from fedshift.algorithms.fedavg import fedavg
    >>> centred(fedavg()).server.rules[-1].share
    1.0
    """
    return Algorithm(algorithm.client, chain(algorithm.server, Shift("filter", share, tensors=patterns(tensors))))


def patterns(tensors: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names or patterns as a tuple; a single string is one pattern.

    >>> patterns("fc*"), patterns(["a", "b"]), patterns(None)
    (('fc*',), ('a', 'b'), None)
    """
    return (tensors,) if isinstance(tensors, str) else None if tensors is None else tuple(tensors)


def shorter(share: float, before: float | Tensor, after: float | Tensor) -> bool:
    """Theorem 2, corrected: True if the shift makes the step from w^t to w^{t+1} shorter.

        |w^{t+1} - w^t|^2 - |w_hat^{t+1} - w^t|^2 = share P m' ((2 - share) m' - 2 m)

    for a layer of P weights with mean m = m^t before and m' = m^{t+1} after aggregation, so exactly
    if (2 - share) / 2 > m / m', which the paper writes (K + S) / 2K > m^t / m^{t+1}. The same holds for every filter
    with its own mean, and a layer whose filters are centred has the sum over them: `before` and `after` are then
    tensors, one mean per filter.

    >>> shorter(0.5, before=1.0, after=1.3), shorter(0.5, before=1.0, after=1.4)  # the limit is 4/3
    (False, True)
    >>> shorter(0.5, before=torch.tensor([1.0, 0.0]), after=torch.tensor([1.3, 1.0]))
    True
    """
    return bool(shortening(share, before, after) > 0)


def shortening(share: float, before: float | Tensor, after: float | Tensor) -> Tensor:
    """share * sum_f m'_f ((2 - share) m'_f - 2 m_f), for filters of one weight each."""
    new, old = torch.as_tensor(after), torch.as_tensor(before)
    return share * (new * ((2 - share) * new - 2 * old)).sum()
