"""Filter centring, uplinks, other aggregation rules and server optimizers on the paper's task, from records."""

from pathlib import Path
from typing import Any

from fedshift import Experiment
from fedshift.experiment.toml import merge
from fedshift.paper import beyond
from fedshift.paper.experiments import (
    BASE,
    EVERYTHING,
    OPTIMIZERS,
    RIVALS,
    Cell,
    all_quantized,
    contrasts,
    mixed,
    optimizers,
    rivals,
    rivals_contrasts,
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
    for contrast in (*contrasts(), *rivals_contrasts()):
        experiments = [experiment(cell) for cell in contrast.cells]
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
        cell, named = with_uplink(expanded(name), mixed("fedavg", 32, False)), Experiment(uplink=name).uplink
        uplink = experiment(cell).uplink
        assert uplink.model_dump(exclude={"bits"}) == named.model_dump(exclude={"bits"})
        assert uplink.bits == f"{named.bits}+{named.bits}"


def test_only_the_selected_uplinks_are_run() -> None:
    assert [row.label[0] for row in rows(EVERYTHING._replace(algorithms=("fedpaq",), shift="off"))] == [
        "32+4, random codes",
        "32+4, nearest codes",
    ]
    assert len({cell.name for cell in uplinks()}) == len(uplinks()) == 13


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


def test_rules_of_aggregation_differ_from_fedavg_only_in_the_algorithm() -> None:
    found = rivals_contrasts()
    assert [contrast.bits for contrast in found] == ["32+4"] * 4 + ["32+8"] * 4
    for mean, *rules in (found[:4], found[4:]):
        assert mean.label[0] == "FedAvg"
        for (name, table), rule in zip(RIVALS.items(), rules, strict=True):
            for ours, theirs in zip(rule.cells, mean.cells, strict=True):
                check_algorithm(ours, theirs, name, table)


def test_server_optimizers_differ_from_fedavg_only_in_the_algorithm() -> None:
    fedavg, *others = optimizers()
    assert experiment(fedavg).shift.on is False
    for (name, table), cell in zip(OPTIMIZERS.items(), others, strict=True):
        check_algorithm(cell, fedavg, name, table)


def check_algorithm(ours: Cell, theirs: Cell, name: str, table: dict[str, Any]) -> None:
    """Check that a cell has this algorithm, is named after it, and otherwise has the settings of another cell."""
    cell, fedavg = experiment(ours), experiment(theirs)
    assert cell.model_dump(exclude={"algorithm", "name"}) == fedavg.model_dump(exclude={"algorithm", "name"})
    assert fedavg.algorithm.name == "fedavg"
    assert {key: getattr(cell.algorithm, key) for key in table} == table
    assert ours.name.partition("_")[::2] == (name, theirs.name.partition("_")[2])


def test_only_the_selected_rules_and_optimizers_are_run() -> None:
    def names(**changed: Any) -> list[str]:
        return [cell.name for cell in rivals(EVERYTHING._replace(**changed))]

    assert len(set(names())) == len(names()) == 3 * 2 * (1 + len(RIVALS)) + 1 + len(OPTIMIZERS)
    assert names(bits=(8,), algorithms=("fedpaq",), shift="off") == [
        "fedpaq_32+8",
        "fedhq_32+8",
        "agreement_32+8",
        "grouped_32+8",
    ]
    assert names(algorithms=("fedavg",)) == ["fedavg_32+32", "fedadam_32+32", "fedyogi_32+32", "fedexp_32+32"]
    assert names(bits=(5,), algorithms=("fedpaq",)) == names(algorithms=("fedavg",), shift="on") == []


def test_a_rule_is_compared_with_itself_and_with_fedavg_with_the_same_shift(tmp_path: Path) -> None:
    """Seeds 0 and 1 of FedAvg, seed 0 of FedHQ: only seed 0 is compared.

    FedHQ gains 63 - 60 = 3 per layer; it is 60 - 58 = 2 above FedAvg without a shift, and 63 - 64 = -1 per layer.
    """
    mean, fedhq, *_ = rivals_contrasts()
    for seed, (plain, layer) in enumerate([(0.58, 0.64), (0.70, 0.72)]):
        write(tmp_path, mean.plain, plain, seed)
        write(tmp_path, mean.layer, layer, seed)
    write(tmp_path, fedhq.plain, 0.60)
    write(tmp_path, fedhq.layer, 0.63)
    table = beyond.rivals_listing(rivals_contrasts(), read(tmp_path))
    start = ("FedAvg", "32+4", "2/2/0", "64.0 ± 8.5", "68.0 ± 5.7", "not run")
    assert table.rows[0] == (*start, "+4.0 (+6.0, +2.0)", "", "")
    start = ("FedHQ", "32+4", "1/1/0", "60.0", "63.0", "not run")
    assert table.rows[1] == (*start, "+3.0", "", "+2.0 / -1.0 / not run")
    start = ("FedHQ", "32+8", "0", "not run", "not run", "not run")
    assert table.rows[5] == (*start, "", "", "not run / not run / not run")


def test_server_optimizers_are_compared_with_fedavg(tmp_path: Path) -> None:
    """FedAdam has 0.5 in rounds 1..20 and 0.72 afterwards: ten rounds reach 0.68 if nine have 0.72, at round 29."""
    fedavg, fedadam, *_ = optimizers()
    write(tmp_path, fedavg, 0.70)
    write(tmp_path, fedavg, 0.60, 1)
    write(tmp_path, fedadam, [0.5] * 20 + [0.72] * 780)
    table = beyond.optimizers_listing(optimizers(), read(tmp_path))
    assert table.rows[0] == ("FedAvg", "32+32", "2", "65.0 ± 7.1", "", "never")
    assert table.rows[1] == ("FedAdam", "32+32", "1", "72.0", "+2.0", "29")
    assert table.rows[2] == ("FedYogi", "32+32", "0", "not run", "", "not run")
