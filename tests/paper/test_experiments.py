"""Cells and their settings."""

import tomllib

import pytest

from fedshift import Experiment
from fedshift.experiment.grid import expand
from fedshift.experiment.links import links
from fedshift.experiment.toml import SettingsError, merge
from fedshift.paper.experiments import (
    BASE,
    TABLES,
    CellChoice,
    all_quantized,
    chosen,
    figures,
    mixed,
    run_name,
    settings,
    sweep,
    table1,
    table2,
)
from fedshift.paper.published import TABLE1, TABLE2, TABLE3, Figure
from fedshift.paper.records import identity
from fedshift.runs.run import Run
from tests.runs import digits, small


def experiment(name: str) -> Experiment:
    cells = {cell.name: cell for table in TABLES.values() for cell in table()}
    return Experiment(**merge(BASE, settings(cells[name], 0)))


def test_the_published_tables_are_complete() -> None:
    assert len(TABLE1) == 4 * 5 * 2
    assert len(TABLE2) == 6 * 5 * 2
    assert TABLE1["fedef", 4, True] == Figure(65.5, 3.6)
    assert TABLE2["uniform", 0.5, 5, False] == Figure(43.2, 28.63)
    assert TABLE2["uniform", 100.0, 4, True].mean is None
    gains = [TABLE1[name, bits, True].mean - TABLE1[name, bits, False].mean for name, bits, _ in TABLE1]  # type: ignore[operator]
    assert (round(min(gains), 1), round(max(gains), 1)) == (0.7, 5.4)  # as stated in the paper
    assert TABLE3["KMeans(4)"].bytes == 1_059_000


def test_a_table_has_one_cell_per_figure() -> None:
    assert len(table1()) == 1 + 40
    assert len(table2()) == 60
    assert all(cell.published for cell in [*table1(), *table2()])
    assert {cell.published for cell in table2()} == set(TABLE2.values())


def test_table_1_is_run_in_order_of_importance() -> None:
    names = [cell.name for cell in table1()]
    assert names[:5] == ["fedavg_32+32", "fedpaq_32+4", "fedpaq_32+4_shift", "fedpaq_32+8", "fedpaq_32+8_shift"]
    assert [name.partition("_")[0] for name in names[5:17:4]] == ["fedef", "fedprox", "scaffold"]
    assert all("+5" in name or "+6" in name or "+7" in name for name in names[17:])


def test_cells_differ_from_the_preset_only_in_their_settings() -> None:
    paper = experiment("fedpaq_32+4_shift")
    assert (paper.train.rounds, paper.train.cohort, paper.train.epochs, paper.shift.max_share) == (800, 10, 10, 1.0)
    assert (paper.record.checkpoint, paper.record.histograms) == (25, 0)
    assert (paper.algorithm.name, paper.uplink.feedback, paper.uplink.send) == ("fedavg", False, "weights")
    assert experiment("fedpaq_32+4").shift.on is False
    assert experiment("fedef_32+4").uplink.feedback is True
    assert experiment("fedprox_32+4").algorithm.mu == 0.01
    assert experiment("scaffold_32+4").algorithm.control == "sent"
    assert experiment("fedavg_32+32").uplink.bits == "32+32"
    uniform = experiment("uniform_dirichlet-0.1_32+8")
    assert (uniform.uplink.quantizer, uniform.data.partition, uniform.data.alpha) == ("uniform", "dirichlet", 0.1)
    assert experiment("fedpaq_4+4_filter").train.rounds == 200
    assert experiment("fedpaq_4+4_warmup").shift.warmup == 100
    assert experiment("fedpaq_32+4_updates").uplink.send == "updates"
    assert experiment("grouped_32+4_filter").algorithm.args["exact"] == 0.75
    fedyogi = experiment("fedyogi_32+32").algorithm
    assert (fedyogi.name, fedyogi.args["lr"], fedyogi.args["tau"]) == ("fedyogi", 0.1, 0.01)


def test_all_clients_of_fed_ef_have_feedback() -> None:
    groups, _ = links(experiment("fedef_32+4"))
    assert [(group.uplink.lossy, group.uplink.feedback) for group in groups] == [(False, True), (True, True)]


def test_feedback_changes_nothing_on_exact_uploads() -> None:
    exact = {"uplink": {"bits": "32+32"}, "train": {"rounds": 2}}
    plain, fed = (Run(small(exact, {"uplink": {"feedback": on}}), data=digits()) for on in (False, True))
    assert [a.loss for a in plain] == [b.loss for b in fed]


def test_no_two_cells_are_the_same_experiment() -> None:
    cells = {cell.name: cell for table in TABLES.values() for cell in table()}
    assert len({identity(experiment(name)) for name in cells}) == len(cells)
    assert {cell.name for cell in figures()} < set(cells)


def test_settings_of_a_record_identify_its_cell() -> None:
    """A record has all arguments of its algorithm, a cell only those that it changes."""
    for cell in {cell.name: cell for table in TABLES.values() for cell in table()}.values():
        config = experiment(cell.name)
        assert identity(Experiment(**tomllib.loads(config.toml()))) == identity(config), cell.name


def test_names_of_runs_do_not_depend_on_other_runs() -> None:
    few = expand(sweep([(mixed("fedpaq", 4, True), 0)], None, {}))
    many = expand(sweep([(cell, seed) for seed in range(3) for cell in table1()], None, {}))
    assert few[0].name == "fedpaq_32+4_shift_seed-0"
    assert few[0] in many
    assert len({run.name for run in many}) == len(many) == 123
    assert run_name(all_quantized(), 2) == "fedpaq_4+4_filter_200-rounds_seed-2"


def test_options_select_cells() -> None:
    part = chosen(["8", "4"], ["fedpaq", "fedef"], "on")
    assert [cell.name for cell in table1(part)] == [
        f"{algorithm}_32+{bits}_shift" for algorithm in ("fedpaq", "fedef") for bits in (4, 8)
    ]
    assert chosen([], [], "both") == CellChoice()
    assert [cell.name for cell in table1(chosen([], ["fedavg"], "both"))] == ["fedavg_32+32"]
    assert table2(chosen([], ["fedef"], "both")) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((["9"], [], "both"), "--bits 9: must be among 4, 5, 6, 7, 8"),
        ((["four"], [], "both"), "--bits four: must be among"),
        (([], ["fedsgd"], "both"), "--algorithms fedsgd: must be among fedavg, fedpaq, fedef, fedprox, scaffold"),
        (([], [], "maybe"), "--shift maybe: must be both, on or off"),
    ],
)
def test_wrong_options_are_rejected(flags: tuple[list[str], list[str], str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        chosen(*flags)
