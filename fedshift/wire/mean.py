"""Running mean of the server: frames are added one by one, and only their sum is stored."""

import math
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.bounds import VARIANCES
from fedshift.codecs.base import CHUNK, ends
from fedshift.core.types import CPU, Decoded, Params
from fedshift.wire.frame import Header, WireError
from fedshift.wire.reader import Part, Reader, as_dtype
from fedshift.wire.writer import Choice, expected

LIGHTEST, HEAVIEST = 1e-9, 1e18  # weights whose products and sums are safe in float32
MARGIN = 0.999  # of the largest number, so that rounding cannot exceed it


class Mean:
    """w = sum_k p_k w_k / sum_k p_k over the accepted frames, which are decoded piece by piece.

    Memory: one model, for any number of uploads. The whole frame is checked before any part is
    added, so a refused frame has no effect. An update counts as `base + update`. Integer tensors
    are neither averaged nor added to a base: those of the first frame are used. A run, which knows
    all uploads of a round, uses their elementwise median instead (`bounds.median_integers`).

    >>> from fedshift import Codec, Identity, pack
    >>> mean = Mean(like={"w": torch.zeros(2)})
    >>> for weight, w in (1.0, [0.0, 4.0]), (3.0, [4.0, 0.0]):
    ...     _ = mean.add(pack(Codec(Identity()), {"w": torch.tensor(w)}), weight)
    >>> mean.result(), mean.share
    ({'w': tensor([3., 1.])}, 0.0)
    """

    def __init__(self, like: Params, base: Params | None = None) -> None:
        self.like, self.base = like, base
        self._reader = Reader(like)
        self.count, self.weight = 0, 0.0  # frames accepted, and the sum of their p_k
        self.lossy_weight = self.update_weight = 0.0
        self._sum: Params = {}
        self._weights: dict[str, tuple[float, float]] = {}  # weight and update_weight of tensors with factors
        self._bound = dict.fromkeys(like, 0.0)  # on the magnitude of the sum
        self._most = {
            name: tuple(MARGIN * torch.finfo(dtype).max for dtype in (x.dtype, _wide(x.dtype)))
            for name, x in like.items()
            if x.is_floating_point()
        }
        self._taken = False
        if base is not None and all(x.device == CPU for x in base.values()):
            _ = self._base_reach  # an invalid base is an error now

    @cached_property
    def _base_reach(self) -> dict[str, float]:
        """Largest magnitude of each tensor of the base; computed on first use, because it takes time on a GPU."""
        return {} if self.base is None else _reach(self.base, self.like)

    @property
    def share(self) -> float:
        """Share of lossy uploads in the total weight: the paper's I/K."""
        return self.lossy_weight / self.weight if self.weight else 0.0

    def add(self, data: bytes | memoryview, weight: float = 1.0, codec: Choice | None = None) -> Header:
        """Add one frame, or raise a WireError and change nothing; `codec` as in `open`."""
        self._check(weight)
        return self._fold(self.open(data, codec), weight, {})

    def add_opened(self, frame: "Frame", weight: float = 1.0, factors: Mapping[str, float] | None = None) -> Header:
        """Add a frame that `open` returned; `factors` multiply the weight of some of its tensors."""
        self._check(weight)
        return self._fold(frame, weight, factors or {})

    def open(self, data: bytes | memoryview, codec: Choice | None = None) -> "Frame":
        """Read and check a frame without adding it; raise WireError if it does not fit the model.

        With a `codec`, a frame that is neither packed with it nor exact is refused before it is decoded.
        """
        header, parts = self._reader.open(data, expected(codec, self.like))
        if header.update and self.base is None:
            raise WireError("the frame contains an update, but the mean has no base to add it to")
        return Frame(header, parts)

    def _check(self, weight: float) -> None:
        if not LIGHTEST <= weight <= HEAVIEST:
            raise ValueError(f"weight={weight}: an upload's weight must be between {LIGHTEST:g} and {HEAVIEST:g}")
        if self._taken:
            raise ValueError("the mean was already taken; create a new Mean for the next one")

    def _fold(self, frame: "Frame", weight: float, factors: Mapping[str, float]) -> Header:
        header, parts = frame
        self._begin(CPU)
        bound = self._bounded({name: parts[name].reach for name in self._most}, weight, header.update, factors)
        for name, part in parts.items():
            total, tensor_weight = self._sum[name], weight * factors.get(name, 1.0)
            if total.dtype == torch.float64:  # weighted after, not in the float32 of a codebook
                for start, values in part.values():
                    total[start : start + len(values)].add_(values.double() * tensor_weight)
            elif total.is_floating_point():
                for start, values in part.values(tensor_weight):
                    total[start : start + len(values)].add_(values)  # += would write the slice twice
            elif not self.count:
                for start, values in part.values():
                    total[start : start + len(values)] = as_dtype(values, total.dtype)
        self._bound = bound
        self._count(weight, header.lossy, header.update, factors)
        return header

    def _count(self, weight: float, lossy: bool, update: bool, factors: Mapping[str, float]) -> None:
        for name in factors.keys() | self._weights.keys():
            total, updates = self._weights.get(name, (self.weight, self.update_weight))
            tensor_weight = weight * factors.get(name, 1.0)
            self._weights[name] = total + tensor_weight, updates + tensor_weight * update
        self.count += 1
        self.weight += weight
        self.lossy_weight += weight * lossy
        self.update_weight += weight * update

    def _bounded(
        self, reach: Mapping[str, float], weight: float, update: bool, factors: Mapping[str, float]
    ) -> dict[str, float]:
        """Bounds on the sum with one more upload of magnitudes `reach`; WireError if the sum could overflow."""
        bound = dict(self._bound)
        for name, (most, most_sum) in self._most.items():
            far = reach[name] + (self._base_reach[name] if update else 0.0)
            bound[name] += weight * factors.get(name, 1.0) * far
            if bound[name] > most_sum:
                raise WireError(f"{name}: adding the frame could overflow the sum")
            if far > most:
                raise WireError(f"{name}: contains a number too large to be averaged in {self.like[name].dtype}")
        return bound

    def take(self, upload: Decoded, weight: float = 1.0, factors: Mapping[str, float] | None = None) -> None:
        """Add decoded weights, on their device; updates must include their base. `factors` as in `add_opened`."""
        params, factors = upload.params, factors or {}
        self._bound = self._bounded(upload.reach, weight, upload.update, factors)
        self._begin(next(iter(params.values())).device)
        for name, total in self._sum.items():
            if total.is_floating_point():
                total.add_(params[name].reshape(-1), alpha=weight * factors.get(name, 1.0))
            elif not self.count:
                total.copy_(params[name].reshape(-1))
        self._count(weight, upload.lossy, False, factors)

    def _begin(self, device: torch.device) -> None:
        if not self._sum:
            self._sum = {
                name: torch.zeros(x.numel(), dtype=_wide(x.dtype), device=device) for name, x in self.like.items()
            }

    def result(self) -> Params:
        """Return the mean, with the shapes, dtypes and devices of `like`; nothing can be added afterwards."""
        if self._taken or not self.count:
            raise ValueError("the mean was already taken" if self._taken else "the mean of no uploads is undefined")
        self._taken = True
        mean = {}
        for name, x in self.like.items():
            total = self._sum.pop(name).view(x.shape)
            if total.is_floating_point():
                weight, update_weight = self._weights.get(name, (self.weight, self.update_weight))
                total /= weight
                if self.base is not None and update_weight:
                    total += self.base[name].to(total) * (update_weight / weight)
            mean[name] = total.to(x)
        return mean


