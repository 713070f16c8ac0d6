"""L-DAWA: Rehman et al., L-DAWA: Layer-wise Divergence Aware Weight Aggregation, 2023.

server:  w_l = sum_k p_k a_kl w_kl / sum_k p_k a_kl,  a_kl = cos(w_kl, w_tl) for each tensor l

Tensors that turned away from the model have a smaller weight. A cosine of zero or less counts as `LEAST`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.types import Broadcast, DecodedUpload

LEAST = 1e-6


@dataclass(frozen=True)
class ByAngle(ServerRule):
    """cos(w_kl, w_tl)

    >>> sent = Broadcast({"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(1)}, {})
    >>> w = {"w": torch.tensor([5.0, 0.0]), "b": torch.ones(1)}
    >>> weights = ByAngle().weigh(DecodedUpload(0, w, {}, torch.tensor(1.0), 1, False, 0.0), sent)
    >>> {name: round(x, 2) for name, x in weights.items()}
    {'w': 0.6, 'b': 1.0}
    """

    def weigh(self, upload: DecodedUpload, sent: Broadcast) -> Mapping[str, float]:
        floats = {name: x for name, x in sent.params.items() if x.is_floating_point() and x.numel()}
        norms = torch.stack([torch.stack(_products(x, upload.decoded[name])) for name, x in floats.items()])
        both, first, second = norms.unbind(1)
        cosines = torch.where(first * second > 0, both / (first * second).sqrt(), 1.0)  # 1 for a tensor of zeros
        return dict(zip(floats, cosines.clamp(min=LEAST).tolist(), strict=True))


def _products(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    x, y = x.double(), y.double()
    return [(x * y).sum(), (x * x).sum(), (y * y).sum()]


def ldawa() -> Algorithm:
    """FedAvg in which a layer counts less the further it turned from the model."""
    return Algorithm(Plain(), chain(ByAngle(), Average()))
