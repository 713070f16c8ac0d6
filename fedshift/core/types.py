"""The nouns every room shares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

CPU = torch.device("cpu")
Params = dict[str, Tensor]  # one model, or K of them stacked on a leading axis


class Broadcast(NamedTuple):
    """What the server sends to every client of a round.

    >>> Broadcast({"w": torch.tensor([1.0])}, control={})
    Broadcast(params={'w': tensor([1.])}, control={})
    """

    params: Params
    control: Params  # SCAFFOLD's c; {} for algorithms without one


class Round(NamedTuple):
    """What the server knows when it aggregates.

    Five of ten uploads were quantized, so the shift takes half of each layer's mean:

    >>> from fedshift.algorithms import Shift
    >>> sent, mean = Broadcast({"weight": torch.zeros(1, 2)}, {}), {"weight": torch.tensor([[1.0, 3.0]])}
    >>> rnd = Round(1, arrived=10, population=100, start=sent, mean=mean, extra={}, share=0.5)
    >>> Shift().apply(sent._replace(params=rnd.mean), {}, rnd)[0].params
    {'weight': tensor([[0., 2.]])}
    """

    number: int  # 1 is the first
    arrived: int  # uploads it could use
    population: int  # clients there are
    start: Broadcast  # what it sent
    mean: Params  # sum_k p_k w_k over the uploads that arrived, p renormalised
    extra: Params  # plain mean of what else came with them (SCAFFOLD's change of c); {} otherwise
    share: float  # sum of p_k over lossy uploads: the paper's I/K


@dataclass(frozen=True, eq=False)
class Decoded:
    """An upload that never was a frame: the weights a server would read from it, and how long it would be.

    The length is computed, measured on a frame made for the purpose, or estimated.
    """

    params: Params
    size: int
    reach: Mapping[str, float] = field(default_factory=dict)  # the largest magnitude of each float tensor that was sent
    lossy: bool = False
    update: bool = False  # what was sent; params are weights all the same
    norms: tuple[float, float] | None = None  # of the change: over trained tensors, over floating buffers
    estimate: int | None = None  # of the size, from counts of codes; None where the size is known without a frame

    def __len__(self) -> int:
        return self.size
