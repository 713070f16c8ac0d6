"""The page in a real browser: legend, zoom, keys, small screens, colours."""

import re
from typing import Any

import pytest

from fedshift.report.charts import Report, Section, Table, TableRow
from tests.report import made
from tests.report.conftest import Open
from tests.report.test_browser import DRAW_ALL, drawn, readout, ticks

# Texts whose colour stands out from the page's own by less than WCAG's 4.5 to 1.
FAINT = """() => {
  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext(
    "2d", { willReadFrequently: true });
  const light = (colour) => {
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const texts = [...document.querySelectorAll(
    "h1, h2, h3, p, a, th, td, li, button:enabled, summary, svg text:not(.inside)")];
  return texts.filter((text) => !text.closest(".warnings, .chip[aria-pressed=true], [hidden]")).filter((text) => {
    const style = getComputedStyle(text);
    const ink = light(text.ownerSVGElement ? style.fill : style.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05) < 4.5;
  }).map((text) => text.textContent);
}"""

NAMELESS = """() => [
  ...[...document.querySelectorAll("svg:not([aria-hidden])")].filter((svg) => !svg.getAttribute("aria-label")),
  ...[...document.querySelectorAll("button, a")].filter(
    (one) => !one.getAttribute("aria-label") && !one.textContent.trim()),
  ...[...document.querySelectorAll("input, select")].filter((one) => !one.labels.length),
  ...[...document.querySelectorAll("[tabindex='0']")].filter(
    (one) => !one.getAttribute("aria-label") && !one.getAttribute("aria-labelledby")),
].map((one) => one.outerHTML.slice(0, 200))"""


def pressed(page: Any) -> list[bool]:
    script = "lines => lines.map(line => line.getAttribute('aria-pressed') === 'true')"
    return [bool(each) for each in page.locator("#legend .line").evaluate_all(script)]


def test_hiding_a_line_hides_it_everywhere(open_page: Open) -> None:
    page = open_page(made.demo())
    page.evaluate(DRAW_ALL)
    assert drawn(page, "accuracy") == 3
    page.locator("#legend .line").nth(1).click()
    page.locator("#accuracy [data-line='shift']").first.wait_for(state="detached")
    assert pressed(page) == [True, False, True]
    assert page.locator("#legend h2 .count").inner_text() == "2 of 3 shown"
    assert [row.is_visible() for row in page.locator("#summary tbody tr").all()] == [True, False, True]
    assert page.locator("#summary .left-out").inner_text() == "1 row of hidden lines left out"
    page.evaluate(DRAW_ALL)
    for name in ("accuracy", "time", "final", "sent", "by-label", "error"):
        assert page.locator(f"#{name} .plot [data-line='shift']").count() == 0
        assert page.locator(f"#{name} .plot [data-line='prox']").count() > 0
    page.locator("#legend .line").nth(1).click()
    page.locator("#accuracy g[data-line='shift']").wait_for(state="attached")


def test_only_all_and_none(open_page: Open) -> None:
    page = open_page(made.demo())
    legend = page.locator("#legend")
    legend.get_by_role("button", name="only fedprox, 32+4 bits, shift").click()
    assert pressed(page) == [False, False, True]
    legend.get_by_role("button", name="none", exact=True).click()
    page.locator("#accuracy").get_by_text("No lines are shown.").wait_for()
    legend.get_by_role("button", name="all", exact=True).click()
    assert pressed(page) == [True, True, True]
    legend.locator(".line").nth(1).click(modifiers=["Shift"])
    assert pressed(page) == [False, True, False]


def test_lines_are_chosen_by_their_settings(open_page: Open) -> None:
    report = made.sweep()
    page = open_page(report)
    legend = page.locator("#legend")
    chosen: list[dict[str, str]]
    for values in (["fedprox"], ["fedprox", "32+4"], ["fedprox", "32+4", "32+2"]):
        legend.get_by_role("button", name=values[-1], exact=True).click()
        chosen = [line.settings for line, shown in zip(report.lines, pressed(page), strict=True) if shown]
        assert {settings["algorithm"] for settings in chosen} == {"fedprox"}
        assert {settings["bits"] for settings in chosen} == (set(values[1:]) or {"32", "32+8", "32+4", "32+2", "32+1"})
    page.wait_for_function("document.querySelectorAll('#accuracy .plot text.panel').length === 1")  # others are empty
    legend.locator(".line").first.click()
    assert legend.locator(".chip[aria-pressed=true]").count() == 0  # they do not say any more what is shown
    legend.get_by_role("button", name="all", exact=True).click()
    assert all(pressed(page))


def test_dragging_zooms_and_reset_shows_all(open_page: Open) -> None:
    page = open_page(made.demo())
    plot = page.locator("#accuracy .plot")
    plot.scroll_into_view_if_needed()
    before = ticks(page, "accuracy"), ticks(page, "accuracy", "y")
    reset = page.locator("#accuracy").get_by_role("button", name="show all of")
    assert reset.is_disabled()
    box = plot.bounding_box()
    for back in (reset.click, lambda: plot.dblclick(position={"x": 200, "y": 150})):
        page.mouse.move(box["x"] + 300, box["y"] + 150)
        page.mouse.down()
        page.mouse.move(box["x"] + 400, box["y"] + 160, steps=3)
        assert page.locator("#accuracy .cover").count() == 1
        page.mouse.up()
        assert all(20 < int(tick) < 100 for tick in ticks(page, "accuracy"))
        assert ticks(page, "accuracy", "y") != before[1]
        back()
        assert (ticks(page, "accuracy"), ticks(page, "accuracy", "y")) == before


