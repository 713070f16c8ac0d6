"""Filter centring beside no shift and the paper's shift, from records."""

from pathlib import Path

from fedshift import Experiment
from fedshift.experiment.toml import merge
from fedshift.paper import beyond
from fedshift.paper.experiments import (
    BASE,
    EVERYTHING,
    all_quantized,
    contrasts,
    settings,
)
from fedshift.paper.experiments import beyond as cells_of
from fedshift.paper.records import Record, Results
from tests.paper.written import read, write

FEDAVG = contrasts()[0]


def test_a_contrast_differs_in_the_shift_alone() -> None:
    for one in contrasts():
        made = [Experiment(**merge(BASE, settings(cell, 0))) for cell in (one.plain, one.layer, one.filter)]
        shifts = [experiment.shift for experiment in made]
        assert [shift.on for shift in shifts] == [False, True, True]
        assert (shifts[1].per, shifts[2].per, shifts[2].share) == ("layer", "filter", 1.0)
        bare = [experiment.model_dump(exclude={"shift", "name"}) for experiment in made]
        assert bare[0] == bare[1] == bare[2]


def test_only_the_algorithms_and_shifts_that_are_asked_for_are_run() -> None:
    names = [cell.name for cell in cells_of(EVERYTHING._replace(algorithms=("scaffold",), shift="on"))]
    assert names == ["scaffold_32+8_filter", "scaffold_32+8_shift"]
    assert all_quantized() in cells_of()
    assert len({cell.name for cell in cells_of()}) == len(cells_of()) == 3 * len(contrasts()) + 1


def test_rounds_to_a_score_end_the_first_ten_whose_mean_reaches_it(tmp_path: Path) -> None:
    """Of 0.5 in rounds 1..20 and 0.7 afterwards, ten rounds reach 0.68 with nine of the latter: round 29."""
    folder = write(tmp_path, FEDAVG.plain, [0.5] * 20 + [0.7] * 780)
    assert beyond.rounds_to(Record(folder), 68.0) == 29
    assert beyond.rounds_to(Record(folder), 71.0) is None


def test_gains_are_those_of_the_same_seeds(tmp_path: Path) -> None:
    for seed, (plain, filtered) in enumerate([(0.70, 0.75), (0.60, 0.66)]):
        write(tmp_path, FEDAVG.plain, plain, seed)
        write(tmp_path, FEDAVG.filter, filtered, seed)
    write(tmp_path, FEDAVG.plain, 0.1, 2)  # has no counterpart
    line = beyond.listing([FEDAVG], read(tmp_path)).as_dicts()[0]
    assert (line["no shift"], line["per layer"], line["per filter"]) == ("46.7 ± 32.1", "not run", "70.5 ± 6.4")
    assert (line["over no shift"], line["over per layer"], line["seeds"]) == ("+5.5 (+5.0, +6.0)", "", "3/0/2")
    assert line["rounds to 68 %"] == "never / not run / never"


def test_a_run_with_every_client_quantized_is_named_once_it_is_there(tmp_path: Path) -> None:
    assert len(beyond.sentences(Results({}))) == 1
    write(tmp_path, all_quantized(), 0.62)
    sentence = beyond.sentences(read(tmp_path))[1]
    assert sentence == "All clients at 4 bits, per filter with share 1: 62.0 % after 200 rounds (n = 1)."
