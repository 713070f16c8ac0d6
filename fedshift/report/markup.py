"""What of a report is text: sections, tables, and the places where charts will be drawn."""

import re
from html import escape

from fedshift.report.charts import Chart, Choice, Report, Row, Section, Table

NUMERIC = re.compile(r"[-+\u2212]?\d[\d.,]*(e[-+]?\d+)?( ?± ?[\d.,]+)?( ?%| ?[a-zA-Z]{1,3}(/s)?)?")  # 1.5 ± 0.2 MB
ABSENT = {"", "-", "\u2013", "\u2014"}
LONG = 60  # characters of a cell that is allowed several lines
PARAGRAPH = 4  # sentences of an answer that are one; more are a list


class Markup:
    """The parts of one page, and the charts in the order of their places."""

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
            f'<div class="warnings" role="note" aria-label="Warnings"><strong>Take care</strong><ul>{items}</ul></div>'
        )

    def contents(self) -> str:
        if len(self.report.sections) < 2:
            return ""
        sections = zip(self._anchors, self.report.sections, strict=True)
        items = "".join(f'<li><a href="#{anchor}">{escape(section.title)}</a></li>' for anchor, section in sections)
        return f'<nav class="contents" aria-label="Contents"><h2>Contents</h2><ol>{items}</ol></nav>'

    def legend(self) -> str:
        """A place for it: one line needs none."""
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
        """An empty place; one of several that are chosen from does not say again what they are called together."""
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

    def _row(self, row: Row, classes: list[str]) -> str:
        line = f' data-line="{self._known[row.line]}"' if row.line in self._known else ""
        told = [
            (escape(cell), "long" if len(cell) > LONG else kind) for cell, kind in zip(row.cells, classes, strict=True)
        ]
        first = "".join(f'<th scope="row" class="{kind}">{cell}</th>' for cell, kind in told[:1])
        rest = "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in told[1:])
        return f"<tr{line}>{first}{rest}</tr>"

    def _id(self, name: str) -> str:
        """A name that can stand in an address, and that no other place on the page has."""
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "part"
        number = 2
        found = plain
        while found in self._ids:
            found, number = f"{plain}-{number}", number + 1
        self._ids.add(found)
        return found


def _numeric(table: Table, place: int) -> bool:
    cells = [row.cells[place].strip() for row in table.rows]
    told = [cell for cell in cells if cell not in ABSENT]
    return bool(told) and all(NUMERIC.fullmatch(cell) for cell in told)
