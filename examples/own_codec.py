# ruff: noqa: T201
"""A codec of your own: each value becomes zero, or the nearest power of two times the largest magnitude of its tensor.

    q(x) = max|x| sgn(x) 2^-k,  k = 0 .. count - 1, or 0

Output: bytes per upload and accuracy of exact uploads, of this codec passed as an object, and of the same codec named
in own_codec.toml. From this folder, `fedshift run own_codec.toml` trains and records it.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from fedshift import Codec, Experiment, Uplink, run
from fedshift.codecs import Lookup, Range


@dataclass(frozen=True)
class Powers(Lookup, number=130):
    count: int

    def parameters(self) -> bytes:
        return bytes([self.count])  # all that a decoder needs

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        if len(parameters) != 1:
            raise ValueError(f"Powers has {len(parameters)} bytes of parameters instead of 1")
        return cls(parameters[0])

    def width(self, n: int) -> int:
        return 1  # number of side data: the largest magnitude

    def levels(self, n: int) -> int:
        return 2 * self.count + 1

    def table(self, side: Tensor) -> Tensor:
        sizes = self._sizes(side)
        return side * torch.stack([-sizes, sizes], dim=1).flatten()[1:]  # 0, then both signs of each power

    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        size, largest, sizes = x.abs(), x.abs().amax(1, keepdim=True), self._sizes(x)
        if not largest.isfinite().all():
            raise ValueError("contains NaN or infinity, which cannot be quantized")
        place = torch.bucketize(torch.where(largest > 0, size / largest, 0.0), (sizes[1:] + sizes[:-1]) / 2)
        return (2 * place - (x < 0).long()).clamp(min=0).to(torch.uint8), largest

    def _sizes(self, like: Tensor) -> Tensor:
        return torch.tensor([0.0, *(2.0**-k for k in reversed(range(self.count)))], device=like.device)


def powers(count: int = 3) -> Codec:
    return Codec(Powers(count), Range())


def show(name: str, experiment: Experiment, uplink: Uplink | None = None) -> None:
    *_, last = run(experiment, uplink=uplink)
    print(f"{name} {sum(last.bytes_up) // last.arrived:6,} bytes, accuracy {last.accuracy:.3f}")


if __name__ == "__main__":
    settings = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    show("exact             ", Experiment(**settings | {"uplink": {}}))
    show("mine, as an object", Experiment(**settings | {"uplink": {}}), Uplink(powers(4), update=True, feedback=True))
    show("mine, by its name ", Experiment(**settings))
