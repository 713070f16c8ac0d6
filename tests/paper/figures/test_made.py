"""The numbers behind figures 1, 2, 3, 4, 6 and 10."""

import pytest
import torch

from fedshift import Codec, Identity, KMeans, Uniform, pack
from fedshift.data.datasets import Dataset, load
from fedshift.models import PaperCNN
from fedshift.paper.figures import partitions, quantizing, shifting, system, training


def like_cifar10(examples: int = 2000) -> Dataset:
    """Random noise in the shapes of CIFAR-10, with equally many examples per label."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (examples, 3, 32, 32), dtype=torch.uint8, generator=generator)
    y = torch.arange(examples) % 10
    return Dataset("cifar10", x, y, x[:10], y[:10], 10, (0.5,) * 3, (0.25,) * 3)


def test_bytes_of_figure_1_are_lengths_of_real_uploads() -> None:
    setup, params = system.system(), PaperCNN().state_dict()
    assert setup.superior.bytes == setup.broadcast == len(pack(Codec(Identity()), params)) == 8_623_521
    assert setup.inferior.bytes == len(pack(Codec(KMeans(4)), params)) == 1_078_231
    assert (setup.superior.bits, setup.inferior.bits, setup.weights) == (32, 4, 2_155_872)
    assert (setup.cohort, setup.population, setup.epochs, setup.share) == (10, 100, 10, 0.5)
    assert setup.bytes_up == 5 * 8_623_521 + 5 * 1_078_231


@pytest.mark.parametrize(("bits", "size"), [(8, 25), (4, 13)])
def test_codes_follow_the_paper_s_formula_and_errors_are_below_half_a_step(bits: int, size: int) -> None:
    w = quantizing.kernel()
    weights = quantizing.coded(w, bits)
    low, high = float(w.min()), float(w.max())
    assert weights.codes == [round((x - low) / (high - low) * (2**bits - 1)) for x in w.tolist()]
    assert max(map(abs, weights.errors)) <= weights.step / 2 + 1e-7
    assert weights.bytes == size
    assert weights.value_of(weights.code_at(0.1)) == pytest.approx(0.1)


def test_histograms_contain_every_weight() -> None:
    first, last = training.course(load("digits"), epochs=2)
    for params in (first, last):
        w = params["fc1.weight"]
        counts = training.counted(w, KMeans(4), 1.01 * float(w.abs().max()))
        assert sum(counts.before) == sum(counts.after.values()) == w.numel()
        assert len(counts.after) == 16
        assert counts.spread == pytest.approx(float(w.std()), rel=1e-5)
    assert float(last["fc1.weight"].std()) > float(first["fc1.weight"].std())  # weights grow in training


def test_k_means_loses_less_than_uniform_codes() -> None:
    w = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    uniform, kmeans = (training.counted(w, quantizer, 5.0) for quantizer in (Uniform(4), KMeans(4)))
    assert kmeans.error == pytest.approx(0.0975, abs=0.003)  # the best 16 codes for normal weights lose 9.7 %
    assert uniform.error > 1.3 * kmeans.error


def test_cifar10_is_trained_with_the_paper_s_network() -> None:
    _, last = training.course(like_cifar10(), epochs=1, most=50)
    assert last[training.LAYER["cifar10"]].shape == (64, 32, 5, 5)


def test_the_shift_halves_the_mean_if_half_of_the_uploads_are_quantized() -> None:
    """(1, 3) exact and (5, 7) with two codes: the average (3, 5) with mean 4 becomes (1, 3)."""
    exact, coded = {"weight": torch.tensor([[1.0, 3.0]])}, {"weight": torch.tensor([[5.0, 7.0]])}
    frames = [pack(Codec(Identity()), exact), pack(Codec(Uniform(1)), coded)]
    result = shifting.aggregated(frames, exact)
    assert (result.layer, result.share, result.lossy, result.means) == ("weight", 0.5, [False, True], [2.0, 6.0])
    assert result.average.tolist() == [[3.0, 5.0]]
    assert result.shifted.tolist() == [[1.0, 3.0]]


def test_uploads_of_a_round_are_real_frames_of_both_kinds() -> None:
    frames = shifting.uploads(load("digits"))
    result = shifting.aggregated([frame for frame, _ in frames], frames[0][1])
    assert result.lossy == [False, True] * 5
    assert [len(set(w.flatten().tolist())) <= 16 for w in result.uploads] == result.lossy
    assert shifting.mean(result.average) == pytest.approx(sum(result.means) / 10, rel=1e-4)
    assert shifting.mean(result.shifted) == pytest.approx(shifting.mean(result.average) / 2, rel=1e-4)


def test_the_main_partition_splits_labels_by_parity() -> None:
    """2,000 examples in 100 shards of 20, two per client: every example is at two clients."""
    held, lossy = partitions.groups(like_cifar10())
    assert held.sum() == 2 * 2000
    assert held.sum(1).tolist() == [40] * 100
    assert lossy.tolist() == [False, True] * 50
    assert held[lossy][:, 0::2].sum() == held[~lossy][:, 1::2].sum() == 0
    assert ((held > 0).sum(1) <= 2).all()


@pytest.mark.parametrize("data", [load("digits"), like_cifar10()], ids=["digits", "cifar10"])
def test_dirichlet_partitions_contain_every_example_once(data: Dataset) -> None:
    found = partitions.mixes(data)
    assert list(found) == [0.1, 0.5, 100.0]
    labels = torch.bincount(data.y, minlength=10)
    for held in found.values():
        assert held.sum(0).tolist() == labels.tolist()
        assert held.shape == (10, 10)
    largest = [float((held / held.sum(1, keepdim=True)).amax(1).mean()) for held in found.values()]
    assert largest == sorted(largest, reverse=True)  # a small alpha gives a client few labels
