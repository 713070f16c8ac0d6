"""Small tensors with equal shapes are encoded together: the codes of each alone, and errors that name the tensor."""

import pytest
import torch

from fedshift import Codec, KMeans, Params, PerBlock, PerChannel, Range, Stochastic, Uniform, pack, unpack
from fedshift.codecs import Hadamard
from fedshift.core import rng
from fedshift.wire import writer
from fedshift.wire.frame import Header

CODECS = [
    Codec(KMeans(3)),
    Codec(KMeans(3, random=True), Range(), PerChannel()),
    Codec(Stochastic(2), groups=PerBlock(50), transform=Hadamard()),
    Codec(Uniform(5), min_axes=0, integers=True),
]


def tensors() -> Params:
    """Two shapes in turn, an empty tensor, and integers."""
    g = torch.Generator().manual_seed(0)
    shapes = {f"{i}.{name}": shape for i in range(5) for name, shape in (("a", (8, 20)), ("b", (4, 4, 3)), ("c", (6,)))}
    made = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    return made | {"none": torch.zeros(0, 3), "count": torch.arange(12).view(3, 4), "last": made["3.a"] * 2}


@pytest.mark.parametrize("codec", CODECS)
def test_frames_do_not_depend_on_what_is_encoded_together(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    params, key = tensors(), rng.key(0, "test")
    frame = pack(codec, params, key=key)
    for together in (1, 400, 1000):
        monkeypatch.setattr(writer, "TOGETHER", together)
        assert pack(codec, params, key=key) == frame
    read = unpack(frame, params)
    for name, x in params.items():
        assert torch.equal(read[name], unpack(pack(codec, {name: x}, key=key), {name: x})[name]), name


def test_each_tensor_is_reported_once_with_its_decoded_values() -> None:
    params, codec, seen = tensors(), Codec(KMeans(3)), dict[str, torch.Tensor]()
    made = writer.Writer(codec, params)

    def coded(name: str, x: torch.Tensor, decoded: torch.Tensor) -> None:
        assert torch.equal(x, params[name])
        assert name not in seen
        seen[name] = decoded

    read = unpack(made.pack(params, Header(), coded=coded), params)
    assert {name for name, codec in made.codecs.items() if codec.quantizer.lossy} == set(seen)
    assert all(torch.equal(read[name], decoded) for name, decoded in seen.items())


@pytest.mark.parametrize("later", ["3.b", "3.c", "4.a", "last"])  # in another stack, exact, in the same stack
def test_an_error_names_the_first_tensor_that_cannot_be_encoded(later: str) -> None:
    params = tensors()
    params["3.a"][2, 2] = float("nan")
    params[later][1] = float("inf")
    with pytest.raises(ValueError, match=r"^3\.a: contains NaN or infinity"):
        pack(Codec(KMeans(3)), params)
