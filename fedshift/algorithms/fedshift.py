"""FedShift: Seo, Kim, Rong, Robust Federated Learning Aggregation via Weight Shifting.

    server:  w = sum_k p_k w_k                     whatever algorithm came before
             w_hat = w - share * mean(w)           for every layer on its own

`share` is the weight of the quantized uploads, I/K when all weigh the same. Quantized weights pull
a layer's mean away from zero; the shift takes out the part of the mean they are answerable for. It
costs nothing on the wire, nothing on the clients, and one pass over the model on the server.

The bare rule collapses when nearly every upload is quantized (share near one), so the share is
capped at `max_share`; the paper's rule is `max_share=1`, safe then with some rounds of `warmup`.
Only weights of layers are shifted: a bias, the scale of a normalisation, a class token or a positional
table has a mean that means something. `weights` decides which tensors of a module are weights, and a
federation hands their names to the rule as `tensors`; the rule itself only knows names. Where there are
arrays and no module, and no `tensors`, names and shapes decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, chain
from fedshift.algorithms.weights import likely
from fedshift.types import Broadcast, Params, Round


def layers(params: Params, tensors: Sequence[str] | None = None) -> list[str]:
    """The tensors to shift: likely weights, or those whose names are given or match a pattern; never integers."""
    if tensors is None:
        return likely(params)
    floats = [name for name, w in params.items() if w.is_floating_point()]
    return [name for name in floats if name in tensors or any(fnmatchcase(name, pattern) for pattern in tensors)]


def mean(w: Tensor) -> Tensor:
    """The mean of a layer, added up in float64 so that it is the same on every device to the last digit or so."""
    return w.mean(dtype=torch.float64)


def shift(params: Params, share: float, tensors: Sequence[str] | None = None) -> Params:
    """w - share * mean(w) for each layer; everything else as it is.

    >>> shift({"weight": torch.tensor([[1.0, 3.0]]), "bias": torch.tensor([5.0])}, share=0.5)
    {'weight': tensor([[0., 2.]]), 'bias': tensor([5.])}
    """
    chosen = set(layers(params, tensors)) if share else set()
    return {name: (w - share * mean(w)).to(w.dtype) if name in chosen else w for name, w in params.items()}


@dataclass(frozen=True)
class Shift:
    """w_hat = w - min(share, max_share) * min(1, t / warmup) * mean(w)"""

    max_share: float = 0.5
    warmup: int = 0  # rounds until the whole share is taken
    tensors: tuple[str, ...] | None = None  # names and patterns; None: likely weights
    fixed: float | None = None  # instead of min(share, max_share), whatever was quantized

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ValueError(f"Shift(max_share={self.max_share}): max_share must be between 0 and 1")
        if self.fixed is not None and not 0 <= self.fixed <= 1:
            raise ValueError(f"Shift(fixed={self.fixed}): a share must be between 0 and 1")
        if self.warmup < 0:
            raise ValueError(f"Shift(warmup={self.warmup}): warmup must be 0 or more rounds")
        if self.tensors is not None and not all(isinstance(name, str) for name in self.tensors):
            raise TypeError(f"Shift(tensors={self.tensors!r}): needs names of tensors or patterns, like 'fc*.weight'")

    def share(self, rnd: Round) -> float:
        ramp = min(1.0, rnd.number / self.warmup) if self.warmup else 1.0
        return (min(rnd.share, self.max_share) if self.fixed is None else self.fixed) * ramp

    def init(self, params: Params) -> Params:
        return {}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        return out._replace(params=shift(out.params, self.share(rnd), self.tensors)), state


def shifted(
    algorithm: Algorithm,
    max_share: float = 0.5,
    warmup: int = 0,
    tensors: Sequence[str] | None = None,
    fixed: float | None = None,
) -> Algorithm:
    """The algorithm, and then the shift.

    >>> from fedshift.algorithms.fedprox import fedprox
    >>> shifted(fedprox(0.01)).server.rules
    (Average(), Shift(max_share=0.5, warmup=0, tensors=None, fixed=None))
    """
    rule = Shift(max_share, warmup, patterns(tensors), fixed)
    return Algorithm(algorithm.client, chain(algorithm.server, rule))


def patterns(tensors: Sequence[str] | None) -> tuple[str, ...] | None:
    """As a rule keeps them; one pattern may stand alone.

    >>> patterns("fc*"), patterns(["a", "b"]), patterns(None)
    (('fc*',), ('a', 'b'), None)
    """
    return (tensors,) if isinstance(tensors, str) else None if tensors is None else tuple(tensors)


def shorter(share: float, before: float, after: float) -> bool:
    """Theorem 2, corrected: whether the shift makes the step from w^t to w^{t+1} the shorter one.

        |w^{t+1} - w^t|^2 - |w_hat^{t+1} - w^t|^2 = share P m' ((2 - share) m' - 2 m)

    for a layer of P weights with mean m = m^t before and m' = m^{t+1} after aggregation, so exactly
    when (2 - share) / 2 > m / m', which the paper writes (K + S) / 2K > m^t / m^{t+1}.

    >>> shorter(0.5, before=1.0, after=1.3), shorter(0.5, before=1.0, after=1.4)  # the fence is at 4/3
    (False, True)
    """
    return share * after * ((2 - share) * after - 2 * before) > 0
