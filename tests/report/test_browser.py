"""The page in a real browser: numbers of the report, and controls."""

import math
import re
from collections.abc import Iterable
from typing import Any

import pytest

from fedshift.report.charts import Dash, Report, Table
from tests.report import made
from tests.report.conftest import Open

DRAW_ALL = "window.dispatchEvent(new Event('beforeprint'))"


def chart(report: Report, name: str) -> Any:
    return next(part for section in report.sections for part in section.parts if part.name == name)


def cells(rows: Any) -> list[list[str]]:
    """Texts of the rows of a table."""
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    return [[str(text) for text in row] for row in rows.evaluate_all(script)]


def number(text: str) -> float:
    """
    >>> number("2·10⁻¹²"), number("\u22121.5"), number("\u2013")
    (2e-12, -1.5, nan)
    """
    if text == "\u2013":
        return math.nan
    plain = text.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻\u2212", "0123456789--"))
    return float(re.sub(r"^10(?=-)", "1e", plain.replace("·10", "e")))


def near(values: Iterable[float | None]) -> Any:
    expected = [math.nan if value is None else value for value in values]
    return pytest.approx(expected, rel=1e-4, abs=1e-9, nan_ok=True)


def numbers(page: Any, name: str) -> list[list[str]]:
    """First table of numbers of a chart."""
    page.locator(f"#{name} .numbers summary").click()
    page.locator(f"#{name} .numbers tr").first.wait_for()
    return cells(page.locator(f"#{name} .numbers table").first.locator("tr"))


def ticks(page: Any, name: str, axis: str = "x") -> list[str]:
    return [str(text) for text in page.locator(f"#{name} .plot .axis.{axis} text").all_text_contents()]


def drawn(page: Any, name: str) -> int:
    return int(page.locator(f"#{name} .plot path.curve").count())


def readout(page: Any) -> list[list[str]]:
    return [row[1:] for row in cells(page.locator("#tip tr"))]


def test_tables_have_the_cells_of_the_report(open_page: Open) -> None:
    report = made.demo()
    page = open_page(report)
    table: Table = chart(report, "summary")
    assert cells(page.locator("#summary tbody tr")) == [row.cells for row in table.rows]
    assert not page.locator("#runs table").is_visible()
    page.locator("#runs summary").click()
    page.locator("#runs table").wait_for()


def test_numbers_of_curves_are_those_of_the_report(open_page: Open) -> None:
    report = made.demo()
    page = open_page(report)
    labels = {line.key: line.label for line in report.lines}
    curves = chart(report, "accuracy").panels[0].curves
    head, *rows = numbers(page, "accuracy")
    assert head == ["round", *(labels[curve.line] for curve in curves)]
    for place, (x, *cells) in enumerate(rows):
        assert float(x) == curves[0].x[place]
        for cell, curve in zip(cells, curves, strict=True):
            values = [curve.y[place], curve.low[place], curve.high[place]]
            found = [number(text) / 100 for text in re.split(r" to | \(|\)", cell) if text]
            assert found == near(values[: len(found)])
            assert len(found) == (1 if curve.y[place] is None else 3)


def test_numbers_of_other_charts_are_those_of_the_report(open_page: Open) -> None:
    report = made.demo()
    page = open_page(report)
    final = [interval for _, bands in chart(report, "final").bands for band in bands for interval in band.intervals]
    for row, interval in zip(numbers(page, "final")[1:], final, strict=True):
        expected = [interval.mean, interval.spread, *interval.seeds.values()]
        assert [number(cell) / 100 for cell in row[1:]] == near(expected)
    for row, stack in zip(numbers(page, "sent")[1:], chart(report, "sent").stacks, strict=True):
        assert [number(cell) * 1e6 for cell in row[1:]] == near(stack.values)
    heat = chart(report, "by-label")
    for row, name, values in zip(numbers(page, "by-label")[1:], heat.rows, heat.values, strict=True):
        assert row[0] == name
        assert [number(cell) / 100 for cell in row[1:]] == near(values)
    steps = chart(report, "weights").panels[0]
    for place, row in enumerate(numbers(page, "weights")[1:]):
        expected = [steps.edges[place], steps.edges[place + 1], *(counts[place] for _, counts in steps.counts)]
        assert [number(cell) for cell in row] == near(expected)


