"""Reports from published records: tables, the page, Table 3, a plan."""

import json
from pathlib import Path

import pytest

from fedshift.experiment.frontier import GRID
from fedshift.experiment.toml import SettingsError
from fedshift.paper.experiments import mixed
from fedshift.paper.report import BEGIN, END, report, rewritten
from fedshift.paper.tables import compared, listing
from tests.paper.written import read, write
from tests.runs import fedshift

ROOT = Path(__file__).parent.parent.parent


def test_a_table_has_mean_spread_seeds_and_difference(tmp_path: Path) -> None:
    """61 and 63 have mean 62 and standard deviation sqrt(2)."""
    cell = mixed("fedpaq", 4, False)
    for seed, score in enumerate((0.61, 0.63)):
        write(tmp_path, cell, score, seed)
    results = read(tmp_path)
    table = listing("table1", [cell, mixed("fedpaq", 8, True)], results)
    assert table.columns[3:] == ("round 800", "last ten", "seeds", "paper", "difference")
    assert table.rows[0] == ("FedPAQ", "32+4", "no", "62.0", "62.0 ± 1.4", "2", "59.7 ± 1.3", "+2.3")
    assert table.rows[1] == ("FedPAQ", "32+8", "yes", "not run", "not run", "0", "70.4 ± 0.8", "")
    assert compared(cell, results).difference == pytest.approx(2.3)


def test_a_report_depends_only_on_the_records(tmp_path: Path) -> None:
    write(tmp_path, mixed("fedpaq", 4, False), 0.60)
    write(tmp_path, mixed("fedpaq", 4, True), 0.63)
    done = fedshift("paper", "report", "--results", tmp_path)
    assert done.exit_code == 0, done.output
    assert "2 of 41 cells run, 2 runs of 800 rounds. Difference from the paper: +0.4 points on average" in done.stdout
    assert "gain in 1 of 1 cells run" in done.stdout.replace("\n", " ")
    result = json.loads(fedshift("paper", "report", "--results", tmp_path, "--json").stdout)
    assert result["Runs"][0] == [
        {"machine": "a Xeon", "commit": "abc", "torch": "2.13", "precision": "fp32", "runs": "2"}
    ]
    page = tmp_path / "page.md"
    page.write_text(f"Mine.\n\n{BEGIN}\nold\n{END}\n\nMine, too.\n")
    for _ in range(2):
        assert fedshift("paper", "report", "--results", tmp_path, "--markdown", "--page", page).exit_code == 0
    text = page.read_text()
    assert text.startswith(f"Mine.\n\n{BEGIN}\n\n## Runs\n")
    assert text.endswith(f"{END}\n\nMine, too.\n")
    assert "| FedPAQ | 32+4 | yes | 63.0 | 63.0 | 1 | 62.5 ± 1.3 | +0.5 |" in text
    assert "old" not in text.split()
    with pytest.raises(SettingsError, match=r"page\.md: has no line"):
        rewritten("nothing", report(tmp_path), "page.md")


def test_every_published_record_belongs_to_a_cell() -> None:
    assert "belong to no cell" not in report(ROOT / "results").markdown()


def test_the_page_agrees_with_the_published_records() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert rewritten(page, report(ROOT / "results"), "docs/reproduction.md") == page, (
        "run `fedshift paper report --markdown`"
    )


def test_table_3_is_published_with_the_records(tmp_path: Path) -> None:
    done = fedshift("paper", "table3", "--to", tmp_path, "--repeats", "1", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    kmeans = next(row for row in result["codecs"] if row["codec"] == "KMeans(4)")
    assert (kmeans["kB"], kmeans["paper's rule"]) == ("1,078", "7.78")
    assert 7.0 < float(kmeans["times slower"]) < 8.0
    sections = report(tmp_path).as_dict()
    (title,) = [title for title in sections if title.startswith("Table 3")]
    assert "First to arrive on the slowest links: " in sections[title][0]


def test_a_plan_from_the_command_line() -> None:
    done = fedshift("plan", "--uplink", "1MB/s", "--weights", "20000")
    assert done.exit_code == 0, done.output
    assert "Use uplink" in done.stdout
    assert done.stdout.index("Use uplink") < done.stdout.index("One upload of weights at 1 MB/s, by codec")
    assert "Shift per filter" in done.stdout
    result = json.loads(fedshift("plan", "--uplink", "10Mbit/s", "--weights", "20000", "--json").stdout)
    seconds = [row["seconds"] for row in result["codecs"]]
    assert result["rate"] == 1.25e6
    assert result["shift"] == {"on": True, "per": "filter", "share": 1.0, "bytes": 0}
    assert seconds == sorted(seconds)
    seconds = [row["seconds"] for row in result["uplinks"]]
    assert seconds == sorted(seconds)
    (best,) = [row for row in result["uplinks"] if row["recommended"]]
    assert best["settings"] == GRID[best["name"]]
    assert best["digits"]["points"] >= -0.5
    assert result["advice"][0].startswith("Use uplink")


def test_a_report_states_which_bytes_are_estimated(tmp_path: Path) -> None:
    """800 rounds of 100 estimated bytes; the frames of every fiftieth round have 101."""
    folder = write(tmp_path, mixed("fedpaq", 4, False))
    head, *lines = (folder / "rounds.csv").read_text().splitlines()
    cells = ["101,100,101" if t % 50 == 0 else "100,100," for t in range(len(lines))]
    pairs = [f"{line},{more}" for line, more in zip(lines, cells, strict=True)]
    (folder / "rounds.csv").write_text("\n".join([f"{head},bytes.up,bytes.estimated,bytes.framed", *pairs, ""]))
    parts = dict(report(tmp_path).sections)["Runs"]
    assert parts[1:] == [
        "Uploaded bytes of 784 of 800 rounds are estimated from counts of codes, times 1.01, the ratio of real frames "
        "to estimates measured in 16 rounds."
    ]
