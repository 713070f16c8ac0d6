"""SCALLION and SCAFCOM: Huang, Li, Li, Stochastic Controlled Averaging ... with Communication Compression, 2024.

    client:  each step follows g - c_k + c, where g is the gradient, in SCAFCOM v_k + beta (grad - v_k)
             sends m_k = alpha ((w_t - w_k) / travel - c), decoded as q_k
             c_k = c_k + q_k;  in SCAFCOM v_k = (w_t - w_k) / travel + c_k - c, the mean of g
    server:  w = w_t - lr mean_k travel (q_k + c)
             c = c + 1/N sum_k q_k

One vector is sent instead of SCAFFOLD's two; with exact uploads and alpha = 1, SCALLION is SCAFFOLD. SCALLION needs an
unbiased quantizer; SCAFCOM works with biased ones, such as top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average
from fedshift.algorithms.scaffold import Controlled
from fedshift.core.tree import added, over, part, prefixed, take, tmap, zeros
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round

STEP, CHANGE = "step/", "change/"  # sums of travel (q_k + c) and of q_k during a round
VELOCITY = "v/"


@dataclass(frozen=True)
class Scallion(Controlled):
    """Clients that send the scaled change of their control."""

    alpha: float = 1.0

    def message(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda x: self.alpha * x, self.change(w, sent, travel))

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        return tmap(lambda c_k, q: c_k + q, memory, decoded)


@dataclass(frozen=True)
class Scafcom(Scallion):
    """SCALLION with gradients averaged over rounds."""

    beta: float = 0.2

    def init(self, params: Params) -> Params:
        return zeros(params) | prefixed(VELOCITY, zeros(params))

    def recover(self, params: Params, sent: Broadcast) -> Params:
        return super().recover(params, sent) | prefixed(VELOCITY, zeros(params))

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        g = tmap(lambda g, v: v + self.beta * (g - v), grad, part(VELOCITY, memory))
        return super().adjust(g, w, sent, memory)

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        c_k = take(memory, decoded)
        v = tmap(lambda change, c_k: change + c_k, self.change(w, sent, travel), c_k)
        return super().remember(decoded, w, sent, c_k, travel) | prefixed(VELOCITY, v)


@dataclass(frozen=True)
class CompressedControl(ServerRule):
    """w = w_t - lr mean_k travel (q_k + c);  c = c + 1/N sum_k q_k"""

    lr: float = 1.0

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        return zeros(take(params, trained)), {}

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        q = {name: upload.decoded[name] for name in sent.control if name in upload.decoded}
        step = tmap(lambda q, c: over(upload.travel, q) * (q + c), q, sent.control)
        return added(added(state, STEP, step), CHANGE, q), memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        w = {name: rnd.model[name] - self.lr / rnd.arrived * x for name, x in part(STEP, state).items()}
        c = {name: out.control[name] + x / rnd.population for name, x in part(CHANGE, state).items()}
        return Broadcast(out.params | w, out.control | c), {}


def scallion(alpha: float = 0.1, lr: float = 1.0) -> Algorithm:
    """SCAFFOLD with one compressed upload."""
    return Algorithm(Scallion(alpha), chain(Average(), CompressedControl(lr)))


def scafcom(beta: float = 0.2, lr: float = 1.0) -> Algorithm:
    """SCALLION with local momentum, for biased quantizers."""
    return Algorithm(Scafcom(1.0, beta), chain(Average(), CompressedControl(lr)))
