"""Types shared by all packages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

CPU = torch.device("cpu")
Params = dict[str, Tensor]  # one model, or K of them stacked on a leading axis


class Broadcast(NamedTuple):
    """Content of the message from the server to every client of a round.

    >>> Broadcast({"w": torch.tensor([1.0])}, control={})
    Broadcast(params={'w': tensor([1.])}, control={})
    """

    params: Params
    control: Params  # further tensors that the server's rules send, such as SCAFFOLD's c; {} for none


class DecodedUpload(NamedTuple):
    """Upload of one client, as the server's rules see it.

    >>> upload = DecodedUpload(7, {"w": torch.ones(1)}, {}, torch.tensor(0.5), examples=60, lossy=True, error=0.1)
    >>> upload.client, upload.weight
    (7, 1.0)
    """

    client: int
    decoded: Params  # weights of the client, or its message if the client rule defines one, and buffers
    second: Params  # second upload, {} for none
    travel: Tensor  # (): distance that a unit gradient would have moved the client
    examples: int
    lossy: bool
    error: float  # |u - Q(u)| / |u| over all quantized tensors
    weight: float = 1.0  # p_k before it is normalised
    update: bool = True  # u is an update or a message, not weights
    loss: float | None = None  # F_k(w_t) of the received model on the client's examples; None if no rule needs it


class GroupMean(NamedTuple):
    """Mean of the uploads with the same uplink, in `Round.groups`.

    >>> GroupMean({"w": torch.ones(1)}, weight=5.0, lossy=True)
    GroupMean(mean={'w': tensor([1.])}, weight=5.0, lossy=True)
    """

    mean: Params  # of weights, or of messages if the client rule defines them
    weight: float  # sum of p_k
    lossy: bool


class Round(NamedTuple):
    """Input of the server rules after the uploads of a round.

    Five of ten uploads were quantized, so the shift subtracts half of each layer's mean:

    >>> from fedshift.algorithms import Shift
    >>> sent, mean = Broadcast({"weight": torch.zeros(1, 2)}, {}), {"weight": torch.tensor([[1.0, 3.0]])}
    >>> rnd = Round(1, arrived=10, population=100, start=sent, mean=mean, share=0.5)
    >>> Shift().apply(sent._replace(params=rnd.mean), {}, rnd)[0].params
    {'weight': tensor([[0., 2.]])}
    """

    number: int  # 1 is the first
    arrived: int  # uploads that were used
    population: int  # number of all clients
    start: Broadcast  # broadcast of this round
    mean: Params  # sum_k p_k w_k over the uploads that arrived, p renormalised
    share: float  # sum of p_k over lossy uploads: the paper's I/K
    model: Mapping[str, Tensor] = MappingProxyType({})  # the server's model before this round
    # sum_k p_k m_k, if the client rule defines messages; trained tensors of `mean` are then those of `model`
    message: Mapping[str, Tensor] = MappingProxyType({})
    groups: Sequence[GroupMean] = ()  # if a rule needs "groups"
    uploads: Sequence[DecodedUpload] = ()  # if a rule needs "uploads"
    trained: Sequence[str] = ()  # names of the trained tensors; the others are buffers


@dataclass(frozen=True, eq=False)
class Decoded:
    """Upload that was not encoded as a frame: the decoded weights and the length of the frame.

    The length is computed, measured on a real frame, or estimated.
    """

    params: Params
    size: int
    reach: Mapping[str, float] = field(default_factory=dict)  # largest magnitude of each float tensor that was sent
    lossy: bool = False
    update: bool = False  # True if an update was sent; params are weights in either case
    norms: tuple[float, float] | None = None  # of the update: over trained tensors, over floating point buffers
    estimate: int | None = None  # of the size, from counts of codes; None if the size is known exactly

    def __len__(self) -> int:
        return self.size
