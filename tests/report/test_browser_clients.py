"""The parts of the page on several metrics and on scores of clients, in a real browser."""

from pathlib import Path

from fedshift.report.charts import Table
from fedshift.report.gather import gather
from tests.report.conftest import Open
from tests.report.test_browser import DRAW_ALL, cells, drawn, numbers, ticks
from tests.test_client_scores import reported
from tests.test_metrics import several


def test_scores_of_clients_are_drawn(open_page: Open, tmp_path: Path) -> None:
    report = reported(tmp_path / "runs")
    page = open_page(report)
    page.evaluate(DRAW_ALL)
    section = next(section for section in report.sections if section.name == "clients-scores")
    assert page.locator("#clients-scores h2").inner_text() == section.title
    table = section.parts[0]
    assert isinstance(table, Table)
    assert cells(page.locator("#client-table tbody tr")) == [row.cells for row in table.rows]
    assert drawn(page, "clients-ordered") == 2
    assert ticks(page, "clients-ordered")[-1] == "100"  # per cent of the clients
    assert drawn(page, "clients-rounds") == 6  # two lines with their worst tenths, and one line in two groups


def test_a_reader_selects_a_further_metric(open_page: Open, tmp_path: Path) -> None:
    page = open_page(gather([several(tmp_path / "runs")]))
    page.evaluate(DRAW_ALL)
    found = [row[1:] for row in cells(page.locator("#metrics tbody tr"))]
    assert found == [["62.5", "0.75", "2"], ["62.5", "0.5", "4"]]
    page.get_by_label("Further metrics", exact=True).select_option("perplexity")
    page.get_by_text("Further metric: perplexity").wait_for()
    page.locator("#metric-2").scroll_into_view_if_needed()
    page.locator("#metric-2 .plot path.curve").nth(1).wait_for(state="attached")
    assert drawn(page, "metric-2") == 2
    assert {tuple(row[1:]) for row in numbers(page, "metric-2")[1:]} == {("2", "4")}
