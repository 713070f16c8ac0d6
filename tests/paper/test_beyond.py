"""Filter centring compared with no shift and the paper's shift, and uplinks on the paper's task, from records."""

from pathlib import Path

from fedshift import Experiment
from fedshift.experiment.toml import merge
from fedshift.paper import beyond
from fedshift.paper.experiments import (
    BASE,
    EVERYTHING,
    Cell,
    all_quantized,
    contrasts,
    settings,
    uplinks,
    with_uplink,
)
from fedshift.paper.experiments import beyond as cells_of
from fedshift.paper.experiments import compressed as rows
from fedshift.paper.records import FinishedRun, Results
from fedshift.rounds.uplinks import expanded
from tests.paper.written import read, write

FEDAVG = contrasts()[0]


def test_cells_of_a_contrast_differ_only_in_the_shift() -> None:
    for contrast in contrasts():
        cells = (contrast.plain, contrast.layer, contrast.filter)
        experiments = [experiment(cell) for cell in cells]
        shifts = [config.shift for config in experiments]
        assert [shift.on for shift in shifts] == [False, True, True]
        assert (shifts[1].per, shifts[2].per, shifts[2].share) == ("layer", "filter", 1.0)
        rest = [config.model_dump(exclude={"shift", "name"}) for config in experiments]
        assert rest[0] == rest[1] == rest[2]


def test_only_the_selected_algorithms_and_shifts_are_run() -> None:
    names = [cell.name for cell in cells_of(EVERYTHING._replace(algorithms=("scaffold",), shift="on"))]
    assert names == ["scaffold_32+8_filter", "scaffold_32+8_shift"]
    assert all_quantized() in cells_of()
    assert len({cell.name for cell in cells_of()}) == len(cells_of()) == 3 * len(contrasts()) + 1


def test_rounds_to_a_score_end_with_the_first_ten_whose_mean_reaches_it(tmp_path: Path) -> None:
    """0.5 in rounds 1..20 and 0.7 afterwards: ten rounds reach 0.68 if nine of them have 0.7, at round 29."""
    folder = write(tmp_path, FEDAVG.plain, [0.5] * 20 + [0.7] * 780)
    assert beyond.rounds_to(FinishedRun(folder), 68.0) == 29
    assert beyond.rounds_to(FinishedRun(folder), 71.0) is None


def test_gains_are_paired_by_seed(tmp_path: Path) -> None:
    for seed, (plain, filtered) in enumerate([(0.70, 0.75), (0.60, 0.66)]):
        write(tmp_path, FEDAVG.plain, plain, seed)
        write(tmp_path, FEDAVG.filter, filtered, seed)
    write(tmp_path, FEDAVG.plain, 0.1, 2)  # without a counterpart
    line = beyond.centring_listing([FEDAVG], read(tmp_path)).as_dicts()[0]
    assert (line["no shift"], line["per layer"], line["per filter"]) == ("46.7 ± 32.1", "not run", "70.5 ± 6.4")
    assert (line["gain over no shift"], line["gain over per layer"]) == ("+5.5 (+5.0, +6.0)", "")
    assert line["seeds"] == "3/0/2"
    assert line["rounds to 68 %"] == "never / not run / never"


def test_a_run_with_all_clients_quantized_is_reported_if_it_exists(tmp_path: Path) -> None:
    assert len(beyond.centring_sentences(Results({}))) == 1
    write(tmp_path, all_quantized(), 0.62)
    sentence = beyond.centring_sentences(read(tmp_path))[1]
    assert sentence == "All clients at 4 bits, per filter with share 1: 62.0 % after 200 rounds (n = 1)."


def experiment(cell: Cell) -> Experiment:
    return Experiment(**merge(BASE, settings(cell, 0)))


def test_an_uplink_and_full_precision_differ_only_in_the_uplink() -> None:
    for row in rows():
        cell, exact = experiment(row.cell), experiment(row.exact)
        assert cell.model_dump(exclude={"uplink", "name"}) == exact.model_dump(exclude={"uplink", "name"})
        assert len(str(cell.uplink.bits).split("+")) == 2  # two groups: the same clients are drawn


def test_a_cell_of_a_named_uplink_has_its_settings() -> None:
    for name in ("lean", "extreme"):
        uplink, named = experiment(with_uplink(expanded(name))).uplink, Experiment(uplink=name).uplink
        assert uplink.model_dump(exclude={"bits"}) == named.model_dump(exclude={"bits"})
        assert uplink.bits == f"{named.bits}+{named.bits}"


def test_only_the_selected_uplinks_are_run() -> None:
    assert [row.label[0] for row in rows(EVERYTHING._replace(algorithms=("fedpaq",), shift="off"))] == [
        "32+4, random codes",
        "32+4, nearest codes",
    ]
    assert len({cell.name for cell in uplinks()}) == len(uplinks()) == 10


def test_differences_are_against_the_same_rule_and_against_fedavg(tmp_path: Path) -> None:
    """Three seeds, 0.2 and 0.4 points below, 0.3 above: mean -0.1, margin 4.303 * 0.379 / sqrt(3) = 0.94."""
    plain, centred, lean, *_ = rows()
    for seed, (fedavg, exact, ours) in enumerate([(0.70, 0.75, 0.748), (0.71, 0.76, 0.756), (0.69, 0.75, 0.753)]):
        write(tmp_path, plain.cell, fedavg, seed)
        write(tmp_path, centred.cell, exact, seed)
        write(tmp_path, lean.cell, ours, seed, sent=25)
    lines = beyond.uplinks_listing([plain, centred, lean], read(tmp_path)).as_dicts()
    assert [line["accuracy"] for line in lines] == ["70.0 ± 1.0", "75.3 ± 0.6", "75.2 ± 0.4"]
    assert [line["against the same rule"] for line in lines] == ["", "", "-0.1 (-0.2, -0.4, +0.3)"]
    assert lines[2]["95 % interval"] == "-1.0 to +0.8"
    assert [line["against FedAvg"] for line in lines] == ["", "+5.3 (+5.0, +5.0, +6.0)", "+5.2 (+4.8, +4.6, +6.3)"]
    assert [line["times fewer bytes"] for line in lines] == ["1.0", "1.0", "40.0"]
    assert (lines[2]["GB up"], lines[2]["GB up and down"]) == ("2e-05", "0.00082")


def test_an_uplink_that_was_not_run_is_marked(tmp_path: Path) -> None:
    write(tmp_path, rows()[0].cell)
    line = beyond.uplinks_listing(rows()[2:3], read(tmp_path)).as_dicts()[0]
    assert (line["accuracy"], line["seeds"], line["GB up"]) == ("not run", "0", "")
