"""Answers to the claims, from records with known answers."""

from pathlib import Path

from fedshift.paper.claims import CLAIMS, answers
from fedshift.paper.dynamics import Blocks
from fedshift.paper.experiments import dirichlet, mixed
from fedshift.paper.uplinks import CodecUpload
from tests.paper.written import EVEN, read, write

NAMES = ("fedpaq", "fedef", "fedprox", "scaffold")
ODD = (0.08, 0.12) * 5  # 60 % of the predictions are odd
CODECS = [CodecUpload("KMeans(4)", 1e6, 0.010, 20.1), CodecUpload("Uniform(8)", 2e6, 0.005, 36.7)]


def answered(folder: Path) -> dict[str, tuple[str, str]]:
    return {claim: (answer, why) for claim, answer, why in answers(read(folder), CODECS)}


def test_nothing_is_tested_without_records(tmp_path: Path) -> None:
    found = answers(read(tmp_path))
    assert len(found) == len(CLAIMS) + 1 == 16
    assert {item.answer for item in found} == {"not tested"}


def test_the_shift_helps_if_every_gain_is_printed_as_more_than_zero(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.02, 0.03)):
        write(tmp_path, mixed("fedpaq", 4, False), 0.60, seed)
        write(tmp_path, mixed("fedpaq", 4, True), 0.60 + gain, seed)
    answer, why = answered(tmp_path)["the shift helps in every cell"]
    assert answer == "yes"
    # mean gain 2.5, standard error 0.5 points, times 12.706
    assert why == (
        "gain in 1 of 1 cells run (of 50 in the tables): from +2.5 (FedPAQ 32+4 with shift) to +2.5 points "
        "(FedPAQ 32+4 with shift); 1 within noise, 0 with one seed"
    )
    write(tmp_path, mixed("fedef", 4, False), 0.6)
    write(tmp_path, mixed("fedef", 4, True), 0.6006)
    assert answered(tmp_path)["the shift helps in every cell"][0] == "yes"
    write(tmp_path, mixed("fedprox", 4, False), 0.6)
    write(tmp_path, mixed("fedprox", 4, True), 0.6003)
    answer, why = answered(tmp_path)["the shift helps in every cell"]
    assert answer == "no"
    assert "in 2 of 3 cells" in why
    assert "from +0.0 (FedProx 32+4 with shift)" in why
    write(tmp_path, dirichlet("kmeans", 0.1, 4, False), 0.55)
    write(tmp_path, dirichlet("kmeans", 0.1, 4, True), 0.54)
    answer, why = answered(tmp_path)["the shift helps in every cell"]
    assert answer == "no"
    assert "in 2 of 4 cells" in why
    assert "from -1.0 (K-means 0.1 32+4 with shift)" in why


def test_the_score_is_the_mean_of_the_last_ten_rounds(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedavg", 32, False), [0.9] * 790 + [0.5] * 9 + [0.6])
    record = read(tmp_path).of(mixed("fedavg", 32, False))[0]
    assert (round(record.score, 6), record.last) == (51.0, 60.0)


def test_algorithms_are_ranked_if_all_four_were_run(tmp_path: Path) -> None:
    for name, score in zip(NAMES, (0.60, 0.65, 0.61, 0.63), strict=True):
        write(tmp_path, mixed(name, 4, False), score)
    for name, score in zip(NAMES, (0.66, 0.655, 0.666, 0.668), strict=True):
        write(tmp_path, mixed(name, 8, False), score)
    write(tmp_path, mixed("fedpaq", 7, False), 0.654)
    found = answered(tmp_path)
    assert found["FedAvg has the lowest accuracy"][0] == "no"  # as in the paper's own table, at 8 bits
    assert found["Fed-EF is best at 4 bits"][0] == "yes"
    assert "32+4: FedPAQ 60.0, Fed-EF 65.0, FedProx 61.0, SCAFFOLD 63.0" in found["Fed-EF is best at 4 bits"][1]
    assert found["SCAFFOLD is best at 5 to 8 bits"][0] == "yes"
    assert found["all algorithms are similar at 8 bits"] == (
        "yes",
        "1.3 points between the best and the worst at 32+8, without the shift",
    )
    assert found["accuracy rises with bits, then saturates"] == (
        "yes",
        "rise from 4 to 8 bits, and from 7 to 8: FedPAQ +6.0, +0.6",
    )


def test_five_bits_against_full_precision(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 5, True), 0.669)
    assert answered(tmp_path)["5-bit FedShift beats full-precision FedAvg"][0] == "not tested"
    write(tmp_path, mixed("fedavg", 32, False), 0.662)
    answer, why = answered(tmp_path)["5-bit FedShift beats full-precision FedAvg"]
    assert (answer, "66.9, FedAvg 32+32 66.2: +0.7 points (one seed: noise unknown)" in why) == ("yes", True)


