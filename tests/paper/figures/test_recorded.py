"""The numbers behind figures 5, 7, 8 and 9, which are drawn from records."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.algorithms import shorter
from fedshift.core.files import RunError
from fedshift.paper.experiments import dirichlet, mixed
from fedshift.paper.figures import fence, predictions
from fedshift.paper.figures.curves import across, curve, score
from fedshift.paper.figures.fence import LayerMeans, means, ratios, spread, taken
from fedshift.paper.figures.records import Source, found, panels
from fedshift.paper.publish import publish
from fedshift.paper.records import FinishedRun
from tests.paper.written import write
from tests.report.written import settings
from tests.report.written import write as write_record
from tests.runs import FEDAVG, go, small


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with the shift and one without."""
    out = tmp_path_factory.mktemp("runs")
    for on in (True, False):
        go(
            small(FEDAVG, {"shift": {"on": on, "per": "layer"}, "train": {"rounds": 12, "selection": "stratified"}}),
            out / f"shift-{on}",
        )
    return out


def test_the_fence_is_where_the_theorem_has_it() -> None:
    """I/K = 0.5: at 4/3 of the mean before; I/K = 1: at twice of it."""
    assert [fence.fence(0.5), fence.fence(1.0)] == pytest.approx([4 / 3, 2.0])
    for share in (0.25, 0.5, 1.0):
        assert fence.gain(share, fence.fence(share)) == pytest.approx(0, abs=1e-12)
        for ratio in (-1.0, -0.1, 0.1, 0.9, 1.1, 1.4, 2.5):
            assert (fence.gain(share, ratio) > 0) == shorter(share, 1.0, ratio)
            assert (fence.gain(share, ratio) > 0) == (not 0 < ratio < fence.fence(share))


def test_steps_of_a_real_run_lie_on_the_curve() -> None:
    measured = fence.steps()
    assert len(measured) == 30 * 3
    assert all(one.right for one in measured)
    for one in measured:
        assert one.gain == pytest.approx(fence.gain(one.share, one.ratio), rel=1e-6, abs=1e-6)


def test_ratios_of_a_record_say_what_the_run_said(ran: Path) -> None:
    """The run compared the means itself, in full precision, when it aggregated."""
    for folder in sorted(ran.iterdir()):
        record = FinishedRun(folder)
        for layer in record.layers("shorter"):
            told = [one.shorter for one in means(record, layer)]
            assert told == [bool(x) for x in record.column(f"shorter.{layer}")[1:]]


def test_a_published_record_has_the_same_ratios(ran: Path, tmp_path: Path) -> None:
    """It has no mean before the shift; three digits of the mean after it tell."""
    own = FinishedRun(ran / "shift-True")
    place, _ = publish(own.folder, tmp_path)
    for a, b in zip(means(own, "fc1.weight"), means(FinishedRun(place), "fc1.weight"), strict=True):
        assert b.ratio == pytest.approx(a.ratio, rel=0.02)
        assert b.share == a.share == 0.5