def test_lines_of_one_colour_differ_in_their_dashes(open_page: Open) -> None:
    """In the legend, and by open discs, diamonds and discs of means."""
    report = made.demo()
    dashes: tuple[Dash, ...] = ("dashed", "dotdash", "")
    lines = [one._replace(colour=0, dash=dash) for one, dash in zip(report.lines, dashes, strict=True)]
    page = open_page(report._replace(lines=lines))
    page.evaluate(DRAW_ALL)
    strokes = page.locator("#legend .swatch .curve")
    strokes.last.wait_for(state="attached")
    patterns = strokes.evaluate_all("all => all.map((one) => getComputedStyle(one).strokeDasharray)")
    assert (len(set(patterns)), patterns[2]) == (3, "none")
    means = page.locator(".interval .mean")
    means.last.wait_for(state="attached")
    script = "all => all.map((one) => [one.classList.contains('hollow'), one.getAttribute('d').includes('a')])"
    looks = means.evaluate_all(script)
    assert {tuple(look) for look in looks} == {(True, True), (False, False), (False, True)}


def test_the_pointer_reads_values_of_all_lines(open_page: Open) -> None:
    report = made.demo()
    page = open_page(report)
    plot = page.locator("#accuracy .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 120)
    title = page.locator("#tip strong").inner_text()
    place = int(title.removeprefix("round ")) - 1
    labels = {line.key: line.label for line in report.lines}
    expected = {
        labels[curve.line]: f"{100 * y:.1f}%"
        for curve in chart(report, "accuracy").panels[0].curves
        if (y := curve.y[place]) is not None
    }
    assert {label: value.split(" ")[0] for label, value in readout(page)} == expected
    assert page.locator("#accuracy .cross circle").count() == 3
    page.mouse.move(5, 5)
    assert not page.locator("#tip").is_visible()


def test_cells_parts_means_and_bins_are_read(open_page: Open) -> None:
    report = made.demo()
    page = open_page(report)
    page.evaluate(DRAW_ALL)
    page.locator("#by-label [data-spot='12']").hover()
    assert readout(page) == [["2 (rare)", f"{100 * chart(report, 'by-label').values[1][2]:.1f}%"]]
    page.locator("#sent [data-spot='1']").hover()
    assert readout(page) == [["centroids", "90 kB (17.6%)"], ["total", "511.2 kB"]]
    page.locator("#final [data-spot='0']").hover()
    assert [label for label, _ in readout(page)] == ["mean", "seed 0", "seed 1", "seed 2"]
    page.locator("#weights [data-spot='3']").hover()
    assert [label for label, _ in readout(page)] == ["before the quantizer", "after it"]


def test_another_uplink_stretches_time(open_page: Open) -> None:
    report = made.demo()
    page = open_page(report)
    page.evaluate(DRAW_ALL)
    last = chart(report, "time").panels[0].curves[2].x[-1]
    axis = page.locator("#time .plot text.title").last
    assert axis.text_content() == "time to send (min)"
    page.locator("#time").get_by_role("button", name="uplink 100 Mbit/s").click()
    assert page.locator("#time input").input_value() == "100"
    axis.get_by_text("time to send (s)").wait_for()
    page.locator("#time input").fill("0.5")
    page.locator("#time input").press("Enter")
    axis.get_by_text("time to send (h)").wait_for()
    rows = numbers(page, "time")
    assert float(rows[-1][4]) == pytest.approx(last * 20 / 3600, rel=1e-4)


def test_one_of_several_charts_is_chosen(open_page: Open) -> None:
    page = open_page(made.demo())
    page.locator("#clients").scroll_into_view_if_needed()
    assert page.get_by_text("How seed 0 shared them out.").is_visible()
    page.get_by_label("Examples of each client", exact=True).select_option("seed 2")
    page.get_by_text("How seed 2 shared them out.").wait_for()
    assert not page.get_by_text("How seed 0 shared them out.").is_visible()
    page.locator("#clients-2 .cell").first.wait_for()
    assert page.locator("#clients-2 .cell").count() == 120


def test_charts_are_drawn_when_they_come_near_and_all_before_print(open_page: Open) -> None:
    page = open_page(made.sweep())
    places = page.locator("figure:not([hidden])").count()
    assert page.locator("figure .plot > svg").count() < places
    page.evaluate(DRAW_ALL)
    assert page.locator("figure .plot > svg").count() == places


def test_print_is_light_and_shows_the_selected_chart(open_page: Open) -> None:
    page = open_page(made.demo())
    page.locator("#theme").click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert page.locator(".choose select").is_visible()


def test_tables_are_sorted_by_a_column_and_back(open_page: Open) -> None:
    page = open_page(made.demo())
    column = page.locator("#summary tbody td:nth-child(2)")
    before = column.all_inner_texts()
    press = page.locator("#summary").get_by_role("button", name="accuracy")
    press.click()
    assert column.all_inner_texts() == sorted(before)
    press.click()
    assert column.all_inner_texts() == sorted(before, reverse=True)
    press.click()
    assert column.all_inner_texts() == before
