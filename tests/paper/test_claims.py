"""Claims answered from records whose answers are known."""

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
    told = answers(read(tmp_path))
    assert len(told) == len(CLAIMS) + 1 == 16
    assert {one.answer for one in told} == {"not tested"}


def test_the_shift_helps_where_every_gain_is_above_zero(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.02, 0.03)):
        write(tmp_path, mixed("fedpaq", 4, False), 0.60, seed)
        write(tmp_path, mixed("fedpaq", 4, True), 0.60 + gain, seed)
    answer, why = answered(tmp_path)["the shift helps in every cell"]
    assert answer == "yes"
    # mean gain 2.5, standard error 0.5 points, times 12.706
    assert why == (
        "it gains in 1 of the 1 cells run (the tables have 50): from +2.5 (FedPAQ 32+4 shifted) to +2.5 points "
        "(FedPAQ 32+4 shifted); 1 within noise, 0 of one seed"
    )
    write(tmp_path, dirichlet("kmeans", 0.1, 4, False), 0.55)
    write(tmp_path, dirichlet("kmeans", 0.1, 4, True), 0.54)
    answer, why = answered(tmp_path)["the shift helps in every cell"]
    assert answer == "no"
    assert "in 1 of the 2 cells" in why
    assert "from -1.0 (K-means 0.1 32+4 shifted)" in why


def test_the_score_is_of_the_last_ten_rounds(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedavg", 32, False), [0.9] * 790 + [0.5] * 9 + [0.6])
    record = read(tmp_path).of(mixed("fedavg", 32, False))[0]
    assert (round(record.score, 6), record.last) == (51.0, 60.0)


def test_algorithms_are_ranked_where_all_four_were_run(tmp_path: Path) -> None:
    for name, score in zip(NAMES, (0.60, 0.65, 0.61, 0.63), strict=True):
        write(tmp_path, mixed(name, 4, False), score)
    for name, score in zip(NAMES, (0.66, 0.655, 0.666, 0.668), strict=True):
        write(tmp_path, mixed(name, 8, False), score)
    write(tmp_path, mixed("fedpaq", 7, False), 0.654)
    told = answered(tmp_path)
    assert told["FedAvg is lowest"][0] == "no"  # as in the paper's own table, at 8 bits
    assert told["Fed-EF is best at 4 bits"][0] == "yes"
    assert "32+4: FedPAQ 60.0, Fed-EF 65.0, FedProx 61.0, SCAFFOLD 63.0" in told["Fed-EF is best at 4 bits"][1]
    assert told["SCAFFOLD is best elsewhere"][0] == "yes"
    assert told["all are alike at 8 bits"] == (
        "yes",
        "1.3 points between the best and the worst at 32+8, without the shift",
    )
    assert told["accuracy rises with bits, then saturates"] == (
        "yes",
        "from 4 to 8 bits and of that from 7 to 8: FedPAQ +6.0, +0.6",
    )


def test_five_bits_against_full_precision(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 5, True), 0.669)
    assert answered(tmp_path)["5-bit FedShift beats full-precision FedAvg"][0] == "not tested"
    write(tmp_path, mixed("fedavg", 32, False), 0.662)
    answer, why = answered(tmp_path)["5-bit FedShift beats full-precision FedAvg"]
    assert (answer, "66.9, FedAvg 32+32 66.2: +0.7 points (one seed: noise unknown)" in why) == ("yes", True)


def test_predictions_are_held_against_the_control(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 4, False), predicted=ODD)
    write(tmp_path, mixed("fedavg", 32, False), predicted=ODD)
    write(tmp_path, mixed("fedpaq", 4, True), predicted=EVEN)
    told = answered(tmp_path)
    assert told["predictions lean to the quantized clients' labels"][0] == "yes"
    assert told["mixed precision itself is the cause"][0] == "no"  # the control leans as much
    assert "60.0 ± 0.0 % at 32+4, 60.0 ± 0.0 % at 32+32" in told["mixed precision itself is the cause"][1]
    assert told["the shift evens predictions out"][0] == "yes"


def test_a_difference_within_two_standard_errors_is_none() -> None:
    """1, 3 and 5 have mean 3 and standard error 2 / sqrt(3) = 1.155."""
    some = Blocks({(0, i): x for i, x in enumerate((1.0, 3.0, 5.0))})
    assert round(some.uncertainty, 3) == 1.155
    assert some.above(0.6)
    assert not some.above(0.7)
    assert some.minus(Blocks({(0, 0): 1.0, (0, 2): 4.0, (1, 1): 9.0})).values == {(0, 0): 0.0, (0, 2): 1.0}


def test_movement_is_compared_layer_by_layer(tmp_path: Path) -> None:
    fading = [1.0] * 400 + [0.1] * 400
    write(tmp_path, mixed("fedpaq", 4, False), figures={"step": 2.0, "drift": 2.0})
    write(tmp_path, mixed("fedpaq", 4, True), figures={"step": 1.0, "drift": 2.5, "mean_after": fading})
    told = answered(tmp_path)
    assert told["divergence between rounds shrinks"][0] == "yes"
    assert "32+4: conv1.weight 0.50, fc2.weight 0.50" in told["divergence between rounds shrinks"][1]
    assert told["client drift shrinks"][0] == "no"
    assert told["the mean weight goes to zero"][0] == "yes"
    assert "conv1.weight 0.10, 0.10" in told["the mean weight goes to zero"][1]


def test_quantizers_and_the_advice(tmp_path: Path) -> None:
    for quantizer, four, eight in (("uniform", 0.20, 0.64), ("kmeans", 0.53, 0.65)):
        write(tmp_path, dirichlet(quantizer, 0.1, 4, False), four)
        write(tmp_path, dirichlet(quantizer, 0.1, 8, False), eight)
    told = answered(tmp_path)
    assert told["uniform matches K-means from 6 bits"][0] == "yes"
    assert told["uniform fails at 4 bits"][0] == "yes"
    answer, why = told["the advice: 8-bit uniform on good links, 4-bit K-means on poor ones"]
    # a million bytes more and 5 ms less: 200 MB/s
    assert (answer, "K-means is there first below 200 MB/s" in why, "-1.0 points or more" in why) == ("yes", True, True)