def test_the_share_taken_is_capped_and_ramped_as_the_rule_does(tmp_path: Path) -> None:
    said = {"shift": {"max_share": 0.4, "warmup": 4}, "train": {"selection": "stratified"}}
    go(small(FEDAVG, said), tmp_path / "run")
    record = FinishedRun(tmp_path / "run")
    assert [taken(record, t, 0.5) for t in (1, 2, 4, 8)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    assert means(record, "fc1.weight")[0].share == pytest.approx(0.2)


def test_a_panel_says_how_many_rounds_lie_outside(ran: Path) -> None:
    source = Source(panels(found(ran)[0]), ran)
    told = ratios(source.pair)
    assert (told.share, told.layers) == (0.5, ["fc1.weight", "fc2.weight"])
    assert list(told.lines) == ["without shift", "with shift"]
    with pytest.raises(RunError, match="three rounds or more"):
        spread([LayerMeans(0.5, 1.0, 1.0)])


def test_runs_are_put_in_lines_and_panels(tmp_path: Path) -> None:
    """Seeds make a line, the shift a panel; 32+32 bits is drawn into the others."""
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
    assert [one.title for one in made] == [
        "FedPAQ, 32+4 bits",
        "FedPAQ, 32+8 bits",
        "Fed-EF, 32+4 bits",
        "SCAFFOLD, 32+4 bits",
    ]
    paq = made[1]
    assert paq.plain is not None
    assert [len(line.records) for line in paq.lines] == [2, 1]
    assert all(one.exact and one.exact.label == "32+32 bits, without shift" for one in made)
    source = Source(made, tmp_path)
    assert source.pair is paq  # the only one with both
    assert source.drawn([paq]) == f"4 runs of 800 rounds in {tmp_path}"
    assert source.about(made) == "CIFAR-10, 250 to 800 rounds, 1 to 2 seeds a line"
    rounds, (one, _) = curve(paq.plain, score)
    assert rounds == list(range(1, 801))
    assert one == pytest.approx([70.0] * 800)


def test_of_two_panels_alike_the_one_with_more_seeds_is_drawn(tmp_path: Path) -> None:
    for shift in (False, True):
        write(tmp_path, dirichlet("kmeans", 0.1, 4, shift))
        for seed in range(2):
            write(tmp_path, mixed("fedpaq", 4, shift), seed=seed)
    pair = Source(panels(found(tmp_path)[0]), tmp_path).pair
    names = [f"fedpaq_32+4{shift}_seed-{seed}" for shift in ("", "_shift") for seed in range(2)]
    assert sorted(record.folder.name for record in pair.records) == names


def test_a_panel_has_a_line_for_each_rule_of_the_shift(tmp_path: Path) -> None:
    """Settings of a shift that is off make no line of their own."""
    rules: list[dict[str, Any]] = [{"on": False}, {"on": False, "per": "layer"}, {"per": "layer"}, {"per": "filter"}]
    for i, shift in enumerate(rules):
        write_record(tmp_path / str(i), settings(seed=i) | {"shift": shift})
    (panel,) = panels(found(tmp_path)[0])
    assert panel.plain is not None
    assert len(panel.plain.records) == 2
    assert [line.label for line in panel.lines] == ["without shift", "with shift per layer", "with shift per filter"]


def test_of_runs_alike_the_longest_is_drawn(tmp_path: Path) -> None:
    write(tmp_path, replace(mixed("fedpaq", 4, False), rounds=250), 0.5)
    write(tmp_path, mixed("fedpaq", 4, False), 0.6)
    records, others = found(tmp_path)
    assert [len(record.lines) for record in records] == [800]
    assert not others


def test_a_run_that_cannot_be_drawn_is_left_out_and_told(tmp_path: Path) -> None:
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
    (one,) = panels(found(tmp_path)[0])
    assert (one.title, one.exact, [line.label for line in one.lines]) == ("FedAvg, 32+32 bits", None, ["without shift"])


def test_a_panel_names_groups_of_clients(tmp_path: Path) -> None:
    uplink = {"bits": 8, "quantizer": "uniform", "group": {"slow": {"share": 0.5, "bits": 4}}}
    write_record(tmp_path / "run", settings() | {"uplink": uplink})
    (one,) = panels(found(tmp_path)[0])
    assert one.title == "FedPAQ, 8 bit, uniform; slow 0.5: 4 bit"


def test_panels_say_in_what_else_they_differ(tmp_path: Path) -> None:
    for alpha in (0.1, 100.0):
        write(tmp_path, dirichlet("kmeans", alpha, 4, True))
    made = panels(found(tmp_path)[0])
    assert [one.more for one in made] == ["alpha 0.1", "alpha 100.0"]
    assert across(made) == 2


def test_bits_stand_side_by_side_where_all_have_the_same(tmp_path: Path) -> None:
    for name in ("fedpaq", "fedprox"):
        for bits in (4, 6, 8):
            write(tmp_path, mixed(name, bits, True))
    made = panels(found(tmp_path)[0])
    assert across(made) == 3
    assert across(made[:5]) == 5


def test_shares_of_labels_are_percents_of_the_last_rounds(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 4, True), predicted=[0.05, 0.15] * 5)
    (panel,) = panels(found(tmp_path)[0])
    assert predictions.shares(panel.shifted[0]) == pytest.approx([5.0, 15.0] * 5)


def test_labels_are_parted_by_parity_in_the_main_partition_only(tmp_path: Path) -> None:
    for cell, parted in (
        (mixed("fedpaq", 4, True), True),
        (mixed("fedavg", 32, False), False),
        (dirichlet("kmeans", 0.1, 4, True), False),
    ):
        record = FinishedRun(write(tmp_path, cell))
        assert predictions.split_by_parity(record.experiment) is parted
