"""The page as text: its content, its policy, and hostile names."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fedshift
from fedshift.report.charts import Axis, Curve, Curves, Heat, LegendLine, Panel, Report, Section, Table, TableRow
from fedshift.report.page import SCRIPTS, STYLES, render
from fedshift.report.style import COLOURS
from tests.report import made

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 & \"quoted\" 'so' $title"
WEB = Path(fedshift.__file__).parent / "report" / "web"


class Outline(HTMLParser):
    """Elements of a page, and the texts of scripts, styles and cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._within: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._within:
            self.texts[tag][-1] += data


def embedded(page: str) -> Any:
    return json.loads(Outline(page).texts["script"][0])


def hostile() -> Report:
    """Report in which every text of a user is hostile."""
    line = LegendLine("k", HOSTILE, {HOSTILE: HOSTILE}, 0, "", [HOSTILE])
    curves = Curves(
        HOSTILE, HOSTILE, HOSTILE, Axis(HOSTILE), Axis(HOSTILE), [Panel(HOSTILE, [Curve("k", [1, 2], [1, 2])])]
    )
    heat = Heat(HOSTILE, HOSTILE, HOSTILE, Axis(HOSTILE), [HOSTILE], [HOSTILE], [[1]], ["k"], [HOSTILE])
    table = Table(HOSTILE, HOSTILE, [HOSTILE], [TableRow("k", [HOSTILE])])
    section = Section(HOSTILE, HOSTILE, [HOSTILE], [table, curves, heat])
    return Report(HOSTILE, HOSTILE, [HOSTILE], [line, line._replace(key="k2")], [section])


@pytest.fixture(scope="module")
def demo() -> str:
    return render(made.demo())


def test_no_name_becomes_an_element() -> None:
    page = render(hostile())
    outline = Outline(page)
    calm = Outline(render(made.demo()))
    assert {tag for tag, _ in outline.elements} <= {tag for tag, _ in calm.elements}
    assert [tag for tag, _ in outline.elements].count("script") == 2
    assert not any(name.startswith("on") for _, attributes in outline.elements for name in attributes)
    assert "\u2028" not in outline.texts["script"][0]
    assert "<!--" not in page
    data = embedded(page)
    assert data["lines"][0]["label"] == HOSTILE
    assert data["charts"][0]["panels"][0]["title"] == HOSTILE
    assert outline.texts["th"] == [HOSTILE, HOSTILE]
    assert outline.texts["title"] == [HOSTILE]


def test_only_the_pages_own_style_and_script_are_allowed(demo: str) -> None:
    outline = Outline(demo)
    policy = next(str(at["content"]) for _, at in outline.elements if at.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(outline.texts[tag][-1].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not any("style" in attributes for _, attributes in outline.elements)


def test_the_page_contains_no_external_address(demo: str) -> None:
    assert set(re.findall(r"(?:https?:)?//[a-z][\w.]*[^\s\"']*", demo.replace("// ", ""))) <= {
        "http://www.w3.org/2000/svg"
    }
    for _, attributes in Outline(demo).elements:
        assert not {"src", "srcset", "action", "ping"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith(("#", "data:"))


def test_the_page_names_its_generator(demo: str) -> None:
    metas = [attributes for tag, attributes in Outline(demo).elements if tag == "meta"]
    assert {"name": "generator", "content": f"fedshift {fedshift.__version__}"} in metas


def test_a_sweep_of_120_runs_is_a_page_of_at_most_two_megabytes() -> None:
    assert len(render(made.sweep()).encode()) < 2e6


def test_numbers_of_charts_are_those_of_the_report_to_six_digits(demo: str) -> None:
    data = embedded(demo)
    accuracy = next(part for part in made.demo().sections[0].parts if isinstance(part, Curves))
    drawn = next(chart for chart in data["charts"] if chart["name"] == "accuracy")
    for curve, values in zip(accuracy.panels[0].curves, drawn["panels"][0]["curves"], strict=True):
        assert data["shared"][values["x"]] == list(curve.x)
        assert [y is None for y in values["y"]] == [y is None for y in curve.y]
        assert [y for y in values["y"] if y is not None] == pytest.approx(
            [y for y in curve.y if y is not None], rel=1e-5
        )


def test_curves_over_the_same_x_share_it() -> None:
    data = embedded(render(made.sweep()))
    assert len(data["shared"]) == 41  # rounds, and each line's own times


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_drawn(value: float) -> None:
    curve = Curve("", [1, 2, 3], [0.5, value, 0.25])
    curves = Curves("a", "a", "", Axis("x"), Axis("y"), [Panel("", [curve])])
    report = Report("t", "", [], [], [Section("s", "s", [], [curves])])
    assert embedded(render(report))["charts"][0]["panels"][0]["curves"][0]["y"] == [0.5, None, 0.25]


def test_tables_contain_every_cell_and_warnings_are_shown(demo: str) -> None:
    report = made.demo()
    outline = Outline(demo)
    cells = {cell.strip() for tag in ("td", "th") for cell in outline.texts[tag]}
    for section in report.sections:
        for part in section.parts:
            if isinstance(part, Table):
                assert {cell for row in part.rows for cell in row.cells} <= cells
    assert report.warnings[0] in demo
    skip, *contents = [attributes["href"] for tag, attributes in outline.elements if tag == "a"]
    assert skip == "#report"
    assert contents == [f"#{section.name}" for section in report.sections]


def test_ids_are_unique() -> None:
    ids = [attributes["id"] for _, attributes in Outline(render(hostile())).elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_one_line_needs_no_legend() -> None:
    assert 'id="legend"' not in render(made.one())


def test_the_page_has_the_palette_of_the_figures() -> None:
    style = (WEB / "charts.css").read_text("utf-8").lower()
    assert all(colour.lower() in style for colour in COLOURS if colour != "#000000")  # which is the text's own


def test_every_file_of_the_page_is_used() -> None:
    assert {path.name for path in WEB.iterdir()} == {*STYLES, *SCRIPTS, "page.html"}


def test_a_report_without_runs_or_sections_is_a_page() -> None:
    assert "<h1>empty</h1>" in render(Report("empty", "", [], [], []))


def test_many_sentences_are_a_list() -> None:
    few, many = (Section(f"s{n}", "s", [f"Sentence {i}." for i in range(n)], []) for n in (4, 5))
    outline = Outline(render(Report("r", "", [], [], [few, many])))
    assert [dict(attributes)["class"] for tag, attributes in outline.elements if tag == "ul"] == ["answer"]
    assert outline.texts["li"][-5:] == [f"Sentence {i}." for i in range(5)]