def test_predictions_are_compared_with_the_control(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 4, False), predicted=ODD)
    write(tmp_path, mixed("fedavg", 32, False), predicted=ODD)
    write(tmp_path, mixed("fedpaq", 4, True), predicted=EVEN)
    found = answered(tmp_path)
    assert found["predictions are biased towards the labels of quantized clients"][0] == "yes"
    assert found["mixed precision is the cause of this bias"][0] == "no"  # the control has the same bias
    assert "60.0 ± 0.0 % at 32+4, 60.0 ± 0.0 % at 32+32" in found["mixed precision is the cause of this bias"][1]
    assert found["the shift balances predictions"][0] == "yes"


def test_a_difference_must_exceed_two_standard_errors() -> None:
    """1, 3 and 5 have mean 3 and standard error 2 / sqrt(3) = 1.155."""
    some = Blocks({(0, i): x for i, x in enumerate((1.0, 3.0, 5.0))})
    assert round(some.uncertainty, 3) == 1.155
    assert some.above(0.6)
    assert not some.above(0.7)
    assert some.minus(Blocks({(0, 0): 1.0, (0, 2): 4.0, (1, 1): 9.0})).values == {(0, 0): 0.0, (0, 2): 1.0}


def test_movement_is_compared_per_layer(tmp_path: Path) -> None:
    fading = [1.0] * 400 + [0.1] * 400
    write(tmp_path, mixed("fedpaq", 4, False), figures={"step": 2.0, "drift": 2.0})
    write(tmp_path, mixed("fedpaq", 4, True), figures={"step": 1.0, "drift": 2.5, "mean_after": fading})
    found = answered(tmp_path)
    assert found["the shift reduces divergence between rounds"][0] == "yes"
    assert "32+4: conv1.weight 0.50, fc2.weight 0.50" in found["the shift reduces divergence between rounds"][1]
    assert found["the shift reduces client drift"][0] == "no"
    assert found["with the shift, mean weights approach zero"][0] == "yes"
    assert "conv1.weight 0.10, 0.10" in found["with the shift, mean weights approach zero"][1]


def test_quantizers_and_the_advice(tmp_path: Path) -> None:
    for quantizer, four, eight in (("uniform", 0.20, 0.64), ("kmeans", 0.53, 0.65)):
        write(tmp_path, dirichlet(quantizer, 0.1, 4, False), four)
        write(tmp_path, dirichlet(quantizer, 0.1, 8, False), eight)
    found = answered(tmp_path)
    assert found["uniform matches K-means from 6 bits"][0] == "yes"
    assert found["uniform fails at 4 bits"][0] == "yes"
    answer, why = found["advice: 8-bit uniform on fast links, 4-bit K-means on slow ones"]
    # a million bytes more and 5 ms less: 200 MB/s
    assert answer == "yes"
    assert "4-bit K-means arrives first below 200 MB/s" in why
    assert "at 8 bits at least -1.0, at 4 bits at most -33.0 points" in why
