"""FedHQ: Chen, Shen, et al., Dynamic Aggregation for Heterogeneous Quantization in Federated Learning, 2021.

server:  p_k proportional to 1 / (1 + q_k),  q_k = |Q(u_k) - u_k|^2 / |u_k|^2

These weights minimise sum_k p_k^2 (1 + q_k). The client knows the error q_k of its upload and reports it.
"""

from dataclasses import dataclass

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.types import Broadcast, DecodedUpload


@dataclass(frozen=True)
class ByError(ServerRule):
    """1 / (1 + q_k)

    >>> import torch
    >>> upload = DecodedUpload(0, {}, {}, torch.tensor(1.0), 1, lossy=True, error=0.5)
    >>> ByError().weigh(upload, Broadcast({}, {}))
    0.8
    """

    def weigh(self, upload: DecodedUpload, sent: Broadcast) -> float:
        return 1 / (1 + upload.error * upload.error)


def fedhq() -> Algorithm:
    """FedAvg in which uploads with a larger quantization error have a smaller weight."""
    return Algorithm(Plain(), chain(ByError(), Average()))
