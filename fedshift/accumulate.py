"""The server's running mean: frames come in one by one, and only their sum is kept."""

import torch

from fedshift.frame import Header, WireError
from fedshift.parts import as_dtype, open_frame
from fedshift.types import Params


class Mean:
    """w = sum_k p_k w_k / sum_k p_k over the frames accepted, read piece by piece.

    Memory: one model, whatever the number of uploads. A frame is checked whole before any of it is
    added, so a refused one leaves no trace. An update counts as `base + update`. Integer tensors
    are not averaged: they come from the first frame.

    >>> from fedshift import Codec, Identity, pack
    >>> mean = Mean(like={"w": torch.zeros(2)})
    >>> for weight, w in (1.0, [0.0, 4.0]), (3.0, [4.0, 0.0]):
    ...     _ = mean.add(pack(Codec(Identity()), {"w": torch.tensor(w)}), weight)
    >>> mean.result(), mean.share
    ({'w': tensor([3., 1.])}, 0.0)
    """

    def __init__(self, like: Params, base: Params | None = None) -> None:
        self.like, self.base = like, base
        self.count, self.weight = 0, 0.0  # frames accepted, and the sum of their p_k
        self.lossy_weight = self.update_weight = 0.0
        self._sum = {name: torch.zeros(x.numel(), dtype=_wide(x.dtype)) for name, x in like.items()}
        self._reach = dict.fromkeys(like, 0.0)  # a bound on the magnitude of the sum
        self._base_reach = {name: float(x.double().abs().max()) for name, x in (base or {}).items() if x.numel()}

    @property
    def share(self) -> float:
        """The part of the weight that lossy uploads have: the paper's I/K."""
        return self.lossy_weight / self.weight if self.weight else 0.0

    def add(self, data: bytes | memoryview, weight: float = 1.0) -> Header:
        """Add one frame, or raise a WireError and leave everything as it was."""
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight={weight}: an upload's weight must be positive and finite")
        if self.like and not self._sum:
            raise ValueError("the mean was taken already; the next one begins with a new Mean")
        header, parts = open_frame(data, self.like)
        if header.update and self.base is None:
            raise WireError("the frame holds an update, and no base was given to add it to")
        below = self._base_reach if header.update else {}
        reach = {name: self._reach[name] + weight * (part.reach + below.get(name, 0)) for name, part in parts.items()}
        for name, bound in reach.items():
            if (dtype := self._sum[name].dtype).is_floating_point and bound > torch.finfo(dtype).max:
                raise WireError(f"{name}: adding the frame could overflow the sum")
        for name, part in parts.items():
            total = self._sum[name]
            if total.is_floating_point():
                for start, values in part.values(weight):
                    total[start : start + len(values)].add_(values)  # += would write the slice twice
            elif not self.count:
                for start, values in part.values():
                    total[start : start + len(values)] = as_dtype(values, total.dtype)
        self._reach = reach
        self.count += 1
        self.weight += weight
        self.lossy_weight += weight * header.lossy
        self.update_weight += weight * header.update
        return header

    def result(self) -> Params:
        """The mean, with the shapes, dtypes and devices of `like`; the sum becomes it, so nothing can follow."""
        if not self.count or (self.like and not self._sum):
            raise ValueError("the mean was taken already" if self.count else "the mean of no uploads is not defined")
        totals, self._sum = self._sum, {}
        mean = {}
        for name, x in self.like.items():
            total = totals.pop(name).view(x.shape)
            if total.is_floating_point():
                total /= self.weight
                if self.base is not None and self.update_weight:
                    total += self.base[name].to(total) * (self.update_weight / self.weight)
            mean[name] = total.to(x)
        return mean


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What to add up in: short floats in float32, integers as they are."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype
