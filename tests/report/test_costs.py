"""The section "What did it cost?"."""

from pathlib import Path

import pytest

from fedshift.report.charts import Curves, Section, Stacks
from fedshift.report.costs import section
from fedshift.report.lines import grouped
from tests.report.test_lines import read
from tests.report.written import GUESSED, published, settings, write

RATE = 1000.0


def costs(*folders: Path) -> Section:
    return section(grouped(read(list(folders))).strands, RATE)


def chart(of: Section, name: str) -> Curves:
    (found,) = [part for part in of.parts if part.name == name]
    assert isinstance(found, Curves)
    return found


def stacks(of: Section, name: str) -> Stacks:
    (found,) = [part for part in of.parts if part.name == name]
    assert isinstance(found, Stacks)
    return found


def test_accuracy_against_bytes_and_against_seconds_on_one_link(tmp_path: Path) -> None:
    """A thousand bytes per round, a thousand bytes per second."""
    made = costs(write(tmp_path / "run", settings(rounds=4)))
    sent, seconds = chart(made, "score-bytes"), chart(made, "score-seconds")
    assert list(sent.panels[0].curves[0].x) == [1000, 2000, 3000, 4000]
    assert list(seconds.panels[0].curves[0].x) == [1, 2, 3, 4]
    assert (sent.x.unit, seconds.x.unit, sent.rate, seconds.rate) == ("B", "s", None, RATE)
    assert made.answer == ["A run sends 4 kB, 4 s on one shared link of 1 kB/s."]


def test_an_upload_is_codes_side_data_and_header(tmp_path: Path) -> None:
    """Two uploads arrive in a round, of 900, 60 and 40 bytes together."""
    made = stacks(costs(write(tmp_path / "run")), "upload")
    assert made.parts == ["codes", "side data", "header"]
    assert made.stacks[0].values == [450, 30, 20]


def test_a_published_record_has_only_the_sum_of_bytes(tmp_path: Path) -> None:
    """A thousand bytes for a cohort of two."""
    made = costs(published(tmp_path / "run", settings()))
    assert (stacks(made, "upload").parts, stacks(made, "upload").stacks[0].values) == (["upload, not split"], [500])
    assert (stacks(made, "phases").parts, stacks(made, "phases").stacks[0].values) == (["round, not split"], [0.7])


def test_a_round_is_split_into_phases_with_saving_on_top(tmp_path: Path) -> None:
    """0.7 s, of which 0.4 training, 0.1 encoding, twice 0.05 for the server; and 0.02 s for saving."""
    made = stacks(costs(write(tmp_path / "run")), "phases")
    assert made.parts == ["train", "encode", "aggregate", "evaluate", "save", "other"]
    assert made.stacks[0].values == pytest.approx([0.4, 0.1, 0.05, 0.05, 0.02, 0.1])


def test_clients_that_train_in_parallel_share_the_wall_clock_time(tmp_path: Path) -> None:
    """Four seconds of training and one of encoding share the 0.6 s in which the server did not work."""
    made = stacks(costs(write(tmp_path / "run", figures={"seconds.train": 4.0, "seconds.encode": 1.0})), "phases")
    assert made.stacks[0].values == pytest.approx([0.48, 0.12, 0.05, 0.05, 0.02, 0.0])


def test_bandwidths_in_the_settings_have_their_own_chart(tmp_path: Path) -> None:
    raw = settings(rounds=3, uplink={"bandwidth": 1000.0})
    made = costs(write(tmp_path / "run", raw, figures={"seconds.uplink": [0.5, 0.25, 1.0]}))
    assert list(chart(made, "score-links").panels[0].curves[0].x) == [0.5, 0.75, 1.75]
    assert "Bandwidths are those in the settings" in chart(made, "score-links").caption


def test_the_least_and_the_most_are_named(tmp_path: Path) -> None:
    few = write(tmp_path / "few", settings(rounds=10, bits="32+4"))
    many = write(tmp_path / "many", settings(rounds=10, bits="32+32"), figures={"bytes.codes": 2900})
    assert costs(few, many).answer == [
        "Runs with 32+4 bits send the least: 10 kB, 10 s on one shared link of 1 kB/s.",
        "Those with 32+32 bits send 3 times as much: 30 kB, 30 s on one shared link of 1 kB/s.",
    ]


