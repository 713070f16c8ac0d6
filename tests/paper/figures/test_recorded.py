"""Numbers of figures 5, 7, 8 and 9, which are drawn from records."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.algorithms import shorter
from fedshift.core.files import RunError
from fedshift.paper.experiments import dirichlet, filtered, mixed, rival
from fedshift.paper.figures import fence, predictions
from fedshift.paper.figures.curves import across, coloured, curve, score
from fedshift.paper.figures.fence import LayerMeans, means, ratios, spread, subtracted
from fedshift.paper.figures.records import Source, found, panels
from fedshift.paper.publish import publish
from fedshift.paper.records import FinishedRun
from tests.paper.written import write
from tests.report.written import settings
from tests.report.written import write as write_record
from tests.runs import FEDAVG, go, small


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs, with and without the shift."""
    out = tmp_path_factory.mktemp("runs")
    for on in (True, False):
        go(
            small(FEDAVG, {"shift": {"on": on, "per": "layer"}, "train": {"rounds": 12, "selection": "stratified"}}),
            out / f"shift-{on}",
        )
    return out


def test_the_fence_agrees_with_the_theorem() -> None:
    """I/K = 0.5: at 4/3 of the previous mean; I/K = 1: at twice the previous mean."""
    assert [fence.fence(0.5), fence.fence(1.0)] == pytest.approx([4 / 3, 2.0])
    for share in (0.25, 0.5, 1.0):
        assert fence.gain(share, fence.fence(share)) == pytest.approx(0, abs=1e-12)
        for ratio in (-1.0, -0.1, 0.1, 0.9, 1.1, 1.4, 2.5):
            assert (fence.gain(share, ratio) > 0) == shorter(share, 1.0, ratio)
            assert (fence.gain(share, ratio) > 0) == (not 0 < ratio < fence.fence(share))


def test_steps_of_a_real_run_lie_on_the_curve() -> None:
    measured = fence.steps()
    assert len(measured) == 30 * 3
    assert all(step.right for step in measured)
    for step in measured:
        assert step.gain == pytest.approx(fence.gain(step.share, step.ratio), rel=1e-6, abs=1e-6)


def test_ratios_of_a_record_agree_with_the_recorded_comparison(ran: Path) -> None:
    """The run compares the means in full precision when it aggregates."""
    for folder in sorted(ran.iterdir()):
        record = FinishedRun(folder)
        for layer in record.layers("shorter"):
            computed = [item.shorter for item in means(record, layer)]
            assert computed == [bool(x) for x in record.column(f"shorter.{layer}")[1:]]


def test_a_published_record_has_the_same_ratios(ran: Path, tmp_path: Path) -> None:
    """The mean before the shift is computed from three digits of the mean after it."""
    run = FinishedRun(ran / "shift-True")
    place, _ = publish(run.folder, tmp_path)
    for a, b in zip(means(run, "fc1.weight"), means(FinishedRun(place), "fc1.weight"), strict=True):
        assert b.ratio == pytest.approx(a.ratio, rel=0.02)
        assert b.share == a.share == 0.5


def test_the_share_is_capped_and_ramped_as_in_the_rule(tmp_path: Path) -> None:
    config = {"shift": {"max_share": 0.4, "warmup": 4}, "train": {"selection": "stratified"}}
    go(small(FEDAVG, config), tmp_path / "run")
    record = FinishedRun(tmp_path / "run")
    assert [subtracted(record, t, 0.5) for t in (1, 2, 4, 8)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    assert means(record, "fc1.weight")[0].share == pytest.approx(0.2)


def test_ratios_of_a_panel_have_its_share_layers_and_lines(ran: Path) -> None:
    source = Source(panels(found(ran)[0]), ran)
    found_ratios = ratios(source.pair)
    assert (found_ratios.share, found_ratios.layers) == (0.5, ["fc1.weight", "fc2.weight"])
    assert list(found_ratios.lines) == ["without shift", "with shift"]
    with pytest.raises(RunError, match="at least three rounds"):
        spread([LayerMeans(0.5, 1.0, 1.0)])


def test_runs_are_grouped_into_lines_and_panels(tmp_path: Path) -> None:
    """Seeds form a line, shifts a panel; 32+32 bits are drawn in every panel."""
    for seed in (0, 1):
        write(tmp_path, mixed("fedpaq", 8, False), 0.7, seed)
    for cell in (
        mixed("scaffold", 4, True),
        mixed("fedavg", 32, False),
        mixed("fedpaq", 8, True),
        mixed("fedef", 4, True),
    ):
        write(tmp_path, cell, 0.6)
    write(tmp_path, replace(mixed("fedpaq", 4, True), rounds=250), 0.5)
    made = panels(found(tmp_path)[0])
    assert [panel.title for panel in made] == [
        "FedPAQ, 32+4 bits",
        "FedPAQ, 32+8 bits",
        "Fed-EF, 32+4 bits",
        "SCAFFOLD, 32+4 bits",
    ]
    paq = made[1]
    assert paq.plain is not None
    assert [len(line.records) for line in paq.lines] == [2, 1]
    assert all(panel.exact and panel.exact.label == "32+32 bits, without shift" for panel in made)
    source = Source(made, tmp_path)
    assert source.pair is paq  # the only panel with both
    assert source.drawn([paq]) == f"4 runs of 800 rounds in {tmp_path}"
    assert source.about(made) == "CIFAR-10, 250 to 800 rounds, 1 to 2 seeds per line"
    rounds, (values, _) = curve(paq.plain, score)
    assert rounds == list(range(1, 801))
    assert values == pytest.approx([70.0] * 800)


def test_the_panel_with_more_seeds_is_drawn(tmp_path: Path) -> None:
    for shift in (False, True):
        write(tmp_path, dirichlet("kmeans", 0.1, 4, shift))
        for seed in range(2):
            write(tmp_path, mixed("fedpaq", 4, shift), seed=seed)
    pair = Source(panels(found(tmp_path)[0]), tmp_path).pair
    names = [f"fedpaq_32+4{shift}_seed-{seed}" for shift in ("", "_shift") for seed in range(2)]
    assert sorted(record.folder.name for record in pair.records) == names


def test_a_panel_has_one_line_per_shift_rule(tmp_path: Path) -> None:
    """Settings of a disabled shift do not separate lines."""
    rules: list[dict[str, Any]] = [{"on": False}, {"on": False, "per": "layer"}, {"per": "layer"}, {"per": "filter"}]
    for i, shift in enumerate(rules):
        write_record(tmp_path / str(i), settings(seed=i) | {"shift": shift})
    (panel,) = panels(found(tmp_path)[0])
    assert panel.plain is not None
    assert len(panel.plain.records) == 2
    assert [line.label for line in panel.lines] == ["without shift", "with shift per layer", "with shift per filter"]


def test_of_runs_that_differ_in_rounds_the_longest_is_drawn(tmp_path: Path) -> None:
    write(tmp_path, replace(mixed("fedpaq", 4, False), rounds=250), 0.5)
    write(tmp_path, mixed("fedpaq", 4, False), 0.6)
    records, others = found(tmp_path)
    assert [len(record.lines) for record in records] == [800]
    assert not others


def test_a_run_that_cannot_be_drawn_is_left_out_and_reported(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 4, False), 0.6)
    (whole,) = (path.parent for path in tmp_path.rglob("settings.toml"))
    half, broken = (Path(shutil.copytree(whole, tmp_path / name)) for name in ("half", "broken"))
    lines = (whole / "rounds.csv").read_text().splitlines(keepends=True)
    (half / "rounds.csv").write_text("".join(lines[:400]))
    (broken / "settings.toml").write_text("[train")
    records, others = found(tmp_path)
    assert [record.folder for record in records] == [whole]
    assert [str(broken) in others[0], str(half) in others[1]] == [True, True]


