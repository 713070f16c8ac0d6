"""A report as one self-contained HTML file, which loads no other resources."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from numbers import Integral
from string import Template
from typing import Any

from fedshift import __version__
from fedshift.report.charts import Chart, Choice, Curves, LegendLine, Report, Section, Table, TableRow, to_json

STYLES = ["page.css", "legend.css", "charts.css"]
SCRIPTS = [  # joined in this order into one script
    "base.js",
    "units.js",
    "scales.js",
    "lines.js",
    "legend.js",
    "tables.js",
    "tip.js",
    "frame.js",
    "paths.js",
    "seen.js",
    "ends.js",
    "curves.js",
    "readout.js",
    "zoom.js",
    "intervals.js",
    "points.js",
    "stacks.js",
    "heat.js",
    "histograms.js",
    "spots.js",
    "numbers.js",
    "figure.js",
    "start.js",
]
NUMERIC = re.compile(r"[-+\u2212]?\d[\d.,]*(e[-+]?\d+)?( ?± ?[\d.,]+)?( ?%| ?[a-zA-Z]{1,3}(/s)?)?")  # 1.5 ± 0.2 MB
ABSENT = {"", "-", "\u2013", "\u2014"}
LONG = 60  # characters; a longer cell may have several lines
PARAGRAPH = 4  # most sentences of a paragraph; a longer answer is a list
DIGITS = 6  # significant digits, more than any chart can show
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(report: Report) -> str:
    """Return the page. Its Content-Security-Policy allows only its own style and script, by their hashes."""
    markup = Markup(report)
    style = "\n".join(map(_part, STYLES))
    script = '"use strict";\n(() => {\n' + "\n".join(map(_part, SCRIPTS)) + "})();\n"
    return Template(_part("page.html")).substitute(
        version=escape(__version__),
        title=escape(report.title),
        about=escape(report.about),
        warnings=markup.warnings(),
        contents=markup.contents(),
        legend=markup.legend(),
        sections=markup.sections(),
        data=embedded(report.lines, markup.charts),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


def _part(name: str) -> str:
    return (files("fedshift.report") / "web" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class Markup:
    """Markup of the parts of a page; collects the charts in the order of their places."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.charts: list[Chart] = []
        self._ids: set[str] = set()
        self._known = {line.key: number for number, line in enumerate(report.lines)}
        self._anchors = [self._id(section.name) for section in report.sections]

    def warnings(self) -> str:
        if not self.report.warnings:
            return ""
        items = "".join(f"<li>{escape(warning)}</li>" for warning in self.report.warnings)
        return (
            f'<div class="warnings" role="note" aria-label="Warnings"><strong>Warnings</strong><ul>{items}</ul></div>'
        )

    def contents(self) -> str:
        if len(self.report.sections) < 2:
            return ""
        sections = zip(self._anchors, self.report.sections, strict=True)
        items = "".join(f'<li><a href="#{anchor}">{escape(section.title)}</a></li>' for anchor, section in sections)
        return f'<nav class="contents" aria-label="Contents"><h2>Contents</h2><ol>{items}</ol></nav>'

    def legend(self) -> str:
        """Placeholder of the legend; '' for a single line."""
        if len(self.report.lines) < 2:
            return ""
        return '<aside class="legend" id="legend" aria-label="Lines"></aside>'

    def sections(self) -> str:
        pairs = zip(self._anchors, self.report.sections, strict=True)
        return "\n".join(self._section(anchor, section) for anchor, section in pairs)

    def _section(self, anchor: str, section: Section) -> str:
        sentences = [escape(sentence) for sentence in section.answer]
        answer = f'<p class="answer">{" ".join(sentences)}</p>' if sentences else ""
        if len(sentences) > PARAGRAPH:
            answer = f'<ul class="answer">{"".join(f"<li>{sentence}</li>" for sentence in sentences)}</ul>'
        parts = "\n".join(self._part(part) for part in section.parts)
        heading = f'<h2 id="{anchor}-title">{escape(section.title)}</h2>'
        return f'<section id="{anchor}" aria-labelledby="{anchor}-title">{heading}{answer}\n{parts}</section>'

    def _part(self, part: Table | Chart | Choice) -> str:
        if isinstance(part, Table):
            return self._table(part)
        if isinstance(part, Choice):
            return self._choice(part)
        return self._figure(part)

    def _figure(self, chart: Chart, among: str = "", hidden: bool = False) -> str:
        """Placeholder of a chart; without a title if it repeats `among`, the title of a choice of charts."""
        number = len(self.charts)
        self.charts.append(chart)
        title = "" if among and chart.title.startswith(among) else f"<h3>{escape(chart.title)}</h3>"
        caption = f"<p>{escape(chart.caption)}</p>" if chart.caption else ""
        return (
            f'<figure id="{self._id(chart.name)}" data-chart="{number}"{" hidden" if hidden else ""}>'
            f"<figcaption>{title}{caption}</figcaption></figure>"
        )

    def _choice(self, choice: Choice) -> str:
        anchor = self._id(choice.name)
        options = "".join(f"<option>{escape(label)}</option>" for label, _ in choice.of)
        figures = "".join(self._figure(chart, choice.title, number > 0) for number, (_, chart) in enumerate(choice.of))
        return (
            f'<div class="choice" id="{anchor}"><div class="choose"><h3><label for="{anchor}-of">'
            f'{escape(choice.title)}</label></h3><select id="{anchor}-of">{options}</select></div>{figures}</div>'
        )

    def _table(self, table: Table) -> str:
        anchor = self._id(table.name)
        classes = ["number" if _numeric(table, place) else "" for place in range(len(table.columns))]
        head = "".join(
            f'<th scope="col" class="{kind}">{escape(column)}</th>'
            for column, kind in zip(table.columns, classes, strict=True)
        )
        body = "".join(self._row(row, classes) for row in table.rows)
        whole = (
            f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{anchor}-title">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )
        title = f'<h3 id="{anchor}-title">{escape(table.title)} <small class="left-out"></small></h3>'
        caption = f"<p>{escape(table.caption)}</p>" if table.caption else ""
        if table.folded:
            return f'<details class="table" id="{anchor}"><summary>{title}</summary>{caption}{whole}</details>'
        return f'<div class="table" id="{anchor}">{title}{caption}{whole}</div>'

    def _row(self, row: TableRow, classes: list[str]) -> str:
        line = f' data-line="{self._known[row.line]}"' if row.line in self._known else ""
        cells = [
            (escape(cell), "long" if len(cell) > LONG else kind) for cell, kind in zip(row.cells, classes, strict=True)
        ]
        first = "".join(f'<th scope="row" class="{kind}">{cell}</th>' for cell, kind in cells[:1])
        rest = "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in cells[1:])
        return f"<tr{line}>{first}{rest}</tr>"

    def _id(self, name: str) -> str:
        """Unique id for the page, usable in a URL."""
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"
        number = 2
        found = slug
        while found in self._ids:
            found, number = f"{slug}-{number}", number + 1
        self._ids.add(found)
        return found


def _numeric(table: Table, place: int) -> bool:
    cells = [row.cells[place].strip() for row in table.rows]
    present = [cell for cell in cells if cell not in ABSENT]
    return bool(present) and all(NUMERIC.fullmatch(cell) for cell in present)


def embedded(lines: Sequence[LegendLine], charts: Sequence[Chart]) -> str:
    """JSON data of the page, escaped so that no text can end the script element or begin a comment in it."""
    shared: dict[tuple[float, ...], int] = {}
    drawn = [_chart(chart, shared) for chart in charts]
    whole = {"lines": to_json(lines, rounded), "charts": drawn, "shared": [list(x) for x in shared]}
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escaped in ESCAPES.items():
        text = text.replace(character, escaped)
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, as in names that are not valid UTF-8


def rounded(value: float) -> float | int | None:
    """
    >>> [rounded(x) for x in (1 / 3, float("nan"), 5.0, 1e300)]
    [0.333333, None, 5, 1e+300]
    """
    if isinstance(value, Integral):
        return int(value)
    value = float(value)
    if not math.isfinite(value):
        return None  # like values that were not measured
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def _chart(chart: Chart, shared: dict[tuple[float, ...], int]) -> dict[str, Any]:
    """Chart as JSON values; x values, which many curves share, are stored once and referenced by index."""
    whole: dict[str, Any] = to_json(chart, rounded)
    if isinstance(chart, Curves):
        for panel in whole["panels"]:
            panel["curves"] = [_curve(curve, shared) for curve in panel["curves"]]
    return whole


def _curve(curve: dict[str, Any], shared: dict[tuple[float, ...], int]) -> dict[str, Any]:
    present = {name: value for name, value in curve.items() if value}
    return {"line": "", "label": "", "y": [], **present, "x": shared.setdefault(tuple(curve["x"]), len(shared))}
