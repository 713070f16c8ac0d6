"""The running mean: hand-worked numbers, independence of order, memory, and refused frames."""

import subprocess
import sys

import pytest
import torch

from fedshift import Codec, Identity, KMeans, Mean, Params, PerChannel, Uniform, WireError, Zstd, pack, unpack


def stacked(codecs: list[Codec], weights: list[float], params: list[Params]) -> Params:
    """The same mean of stacked tensors, in float64."""
    decoded = [unpack(pack(codec, p), p) for codec, p in zip(codecs, params, strict=True)]
    total = sum(weights)
    return {
        name: sum(w * d[name].double() for w, d in zip(weights, decoded, strict=True)) / total  # type: ignore[misc]
        for name in params[0]
    }


def models(count: int) -> list[Params]:
    g = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(70, 5000, generator=g), "b": torch.randn(3, generator=g)} for _ in range(count)]


def test_hand_worked_mean() -> None:
    """(1 * 2 + 3 * 6) / 4 = 5."""
    mean = Mean({"x": torch.zeros(1)})
    mean.add(pack(Codec(Identity()), {"x": torch.tensor([2.0])}), weight=1)
    mean.add(pack(Codec(Identity()), {"x": torch.tensor([6.0])}), weight=3)
    assert mean.result()["x"].tolist() == [5.0]


def test_mixed_codecs_average_as_if_stacked() -> None:
    codecs = [Codec(Identity()), Codec(KMeans(4)), Codec(Uniform(3), Zstd()), Codec(Uniform(5), groups=PerChannel())]
    params, weights = models(4), [1.0, 2.0, 0.5, 3.0]
    mean = Mean(params[0])
    for codec, p, weight in zip(codecs, params, weights, strict=True):
        mean.add(pack(codec, p), weight)
    assert mean.share == pytest.approx(5.5 / 6.5)
    expected = stacked(codecs, weights, params)
    for name, x in mean.result().items():
        assert torch.allclose(x.double(), expected[name], atol=1e-6), name


def test_updates_are_added_to_their_base() -> None:
    """base 10; an update of +2 and weights of 20, equal parts: (12 + 20) / 2 = 16."""
    exact, like = Codec(Identity()), {"x": torch.tensor([10.0])}
    mean = Mean(like, base=like)
    mean.add(pack(exact, {"x": torch.tensor([2.0])}, update=True))
    mean.add(pack(exact, {"x": torch.tensor([20.0])}))
    assert mean.result()["x"].tolist() == [16.0]
    with pytest.raises(WireError, match="an update, but the mean has no base"):
        Mean(like).add(pack(exact, {"x": torch.tensor([2.0])}, update=True))


def test_integers_come_from_the_first_frame() -> None:
    mean = Mean({"n": torch.tensor(0)})
    for n in (7, 9):
        mean.add(pack(Codec(Identity()), {"n": torch.tensor(n)}))
    assert mean.result()["n"] == 7


def test_a_refused_frame_has_no_effect() -> None:
    params = models(2)
    good, bad = pack(Codec(KMeans(4)), params[0]), bytearray(pack(Codec(KMeans(4)), params[1]))
    bad[len(bad) // 2] ^= 1
    with_bad, without = Mean(params[0]), Mean(params[0])
    for mean in with_bad, without:
        mean.add(good)
    with pytest.raises(WireError, match="checksum"):
        with_bad.add(bytes(bad))
    assert (with_bad.count, with_bad.weight) == (1, 1.0)
    one, other = with_bad.result(), without.result()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_frame_that_would_overflow_the_sum_is_refused() -> None:
    mean = Mean({"x": torch.zeros(1)})
    frame = pack(Codec(Identity()), {"x": torch.tensor([3e38])})
    mean.add(frame)
    with pytest.raises(WireError, match="x: adding the frame could overflow the sum"):
        mean.add(frame)
    assert mean.result()["x"].isfinite().all()
    based = Mean({"x": torch.zeros(1)}, base={"x": torch.tensor([3e38])})
    with pytest.raises(WireError, match="x: adding the frame could overflow the sum"):
        based.add(pack(Codec(Identity()), {"x": torch.tensor([3e38])}, update=True))


def test_the_mean_is_never_infinite() -> None:
    double = {"x": torch.tensor([[3e38, -3e38]]).double()}
    mean = Mean(double)
    mean.add(pack(Codec(Uniform(4)), double), weight=10.0)  # beyond float32, not beyond float64
    assert torch.equal(mean.result()["x"].float(), double["x"].float())
    half = {"x": torch.tensor([6e4], dtype=torch.float16)}
    with pytest.raises(WireError, match=r"too large to be averaged in torch\.float16"):
        Mean(half, base=half).add(pack(Codec(Identity()), half, update=True))
    top = {"x": torch.tensor([torch.finfo(torch.float32).max])}
    with pytest.raises(WireError, match="too large to be averaged"):
        Mean(top).add(pack(Codec(Identity()), top), weight=0.04)


def test_short_floats_are_summed_in_float32() -> None:
    """2048 + 1 is not a float16: a sum in float16 would stay at 2048."""
    like = {"x": torch.zeros(1, dtype=torch.float16)}
    mean = Mean(like)
    for value in (2048.0, 1.0, 1.0, 1.0):
        mean.add(pack(Codec(Identity()), {"x": torch.tensor([value], dtype=torch.float16)}))
    assert mean.result()["x"].tolist() == [513.0]


def test_misuse_raises_an_error_that_states_the_reason() -> None:
    like = {"x": torch.zeros(1)}
    frame = pack(Codec(Identity()), like)
    for weight in (0, -1.0, float("nan"), float("inf"), 1e39, 1e-46):
        with pytest.raises(ValueError, match="weight must be between 1e-09 and 1e"):
            Mean(like).add(frame, weight)
    with pytest.raises(ValueError, match="names and shapes of the model"):
        Mean(like, base={"y": torch.zeros(1)})
    with pytest.raises(ValueError, match="NaN or infinity in x"):
        Mean(like, base={"x": torch.tensor([float("nan")])})
    with pytest.raises(ValueError, match="mean of no uploads"):
        Mean(like).result()
    mean = Mean(like)
    mean.add(frame)
    mean.result()
    with pytest.raises(ValueError, match="already taken"):
        mean.add(frame)
    with pytest.raises(ValueError, match="already taken"):
        mean.result()


PROGRAM = """
import hashlib, sys, torch
from fedshift import Cast, Codec, Identity, KMeans, Mean, PerChannel, Step, Stochastic, Ternary, Uniform, Zstd, pack
torch.set_num_threads(int(sys.argv[1]))
g = torch.Generator().manual_seed(0)
params = {"w": torch.randn(300, 1000, generator=g), "v": torch.randn(30, 100, generator=g)}
from fedshift.core import rng
digest, mean = hashlib.sha256(), Mean(params)
some = Uniform(5), KMeans(4), KMeans(8), KMeans(6, exact=True), Stochastic(3), Step(rate=0.5), Ternary()
for quantizer in *some, Cast("float16"), Identity():
    for codec in Codec(quantizer), Codec(quantizer, Zstd()), Codec(quantizer, groups=PerChannel()):
        frame = pack(codec, params, key=rng.key(0, "x"))
        mean.add(frame, 0.3)
        digest.update(frame)
for x in mean.result().values():
    digest.update(x.numpy().tobytes())
print(digest.hexdigest())
"""


def test_the_bytes_do_not_depend_on_the_number_of_threads() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM, threads], capture_output=True, text=True, check=True).stdout
        for threads in ("1", "2", "1")
    ]
    assert len(set(runs)) == 1