def test_full_precision_alone_is_a_panel(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedavg", 32, False))
    (panel,) = panels(found(tmp_path)[0])
    assert (panel.title, panel.exact, [line.label for line in panel.lines]) == (
        "FedAvg, 32+32 bits",
        None,
        ["without shift"],
    )


def test_a_panel_names_groups_of_clients(tmp_path: Path) -> None:
    uplink = {"bits": 8, "quantizer": "uniform", "group": {"slow": {"share": 0.5, "bits": 4}}}
    write_record(tmp_path / "run", settings() | {"uplink": uplink})
    (panel,) = panels(found(tmp_path)[0])
    assert panel.title == "FedPAQ, 8 bit, uniform; slow 0.5: 4 bit"


def test_panels_name_other_settings_in_which_they_differ(tmp_path: Path) -> None:
    for alpha in (0.1, 100.0):
        write(tmp_path, dirichlet("kmeans", alpha, 4, True))
    made = panels(found(tmp_path)[0])
    assert [panel.more for panel in made] == ["alpha 0.1", "alpha 100.0"]
    assert across(made) == 2


def test_bits_share_a_row_if_all_rows_have_the_same_bits(tmp_path: Path) -> None:
    for name in ("fedpaq", "fedprox"):
        for bits in (4, 6, 8):
            write(tmp_path, mixed(name, bits, True))
    made = panels(found(tmp_path)[0])
    assert across(made) == 3
    assert across(made[:5]) == 5


def test_shares_of_labels_are_percentages_of_the_last_rounds(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 4, True), predicted=[0.05, 0.15] * 5)
    (panel,) = panels(found(tmp_path)[0])
    assert predictions.shares(panel.shifted[0]) == pytest.approx([5.0, 15.0] * 5)


def test_labels_are_split_by_parity_only_in_the_main_partition(tmp_path: Path) -> None:
    for cell, parted in (
        (mixed("fedpaq", 4, True), True),
        (mixed("fedavg", 32, False), False),
        (dirichlet("kmeans", 0.1, 4, True), False),
    ):
        record = FinishedRun(write(tmp_path, cell))
        assert predictions.split_by_parity(record.experiment) is parted


def test_a_rule_of_the_shift_has_the_same_label_and_colour_in_every_panel(tmp_path: Path) -> None:
    for cell in (mixed("fedpaq", 4, True), filtered(mixed("fedpaq", 8, False))):
        write(tmp_path, cell, 0.7)
    layer, centred = panels(found(tmp_path)[0])
    assert [line.label for line in (*layer.shifted, *centred.shifted)] == [
        "with shift per layer",
        "with shift per filter",
    ]
    (_, first), (_, second) = *coloured(layer), *coloured(centred)
    assert first != second


def test_algorithms_that_the_paper_does_not_have_come_last(tmp_path: Path) -> None:
    for cell in (rival("agreement", 4, False), rival("fedhq", 4, False), mixed("fedpaq", 4, False)):
        write(tmp_path, cell, 0.6)
    assert next(panel.algorithm for panel in panels(found(tmp_path)[0])) == "FedPAQ"