def test_lines_with_and_without_the_shift_may_send_different_amounts(tmp_path: Path) -> None:
    """As with an entropy coder: 20 rounds of 600 and of 1000 bytes."""
    plain = write(tmp_path / "plain", settings(shift=False), figures={"bytes.codes": 500})
    made = costs(plain, write(tmp_path / "shifted", settings(shift=True)))
    assert made.answer == [
        "Runs with no shift send the least: 12 kB, 12 s on one shared link of 1 kB/s.",
        "Those with shift per layer send 1.67 times as much: 20 kB, 20 s on one shared link of 1 kB/s.",
    ]


def test_all_lines_that_send_the_least_are_named(tmp_path: Path) -> None:
    names = ("fedavg", "fedprox")
    few = [write(tmp_path / name, settings(algorithm={"name": name})) for name in names]
    more = {"bytes.codes": 1900}
    many = [
        write(tmp_path / f"{name} 8", settings(bits="32+8", algorithm={"name": name}), figures=more) for name in names
    ]
    least, most = costs(*few, *many).answer
    assert least.startswith("Runs with 32+4 bits send the least: 20 kB")
    assert most.startswith("Those with 32+8 bits send 2 times as much: 40 kB")


def test_bytes_that_are_nan_count_as_zero(tmp_path: Path) -> None:
    made = costs(write(tmp_path / "run", settings(rounds=4), figures={"bytes.codes": [900, float("inf"), 900, 900]}))
    assert list(chart(made, "score-bytes").panels[0].curves[0].x) == [1000, 1000, 2000, 3000]


def test_estimated_bytes_are_corrected_by_the_ratio_and_the_page_says_so(tmp_path: Path) -> None:
    made = costs(write(tmp_path / "run", settings(rounds=3), figures=GUESSED))
    assert made.answer == [
        "A run sends 3.5 kB, 3.5 s on one shared link of 1 kB/s.",
        "Uploaded bytes of 2 of 3 rounds are estimated from counts of codes, times 1.25, the ratio of real frames to "
        "estimates measured in 1 round.",
    ]
    assert list(chart(made, "score-bytes").panels[0].curves[0].x) == [1000, 2250, 3500]
    own = stacks(made, "upload").stacks[0].values  # codes, side data, header of each of six uploads
    assert own == pytest.approx([(3 * 900 + 2 * 250) / 6, 30, 20], rel=1e-3)


def test_estimates_without_real_frames_are_not_corrected(tmp_path: Path) -> None:
    made = costs(write(tmp_path / "run", settings(rounds=3), figures=GUESSED | {"bytes.framed": [None] * 3}))
    assert made.answer == [
        "A run sends 3 kB, 3 s on one shared link of 1 kB/s.",
        "Uploaded bytes of 3 of 3 rounds are estimated from counts of codes, and no real frames were made to check "
        "them.",
    ]


def test_bits_per_client_are_drawn_for_all_clients_and_for_each_group(tmp_path: Path) -> None:
    """Clients 0 and 2 have 32 bits, the others those of a policy."""
    uplink = {"bits": "32+8", "policy": "adaquantfl"}
    folder = write(tmp_path / "run", settings(rounds=2, uplink=uplink))
    lines = ["round,client,codec,bytes,bits", "1,0,exact,400,32", "1,1,QSGD(s=2),25,2", "1,3,QSGD(s=3),50,4"]
    (folder / "uplinks.csv").write_text("\n".join([*lines, "2,2,exact,400,32", "2,3,QSGD(s=9),75,6", ""]))
    made = chart(costs(folder), "bits")
    assert [panel.title for panel in made.panels] == ["all clients", "32 bit", "4 bit"]
    whole, exact, chosen = (panel.curves[0] for panel in made.panels)
    assert (list(whole.x), whole.y, whole.low, whole.high) == ([1, 2], [12.667, 19], [2, 6], [32, 32])
    assert (exact.y, chosen.y, chosen.low, chosen.high) == ([32, 32], [3, 6], [2, 6], [4, 6])
    assert made.apart


def test_bits_of_one_group_are_one_panel_and_runs_without_a_policy_have_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", settings(rounds=2, uplink={"policy": "adaquantfl", "bits": 8}))
    (folder / "uplinks.csv").write_text("round,client,codec,bytes,bits\n1,1,QSGD(s=2),25,2\n")
    other = write(tmp_path / "other", settings(rounds=2))
    made = chart(costs(folder, other), "bits")
    assert [panel.title for panel in made.panels] == ["all clients"]
    assert len(made.panels[0].curves) == 1
    assert "bits" not in [part.name for part in costs(other).parts]