def test_all_controls_work_by_keyboard(open_page: Open) -> None:
    page = open_page(made.demo())
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to the report"
    for _ in range(40):
        page.keyboard.press("Tab")
        if "line" in (page.locator(":focus").get_attribute("class") or "").split():
            break
    page.keyboard.press("Space")
    assert pressed(page) == [False, True, True]
    page.keyboard.press("Space")
    page.locator("#accuracy .plot").focus()
    live = page.locator("#live")
    page.keyboard.press("ArrowRight")
    assert (live.text_content() or "").startswith("round 1: ")
    page.keyboard.press("ArrowRight")
    assert (live.text_content() or "").startswith("round 2: ")
    assert len(readout(page)) == 3
    page.keyboard.press("End")
    assert (live.text_content() or "").startswith("round 150: ")
    whole = ticks(page, "accuracy")
    page.keyboard.press("+")
    assert ticks(page, "accuracy") != whole
    page.keyboard.press("0")
    assert ticks(page, "accuracy") == whole
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    page.locator("#by-label .plot").focus()
    page.locator("#by-label .cell").first.wait_for()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert re.fullmatch(r"fedavg, 32\+4 bits, shift: 1 \(rare\) [\d.]+%", live.text_content() or "")


def test_dark_and_light_are_remembered(open_page: Open) -> None:
    page = open_page(made.one(), color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="switch to dark colours").click()
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    assert page.evaluate(paper) == dark
    page.get_by_role("button", name="switch to light colours").click()
    assert page.evaluate(paper) == light


@pytest.mark.parametrize("report", [made.one(), made.demo(), made.sweep()], ids=["one", "demo", "sweep"])
def test_nothing_overflows_a_phone_screen(open_page: Open, report: Report) -> None:
    page = open_page(report, width=375, has_touch=True)
    page.evaluate(DRAW_ALL)
    for summary in page.locator("figure:not([hidden]) .numbers summary").all()[:4]:
        summary.evaluate("summary => summary.click()")
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_touch_reads_values_and_the_legend_folds(open_page: Open) -> None:
    page = open_page(made.demo(), width=375, has_touch=True)
    assert not page.locator("#legend .body").is_visible()
    page.locator("#legend .fold").tap()
    page.locator("#legend .line").first.tap()
    page.locator("#legend .fold").tap()
    plot = page.locator("#accuracy .plot")
    plot.scroll_into_view_if_needed()
    plot.tap(position={"x": 150, "y": 80})
    assert len(readout(page)) == 2
    assert ticks(page, "accuracy")[-1] == "150"  # a finger does not zoom
    assert plot.evaluate("plot => getComputedStyle(plot).touchAction") == "pan-y pinch-zoom"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_every_text_can_be_read(open_page: Open, scheme: str) -> None:
    page = open_page(made.demo(), color_scheme=scheme)
    page.evaluate(DRAW_ALL)
    page.locator("#accuracy .numbers summary").click()
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(FAINT) == []
    assert page.locator("main, nav, header, aside, footer").count() == 5


def test_a_zoom_button_pressed_before_its_chart_is_drawn_does_nothing(open_page: Open) -> None:
    page = open_page(made.demo())
    assert page.locator("#error .plot svg").count() == 0  # it is further down
    page.evaluate("document.querySelectorAll('#error .tools button').forEach((button) => button.click())")
    page.evaluate("document.querySelector('#error .plot').dispatchEvent(new Event('dblclick'))")
    assert page.locator("#error .plot svg").count() == 0
    page.locator("#error").scroll_into_view_if_needed()
    page.locator("#error .plot svg").wait_for()
    assert page.locator("#error").get_by_role("button", name="show all").is_disabled()  # nothing was zoomed


@pytest.mark.parametrize("width", [1280, 1024, 800, 375])
def test_all_columns_of_a_table_are_visible(open_page: Open, width: int) -> None:
    columns = ["shift", "quantizer", "coder", "send", "feedback", "bits", "accuracy", "difference", "seeds", "MB up"]
    cells = [
        "no",
        "kmeans",
        "bitpack",
        "weights",
        "yes",
        "32+4",
        "83.8 ± 1.8",
        "-8.6 against 32 bits (within noise)",
        "3",
    ]
    lines = [TableRow("", [*cells, f"{n}.16"]) for n in range(10, 14)]
    report = Report("wide", "", [], [], [Section("s", "s", [], [Table("ends", "At the end", columns, lines)])])
    page = open_page(report, width)
    for narrower in (width, width - 40):  # also after the window has changed
        page.set_viewport_size({"width": narrower, "height": 900})
        page.wait_for_function("document.querySelector('#ends .scroll').scrollWidth <= document.body.clientWidth")
        scroll = page.locator("#ends .scroll").bounding_box()
        for cell, row in zip(page.locator("#ends tbody td:last-child").all(), lines, strict=True):
            box = cell.bounding_box()
            assert cell.inner_text() == row.cells[-1]
            assert scroll["x"] <= box["x"] < box["x"] + box["width"] <= scroll["x"] + scroll["width"] + 1
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