class Frame(NamedTuple):
    """A frame that was read and checked; its tensors are still coded."""

    header: Header
    parts: dict[str, Part]

    def decoded(self) -> "Frame":
        """The same frame with decoded values, for a frame that is read more than once."""
        return self._replace(parts={name: part.decoded() for name, part in self.parts.items()})


class UploadNorms(NamedTuple):
    """Norms of the change of an upload from a base, and its integer tensors."""

    trained: float  # |w_k - w| over trained tensors
    buffers: float  # the same over the other floating point tensors
    integers: Params


class Ruler:
    """Measure the distance of frames from a base, in float64 and piece by piece; tensors in `skipped` do not count.

    >>> from fedshift import Codec, Identity, pack
    >>> base = {"w": torch.zeros(2), "n": torch.tensor(1)}
    >>> frame = pack(Codec(Identity()), {"w": torch.tensor([3.0, -4.0]), "n": torch.tensor(7)})
    >>> Ruler(base, trained={"w"}).measure(Mean(base).open(frame))
    UploadNorms(trained=5.0, buffers=0.0, integers={'n': tensor(7)})
    """

    def __init__(self, base: Params, trained: Collection[str], skipped: Collection[str] = ()) -> None:
        self.base = {name: x.detach().to(CPU) for name, x in base.items()}
        self.flat = {name: x.reshape(-1) for name, x in self.base.items()}
        floats = [name for name, x in base.items() if x.is_floating_point() and x.numel() and name not in skipped]
        self.trained = [name for name in floats if name in trained]
        self.buffers = [name for name in floats if name not in trained]
        self.variances = [name for name in self.buffers if fnmatchcase(name, VARIANCES)]
        self.integers = [name for name, x in base.items() if not x.is_floating_point()]
        self._joint = {  # small tensors concatenated, by the first of their names
            names[0]: torch.cat([self.flat[name] for name in names])
            for names in (self.trained, self.buffers)
            if names and sum(self.flat[name].numel() for name in names) <= CHUNK
        }

    def measure(self, frame: Frame) -> UploadNorms:
        """Return the distances; raise WireError for a negative variance, with which a model has no finite output."""
        for name in self.variances:
            for start, values in frame.parts[name].values():
                known = self.flat[name][start : start + len(values)] if frame.header.update else 0.0
                if bool((values + known < 0).any()):
                    raise WireError(f"{name}: contains a negative variance")
        integers = {name: self._integers(name, frame.parts[name]) for name in self.integers}
        return UploadNorms(self._far(self.trained, frame), self._far(self.buffers, frame), integers)

    def _far(self, names: list[str], frame: Frame) -> float:
        """|w_k - w| over these tensors; a difference that overflows float32 is infinite."""
        if not names:
            return 0.0
        update, joint = frame.header.update, self._joint.get(names[0])
        values = [x for name in names if (x := frame.parts[name].whole) is not None] if joint is not None else []
        if joint is not None and len(values) == len(names):  # small and decoded: fastest as one tensor
            whole = torch.cat(values)
            return float(_norm(whole if update else whole - joint))
        norms = [
            _norm(values if update else values - self.flat[name][start : start + len(values)])
            for name in names
            for start, values in frame.parts[name].values()
        ]
        return float(_norm(torch.stack(norms)))

    def _integers(self, name: str, part: Part) -> Tensor:
        found = torch.empty_like(self.flat[name])
        for start, values in part.values():
            found[start : start + len(values)] = as_dtype(values, found.dtype)
        return found.view(self.base[name].shape)


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of a sum: float32 for shorter floats, otherwise the dtype itself."""
    return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype


def _reach(base: Params, like: Params) -> dict[str, float]:
    """Largest magnitude of each tensor of a base, which must be finite and have the shapes of `like`."""
    if {name: x.shape for name, x in base.items()} != {name: x.shape for name, x in like.items()}:
        raise ValueError("the base must have the names and shapes of the model")
    both = {name: ends(x if x.is_floating_point() else x.double()) if x.numel() else (0, 0) for name, x in base.items()}
    reach = {name: max(abs(low), abs(high)) for name, (low, high) in both.items()}
    if broken := [name for name, (low, high) in both.items() if not (math.isfinite(low) and math.isfinite(high))]:
        raise ValueError(f"the base contains NaN or infinity in {broken[0]}")
    return reach
