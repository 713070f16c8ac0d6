"""Agreement mask: selective aggregation of ProWD (Yoon et al., Bitwidth Heterogeneous Federated Learning, 2022).

    server:  d = mean of the updates of full-precision clients
             w = w_t + the mean of all updates, without entries of quantized clients whose sign differs from d

Without full-precision uploads in a round, it is FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round


@dataclass(frozen=True)
class Agreeing(ServerRule):
    """Leave out entries of quantized updates that disagree with the full-precision mean.

    An exact update of 2 and -2, a quantized one of 4 and 4: the second entry is left out.

    >>> import torch
    >>> sent, values = Broadcast({"w": torch.zeros(2)}, {}), ([2.0, -2.0], [4.0, 4.0])
    >>> uploads = [
    ...     DecodedUpload(k, {"w": torch.tensor(x)}, {}, torch.tensor(1.0), 1, lossy=bool(k), error=0.0)
    ...     for k, x in enumerate(values)
    ... ]
    >>> mean = {"w": torch.tensor([3.0, 1.0])}
    >>> rnd = Round(1, 2, 2, sent, mean, 0.5, model=sent.params, uploads=uploads)
    >>> Agreeing().apply(Broadcast(mean, {}), {}, rnd)[0].params
    {'w': tensor([ 3., -2.])}
    """

    needs: ClassVar[frozenset[str]] = frozenset({"uploads"})

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        exact = [upload for upload in rnd.uploads if not upload.lossy]
        lossy = [upload for upload in rnd.uploads if upload.lossy]
        if not exact or not lossy:
            return out, state
        floats = [name for name, x in rnd.start.params.items() if x.is_floating_point()]
        w = {name: rnd.model[name] + _mean(exact, lossy, name, rnd.start.params[name]) for name in floats}
        return out._replace(params=out.params | w), state


def _mean(exact: list[DecodedUpload], lossy: list[DecodedUpload], name: str, start: Tensor) -> Tensor:
    """Mean of the updates of one tensor, without entries that disagree."""
    total = sum(upload.weight * (upload.decoded[name] - start) for upload in exact)
    assert isinstance(total, Tensor)
    sign, weight = total.sign(), start.new_full(start.shape, sum(upload.weight for upload in exact))
    for upload in lossy:
        d = upload.decoded[name] - start
        kept = upload.weight * (d.sign() == sign).to(d.dtype)
        total, weight = total + kept * d, weight + kept
    return total / weight


def agreement() -> Algorithm:
    """FedAvg without entries of quantized updates whose sign differs from the full-precision mean."""
    return Algorithm(Plain(), chain(Average(), Agreeing()))
