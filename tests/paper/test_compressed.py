"""Uplinks on the paper's task, from records."""

from pathlib import Path

from fedshift import Experiment
from fedshift.experiment.toml import merge
from fedshift.paper import compressed
from fedshift.paper.experiments import BASE, EVERYTHING, Cell, settings, uplinks, with_uplink
from fedshift.paper.experiments import compressed as rows
from tests.paper.written import read, write


def experiment(cell: Cell) -> Experiment:
    return Experiment(**merge(BASE, settings(cell, 0)))


def test_an_uplink_and_full_precision_differ_in_the_uplink_alone() -> None:
    for one in rows():
        cell, exact = experiment(one.cell), experiment(one.exact)
        assert cell.model_dump(exclude={"uplink", "name"}) == exact.model_dump(exclude={"uplink", "name"})
        assert len(str(cell.uplink.bits).split("+")) == 2  # two groups: the same clients are drawn


def test_a_cell_of_a_named_uplink_has_its_settings() -> None:
    for name in ("lean", "extreme"):
        ours, named = experiment(with_uplink(name)).uplink, Experiment(uplink=name).uplink
        assert ours.model_dump(exclude={"bits"}) == named.model_dump(exclude={"bits"})
        assert ours.bits == f"{named.bits}+{named.bits}"


def test_a_part_of_the_uplinks_is_run() -> None:
    assert [one.what[0] for one in rows(EVERYTHING._replace(algorithms=("fedpaq",), shift="off"))] == [
        "32+4, random codes",
        "32+4, nearest codes",
    ]
    assert len({cell.name for cell in uplinks()}) == len(uplinks()) == 8


def test_differences_are_against_the_same_rule_and_against_fedavg(tmp_path: Path) -> None:
    """Three seeds: 0.2 and 0.4 points below, 0.3 above: -0.1, half an interval of 4.303 * 0.379 / sqrt(3) = 0.94."""
    plain, centred, lean, *_ = rows()
    for seed, (fedavg, exact, ours) in enumerate([(0.70, 0.75, 0.748), (0.71, 0.76, 0.756), (0.69, 0.75, 0.753)]):
        write(tmp_path, plain.cell, fedavg, seed)
        write(tmp_path, centred.cell, exact, seed)
        write(tmp_path, lean.cell, ours, seed, sent=25)
    lines = compressed.listing([plain, centred, lean], read(tmp_path)).as_dicts()
    assert [line["accuracy"] for line in lines] == ["70.0 ± 1.0", "75.3 ± 0.6", "75.2 ± 0.4"]
    assert [line["against the same rule"] for line in lines] == ["", "", "-0.1 (-0.2, -0.4, +0.3)"]
    assert lines[2]["95 % interval"] == "-1.0 to +0.8"
    assert [line["against FedAvg"] for line in lines] == ["", "+5.3 (+5.0, +5.0, +6.0)", "+5.2 (+4.8, +4.6, +6.3)"]
    assert [line["times fewer"] for line in lines] == ["1.0", "1.0", "40.0"]
    assert (lines[2]["GB up"], lines[2]["GB up and down"]) == ("2e-05", "0.00082")


def test_what_was_not_run_is_marked(tmp_path: Path) -> None:
    write(tmp_path, rows()[0].cell)
    line = compressed.listing(rows()[2:3], read(tmp_path)).as_dicts()[0]
    assert (line["accuracy"], line["seeds"], line["GB up"]) == ("not run", "0", "")
