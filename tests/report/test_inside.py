"""The section "What happened during training?"."""

from pathlib import Path
from typing import Any, TypeVar

import pytest

from fedshift import Experiment
from fedshift.experiment.links import group_bits
from fedshift.report.charts import Choice, Curves, Heat, Histograms, Section
from fedshift.report.inside import section
from fedshift.report.lines import grouped
from tests.report.test_lines import read
from tests.report.written import settings, write, write_clients, write_histograms

Part = TypeVar("Part", Curves, Heat, Choice)


def inside(*folders: Path) -> Section:
    return section(grouped(read(list(folders))).strands)


def part(of: Section, name: str, kind: type[Part]) -> Part:
    (found,) = [one for one in of.parts if one.name == name]
    assert isinstance(found, kind)
    return found


def test_scores_and_losses_are_averaged_over_ten_rounds(tmp_path: Path) -> None:
    ramp = [t / 100 for t in range(1, 21)]
    made = inside(write(tmp_path / "run", settings(), ramp, figures={"loss": ramp}))
    for name in ("score", "loss"):
        (curve,) = part(made, name, Curves).panels[0].curves
        assert curve.y[0] == 0.01
        assert curve.y[-1] == pytest.approx(0.155)  # 0.11, 0.12, ... 0.20


def test_a_layer_has_a_curve_of_its_mean_before_the_shift(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", settings(shift=False), figures={"mean_before.fc.weight": 0.1})
    made = part(inside(plain, write(tmp_path / "shifted", settings())), "layer-mean", Curves)
    (panel,) = made.panels
    assert panel.title == "fc.weight"
    assert [(curve.line, curve.y[0], curve.label, curve.dashed) for curve in panel.curves] == [
        ("line-0", 0.1, "", False),
        ("line-1", 0.1, "", False),
        ("line-1", 0.2, "before the shift", True),
    ]


def test_the_spread_of_filter_means_is_drawn_if_it_is_recorded(tmp_path: Path) -> None:
    new, old = write(tmp_path / "new"), write(tmp_path / "old", settings(shift=False))
    _without_filters(old)
    (panel,) = part(inside(old, new), "layer-filters", Curves).panels
    assert [(curve.line, curve.y[0]) for curve in panel.curves] == [("line-1", 0.3)]
    assert "layer-filters" not in [one.name for one in inside(old).parts]


def _without_filters(folder: Path) -> None:
    """A record of an earlier version, without these columns."""
    rows = [line.split(",") for line in (folder / "rounds.csv").read_text().splitlines()]
    kept = [i for i, name in enumerate(rows[0]) if not name.startswith("filters_")]
    (folder / "rounds.csv").write_text("".join(",".join(row[i] for i in kept) + "\n" for row in rows))


def test_steps_and_drifts_are_drawn_by_layer(tmp_path: Path) -> None:
    made = inside(write(tmp_path / "run", layers=("conv.weight", "fc.weight")))
    assert [panel.title for panel in part(made, "layer-step", Curves).panels] == ["conv.weight", "fc.weight"]
    drift = part(made, "layer-drift", Curves).panels[1].curves
    assert [(curve.y[0], curve.dashed) for curve in drift] == [(0.4, False), (0.5, True)]


def test_predictions_are_given_for_each_rule_of_the_shift(tmp_path: Path) -> None:
    rules = [({"on": False}, 0.4), ({"per": "layer"}, 0.3), ({"per": "filter"}, 0.26)]
    folders = []
    for i, (shift, each) in enumerate(rules):
        shares = {"predicted.0": 0.5 - each, "predicted.1": each, "predicted.2": 0.5 - each, "predicted.3": each}
        folders.append(write(tmp_path / str(i), settings() | {"shift": shift}, figures=shares))
    (sentence,) = inside(*folders).answer
    assert sentence.endswith("is 80.0 % without shift, 60.0 % with the shift per layer and 52.0 % per filter.")


def test_many_layers_are_a_choice(tmp_path: Path) -> None:
    names = [f"layer {n}" for n in range(9)]
    made = part(inside(write(tmp_path / "run", layers=names)), "layer-step", Choice)
    assert [label for label, _ in made.of] == names
    assert made.of[3][1].title == "Distance between rounds: layer 3"


def test_runs_of_different_models_and_data_share_charts_where_possible(tmp_path: Path) -> None:
    made = inside(
        write(tmp_path / "a", settings(model={"name": "mlp"}), layers=("fc.weight", "out.weight")),
        write(tmp_path / "b", settings(model={"name": "paper-cnn"}), layers=("fc.weight", "conv.weight")),
        write(tmp_path / "c", settings(data={"name": "mnist"}, rounds=30), classes=6),
    )
    panels = {panel.title: len(panel.curves) for panel in part(made, "layer-step", Curves).panels}
    assert panels == {"fc.weight": 3, "out.weight": 1, "conv.weight": 1}
    assert len(part(made, "predicted", Heat).columns) == 4
    other = part(made, "predicted-2", Heat)
    assert (len(other.columns), other.title) == (6, "Predicted share of each label: mnist")


def test_labels_of_quantized_clients_alone_are_inferior(tmp_path: Path) -> None:
    """Labels 1 and 3 belong to clients of 4 bits; they are half of the data and a third of the predictions."""
    shares = {"predicted.0": 0.4, "predicted.1": 0.2, "predicted.2": 0.27, "predicted.3": 0.13}
    made = inside(write(tmp_path / "run", figures=shares))
    heat, curves = part(made, "predicted", Heat), part(made, "inferior", Curves)
    assert heat.marks == ["superior", "inferior", "superior", "inferior"]
    assert "A label is superior if 90 % of its examples or more belong" in heat.caption  # what the marks mean
    assert list(heat.values[0]) == pytest.approx(list(shares.values()))
    assert curves.level == 0.5
    assert curves.panels[0].curves[0].y[-1] == pytest.approx(0.33)
    assert made.answer == [
        "Inferior labels (at least 90 % of their examples belong to quantized clients) are 50.0 % of the data; "
        "their share of final predictions is 33.0 % with the shift per layer."
    ]


@pytest.mark.parametrize("kind", ["all alike", "mixed"])
def test_labels_have_no_mark_if_clients_upload_alike_or_share_them(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(bits="32+32" if kind == "all alike" else "32+4"))
    write_clients(folder, group=lambda client: "32 bit" if kind == "all alike" or client < 2 else "4 bit")
    made = inside(folder)
    assert part(made, "predicted", Heat).marks == ["", "", "", ""]
    assert "inferior" not in [one.name for one in made.parts]
    assert made.answer == []


def test_groups_with_names_have_the_bits_of_the_settings(tmp_path: Path) -> None:
    raw = settings(uplink={"bits": 32, "group": {"slow ones": {"share": 0.5, "bits": 8}}})
    folder = write(tmp_path / "run", raw)
    write_clients(folder, group=lambda client: "slow ones" if client % 2 else "others")
    assert part(inside(folder), "predicted", Heat).marks[:2] == ["superior", "inferior"]


@pytest.mark.parametrize(
    ("uplink", "names"),
    [
        ({"bits": "32+8", "codec": "qsgd"}, ["32 bit", "qsgd"]),
        ({"bits": "32+8", "policy": "adaquantfl"}, ["32 bit", "adaquantfl"]),
        ({"bits": "32+8+4", "codec": "qsgd"}, ["32 bit", "qsgd, 8 bit", "qsgd, 4 bit"]),
        ({"bits": "32+8+4", "codec": "missing:mine"}, ["32 bit", "mine, 8 bit", "mine, 4 bit"]),
        ({"bits": "32+8+4", "policy": "dadaquant"}, ["32 bit", "dadaquant, 8 bit", "dadaquant, 4 bit"]),
        ({"bits": "32+4+4", "codec": "qsgd"}, ["32 bit", "qsgd (2)", "qsgd (3)"]),
    ],
)
def test_clients_with_a_codec_or_a_policy_are_quantized(
    uplink: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    """Clients 0 and 2 have even labels and exact uploads, clients 1 and 3 odd labels."""
    experiment = Experiment(data={"clients": 4}, train={"cohort": 2}, uplink=uplink)
    assert list(group_bits(experiment)) == names
    folder = write(tmp_path / "run", settings(uplink=uplink))
    exact, *lossy = names
    write_clients(folder, group=lambda client: lossy[client // 2 % len(lossy)] if client % 2 else exact)
    assert part(inside(folder), "predicted", Heat).marks == ["superior", "inferior", "superior", "inferior"]


def test_errors_are_drawn_if_uploads_were_quantized(tmp_path: Path) -> None:
    exact = write(tmp_path / "exact", settings(bits="32+32"), figures={"error": 0.0})
    made = part(inside(exact, write(tmp_path / "coded", settings())), "error", Curves)
    assert [curve.line for curve in made.panels[0].curves] == ["line-1"]
    assert "error" not in [one.name for one in inside(exact).parts]


def test_weights_are_chosen_by_line_and_round(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_histograms(write(tmp_path / str(seed), settings(seed=seed)), [1, 10, 20], ("conv.weight", "fc.weight"))
    made = part(inside(tmp_path / "0", tmp_path / "1"), "weights", Choice)
    label = "fedavg, 32+4 bits, shift per layer, seed 0"
    assert [entry for entry, _ in made.of] == [f"{label}, round {number}" for number in (1, 10, 20)]
    chart = made.of[0][1]
    assert isinstance(chart, Histograms)
    assert [panel.title for panel in chart.panels] == ["conv.weight", "fc.weight"]
    assert list(chart.panels[0].edges) == [-1, -0.5, 0, 0.5, 1]
    assert chart.panels[0].counts == [("before the quantizer", [1, 2, 3, 4]), ("after", [0, 5, 0, 5])]


def test_without_classes_there_are_no_charts_of_labels(tmp_path: Path) -> None:
    made = inside(write(tmp_path / "run", classes=0))
    assert {"predicted", "inferior"}.isdisjoint(one.name for one in made.parts)


def test_missing_predictions_are_not_reported_as_numbers(tmp_path: Path) -> None:
    gone: list[float | None] = [0.25] * 19 + [None]
    assert inside(write(tmp_path / "run", figures={"predicted.1": gone})).answer == []


def test_a_label_has_a_mark_from_nine_tenths_on_and_none_without_examples(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    lines = ["client,group,examples,label.0,label.1,label.2,label.3", "0,32 bit,17,9,1,0,7", "1,4 bit,13,1,9,0,3", ""]
    (run / "clients.csv").write_text("\n".join(lines))
    assert part(inside(run), "predicted", Heat).marks == ["superior", "inferior", "", ""]


def test_rounds_without_a_mean_do_not_count_as_shifted(tmp_path: Path) -> None:
    seldom: list[float | None] = [None, 0.1] * 10
    same = {"mean_before.fc.weight": seldom, "mean_after.fc.weight": seldom}
    made = part(inside(write(tmp_path / "run", settings(shift=False), figures=same)), "layer-mean", Curves)
    assert [curve.label for curve in made.panels[0].curves] == [""]


def test_layers_of_a_run_without_rounds_hide_no_others(tmp_path: Path) -> None:
    begun = write(tmp_path / "b", settings(model={"name": "paper-cnn"}), layers=("conv.weight",), reached=0)
    made = inside(write(tmp_path / "a", settings(model={"name": "mlp"})), begun)
    assert [panel.title for panel in part(made, "layer-step", Curves).panels] == ["fc.weight"]
