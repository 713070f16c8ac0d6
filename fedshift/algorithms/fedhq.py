"""FedHQ: Chen, Shen, et al., Dynamic Aggregation for Heterogeneous Quantization in Federated Learning, 2021.

    server:  p_k proportional to 1 / (1 + q_k),  q_k = |Q(u_k) - u_k|^2 / |w_k - w_t|^2

These weights minimise sum_k p_k^2 (1 + q_k). The client knows the error of its upload and reports it relative to what
it sends, u_k. If u_k are weights, the server multiplies it by |w_k| / |w_k - w_t| of the decoded weights.
"""

from dataclasses import dataclass

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.tree import norm
from fedshift.core.types import Broadcast, DecodedUpload


@dataclass(frozen=True)
class ByError(ServerRule):
    """1 / (1 + q_k)

    An error of half of an update has q = 0.25; the same error of weights that moved from 3 to 4 has q = 4:

    >>> import torch
    >>> sent = Broadcast({"w": torch.tensor([3.0])}, {})
    >>> upload = DecodedUpload(0, {"w": torch.tensor([4.0])}, {}, torch.tensor(1.0), 1, lossy=True, error=0.5)
    >>> ByError().weigh(upload, sent), ByError().weigh(upload._replace(update=False), sent)
    (0.8, 0.2)
    """

    def weigh(self, upload: DecodedUpload, sent: Broadcast) -> float:
        error = upload.error
        if error and not upload.update:
            floats = [name for name, x in sent.params.items() if x.is_floating_point()]
            moved = norm(upload.decoded[name] - sent.params[name] for name in floats)
            error *= norm(upload.decoded[name] for name in floats) / moved if moved else 1.0
        return 1 / (1 + error * error)


def fedhq() -> Algorithm:
    """FedAvg in which uploads with a larger quantization error have a smaller weight."""
    return Algorithm(Plain(), chain(ByError(), Average()))
