"""The first section in a real browser: its points, their readouts, and small screens."""

from typing import Any

import pytest

from fedshift.report.charts import Report
from fedshift.report.gather import gather
from tests.report.conftest import Open
from tests.report.test_browser import DRAW_ALL, numbers, readout, ticks
from tests.report.test_browser_reading import FAINT, NAMELESS
from tests.report.written import settings, write


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two seeds of four settings of the uplink, two of which are Pareto-optimal."""
    folder = tmp_path_factory.mktemp("runs")
    uplinks: list[tuple[dict[str, Any], float, int]] = [
        ({"bits": 32}, 0.9, 9000),
        ({"bits": 4, "send": "updates", "feedback": True}, 0.88, 900),
        ({"bits": 4}, 0.7, 900),
        ({"bits": 8, "per": "channel"}, 0.8, 2500),
    ]
    for i, (uplink, score, size) in enumerate(uplinks):
        for seed in range(2):
            raw = settings(rounds=12, shift=False, seed=seed) | {"uplink": uplink}
            write(folder / f"{i} {seed}", raw, score + seed / 100, figures={"bytes.codes": size})
    return gather([folder])


def test_every_setting_is_a_point_and_the_front_is_marked(open_page: Open, report: Report) -> None:
    page = open_page(report)
    page.evaluate(DRAW_ALL)
    for name in ("pareto", "pareto-total"):
        assert page.locator(f"#{name} .point .mean").count() == 4
        assert page.locator(f"#{name} .point .spread").count() == 4
        assert page.locator(f"#{name} .point .optimal").count() == 2
        assert page.locator(f"#{name} path.front").get_attribute("d").count("L") == 1
    assert [row[-1] for row in numbers(page, "pareto")] == ["Pareto-optimal", "no", "yes", "no", "yes"]
    assert all("kB" in tick for tick in ticks(page, "pareto"))
    hidden = page.locator("#legend .line").first
    hidden.click()
    page.wait_for_function("document.querySelectorAll('#pareto .point').length === 3")


def test_points_are_read_by_pointer_and_keys(open_page: Open, report: Report) -> None:
    page = open_page(report)
    plot = page.locator("#pareto .plot")
    plot.scroll_into_view_if_needed()
    page.locator("#pareto [data-spot='3']").hover()
    assert readout(page) == [
        ["accuracy", "90.5% ± 0.7%"],
        ["uploaded by all clients", "109.2 kB"],
        ["Pareto-optimal", "yes"],
    ]
    plot.focus()
    for key in ("Home", "ArrowRight"):
        plot.press(key)
    assert "4 bit updates, feedback" in page.locator("#live").inner_text()
    assert "accuracy 88.5% ± 0.7%" in page.locator("#live").inner_text()


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_of_the_first_section_overflows(open_page: Open, report: Report, width: int) -> None:
    page = open_page(report, width=width)
    page.evaluate(DRAW_ALL)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    edges = "places => places.map(place => [place.getBoundingClientRect().left, place.getBoundingClientRect().right])"
    for left, right in page.locator("#worth svg text, #worth svg circle, #worth td").evaluate_all(edges):
        assert left >= 0
        assert right <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_of_points_can_be_read(open_page: Open, report: Report, scheme: str) -> None:
    page = open_page(report, color_scheme=scheme)
    page.evaluate(DRAW_ALL)
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(FAINT) == []


def test_without_scripts_the_answer_and_the_table_are_shown(open_page: Open, report: Report) -> None:
    page = open_page(report, java_script_enabled=False)
    assert page.locator("#worth .answer").inner_text().startswith("Compression was not worth it: ")
    assert page.locator("#worth-table tbody tr").count() == 4
